"""Jobs on this machine: output on the terminal, failures, deaths, Ctrl-C, time limits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tools.launcher import control
from tools.launcher.job import LOCAL_STOP
from tools.launcher.options import Options
from tools.launcher.ranks import attempts
from tools.launcher.run import run_stage
from tools.launcher.spec import StageSpec, read_json

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fake_stages_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def here(tasks: int = 1, **given: object) -> Options:
    return Options(**{"cluster": "local", "gpus": 0, "tasks": tasks, **given})  # type: ignore[arg-type]


def stage(folder: Path, function: str, *args: object) -> StageSpec:
    return StageSpec("fake", str(folder), f"tests.tools.fake_stages:{function}", args=(str(folder), *args))


def job_of(folder: Path) -> dict:
    return read_json(folder / "launch" / "launch.json")["jobs"][-1]


def steps(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "steps.0").read_text().split()]


def test_two_ranks_and_their_environment(tmp_path: Path, capfd: pytest.CaptureFixture):
    assert run_stage(stage(tmp_path, "count", 2), here(2)) == 0
    assert "counting from 0" in (shown := capfd.readouterr().out) and "submitit" not in shown
    assert read_json(tmp_path / "results.json")["ranks"]["WORLD_SIZE"] == "2"
    control.print_status(tmp_path)
    assert "done" in capfd.readouterr().out
    control.print_logs(tmp_path, rank=1, follow=False)
    assert "counting from 0" in capfd.readouterr().out


def test_the_first_failing_rank_is_shown_and_the_others_end(tmp_path: Path, capfd: pytest.CaptureFixture):
    assert run_stage(stage(tmp_path, "fail", 1), here(2)) == 1
    shown = capfd.readouterr().err
    assert "RuntimeError: rank 1 cannot go on" in shown and "failed on rank 1" in shown
    assert not (tmp_path / "launch/complete.json").exists()


def test_a_users_mistake_in_a_job_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture):
    assert run_stage(stage(tmp_path, "fail", 0, True), here()) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == "error: the value is 3; it must be 2"


def test_a_killed_rank_ends_the_others(tmp_path: Path, capfd: pytest.CaptureFixture):
    def kill() -> None:
        while len(pids := list(tmp_path.glob("pid.*"))) < 2 or not all(p.read_text() for p in pids):
            time.sleep(0.05)
        os.kill(int((tmp_path / "pid.1").read_text()), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    assert run_stage(stage(tmp_path, "hang"), here(2)) == 1
    assert "rank 1: it was killed by SIGKILL (out of memory?)" in capfd.readouterr().err


def test_a_full_disk_hides_neither_the_error_nor_the_end(tmp_path: Path, capfd: pytest.CaptureFixture):
    """Rank 0 waits for rank 1, which cannot write to the folder of records."""
    assert run_stage(stage(tmp_path, "fail_on_full_disk", 1), here(2)) == 1
    shown = capfd.readouterr().err
    assert "cannot write results.json: No space left on device" in shown and "out of memory" not in shown
    assert control.job_state(job_of(tmp_path)) == "ENDED"


def test_every_rank_has_the_controllers_count_of_attempts(tmp_path: Path):
    assert run_stage(stage(tmp_path, "come_back", 1), here(2)) == 0
    told = [(tmp_path / f"starts.{rank}").read_text().splitlines() for rank in range(2)]
    assert told[0] == told[1] and len(set(told[0])) == 2  # another MASTER_PORT each time
    assert [one["state"] for one in attempts(tmp_path, job_of(tmp_path)["id"])] == ["requeued", "done"]


@pytest.mark.slow
def test_a_job_comes_back_more_often_than_submitit_would_let_it(tmp_path: Path):
    assert run_stage(stage(tmp_path, "come_back", 7), here()) == 0
    assert len((tmp_path / "starts.0").read_text().splitlines()) == 8


def command(folder: Path, count: int, deaf: bool = False) -> list[str]:
    return command_of(folder, "count", count, 0.1, "", deaf)


def command_of(folder: Path, function: str, *args: object) -> list[str]:
    code = (
        "import sys; from tools.launcher.run import run_stage; from tools.launcher.options import Options\n"
        "from tools.launcher.spec import StageSpec\n"
        f"folder, args = {str(folder)!r}, {(str(folder), *args)!r}\n"
        f"spec = StageSpec('fake', folder, 'tests.tools.fake_stages:{function}', args=args)\n"
        "sys.exit(run_stage(spec, Options(cluster='local', gpus=0)))"
    )
    return [sys.executable, "-c", code]


def wait_for_count(folder: Path) -> None:
    wait_for(folder / "count.0")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ctrl_c_ends_what_it_started_with_a_checkpoint(tmp_path: Path):
    # A session of its own: the signal goes to the whole foreground group, as a terminal sends it.
    started = subprocess.Popen(
        command(tmp_path, 1000), cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    wait_for_count(tmp_path)
    os.killpg(started.pid, signal.SIGINT)
    _, shown = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "to go on: the same command again" in shown
    assert "Ctrl-C: counted to" in shown and "SIGTERM" not in shown
    assert control.job_state(job_of(tmp_path)) == "ENDED"
    done = int((tmp_path / "count.0").read_text())
    assert run_stage(stage(tmp_path, "count", done + 2), here()) == 0
    assert steps(tmp_path) == list(range(done + 2))


def test_ctrl_c_at_a_stages_end_still_ends_the_command(tmp_path: Path):
    """The stage completes, having no step left to stop after; a pipeline must not go on to the next one."""
    started = subprocess.Popen(
        command(tmp_path, 20, deaf=True), cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    wait_for_count(tmp_path)
    os.killpg(started.pid, signal.SIGINT)
    _, shown = started.communicate(timeout=60)
    assert started.returncode == 130 and "was at its end and is complete" in shown
    assert steps(tmp_path) == list(range(20))


def test_a_second_ctrl_c_is_no_lack_of_memory(tmp_path: Path):
    started = subprocess.Popen(
        command(tmp_path, 1000, deaf=True), cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    assert started.stderr is not None
    wait_for_count(tmp_path)
    os.killpg(started.pid, signal.SIGINT)
    while "stopping after the current step" not in started.stderr.readline():
        pass
    os.killpg(started.pid, signal.SIGINT)
    _, shown = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "ended at once by a second Ctrl-C" in shown and "killed" not in shown and "memory" not in shown


def test_a_second_ctrl_c_releases_the_folder_and_status_tells_of_it(tmp_path: Path, capfd: pytest.CaptureFixture):
    started = subprocess.Popen(
        command_of(tmp_path, "own"), cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    assert started.stderr is not None
    wait_for(tmp_path / "owned")
    assert list(tmp_path.glob(".owner.*"))
    os.killpg(started.pid, signal.SIGINT)
    while "stopping after the current step" not in started.stderr.readline():
        pass
    os.killpg(started.pid, signal.SIGINT)
    started.communicate(timeout=60)
    assert started.returncode == 130
    assert not list(tmp_path.glob(".owner.*"))
    control.print_status(tmp_path)
    shown = capfd.readouterr().out
    assert "fake         stopped" in shown and "it was ended by a second Ctrl-C" in shown
    assert "running" not in shown and "without saying why" not in shown


def test_ctrl_c_before_the_ranks_can_hear_it(tmp_path: Path, capfd: pytest.CaptureFixture):
    """A rank that is still importing dies by the signal, which is no failure of its own."""
    started = subprocess.Popen(
        command(tmp_path, 1000), cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    assert started.stderr is not None
    wait_for(tmp_path / "launch/launch.json")
    time.sleep(0.2)  # its handlers are set right after this record
    os.killpg(started.pid, signal.SIGINT)
    _, shown = started.communicate(timeout=60)
    assert started.returncode == 130 and "SIGTERM" not in shown and "without saying why" not in shown
    control.print_status(tmp_path)
    shown = capfd.readouterr().out
    assert "fake         stopped" in shown and "Ctrl-C" in shown and "SIGTERM" not in shown.replace(LOCAL_STOP, "")


def test_ctrl_c_while_the_job_is_being_recorded(tmp_path: Path):
    """The job has begun, but the launcher still asks git about the code."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/git").write_text("#!/bin/sh\nexec sleep 30\n")
    (tmp_path / "bin/git").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    started = subprocess.Popen(
        command(tmp_path, 1000), cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE, text=True, env=environment
    )
    wait_for_count(tmp_path)
    os.killpg(started.pid, signal.SIGINT)  # ends git, too
    _, shown = started.communicate(timeout=60)
    assert started.returncode == 130 and "Ctrl-C: counted to" in shown
    assert control.job_state(job_of(tmp_path)) == "ENDED"


@pytest.mark.parametrize("now", [False, True])
@pytest.mark.parametrize("when", ["at work", "at its start"])
def test_an_attached_command_says_that_its_job_was_cancelled(
    tmp_path: Path, capfd: pytest.CaptureFixture, when: str, now: bool
):
    started = subprocess.Popen(
        command(tmp_path, 1000), cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    wait_for(tmp_path / ("count.0" if when == "at work" else "launch/launch.json"))
    control.cancel(tmp_path, now)
    _, shown = started.communicate(timeout=60)
    assert started.returncode == 130, shown
    assert "launch.py cancel" in shown and "SIG" not in shown and "failed" not in shown
    assert "to go on: the same command again" in shown
    control.print_status(tmp_path)
    shown = capfd.readouterr().out
    assert "fake         stopped" in shown and "failed" not in shown and "without saying why" not in shown


def test_a_second_job_is_refused_and_cancel_ends_the_first(tmp_path: Path, capfd: pytest.CaptureFixture):
    started = subprocess.Popen(command(tmp_path, 1000), cwd=ROOT, start_new_session=True)
    wait_for_count(tmp_path)
    from pretrain.common.errors import UserError

    with pytest.raises(UserError, match="is being worked on by job"):
        run_stage(stage(tmp_path, "count", 3), here())
    control.cancel(tmp_path)
    assert started.wait(timeout=60) != 0
    assert attempts(tmp_path, job_of(tmp_path)["id"])[-1]["state"] == "stopped"
    control.cancel(tmp_path)
    assert f"nothing runs in {tmp_path}" in capfd.readouterr().out


@pytest.mark.slow
def test_a_time_limit_of_this_machine_comes_back(tmp_path: Path):
    assert run_stage(stage(tmp_path, "count", 60, 0.25), here(time="1", signal_delay=52)) == 0
    job = job_of(tmp_path)
    states = [one["state"] for one in attempts(tmp_path, job["id"])]
    assert states[0] == "requeued" and states[-1] == "done"
    assert steps(tmp_path) == list(range(60))
