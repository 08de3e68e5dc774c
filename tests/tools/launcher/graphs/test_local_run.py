"""Jobs on this machine: output on the terminal, failures, killed ranks, Ctrl-C, cancel and time limits."""

import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pretrain.common import gpus
from pretrain.common.ranks.rank import STOP_REASON
from pretrain.common.run.state import read_json_or_empty
from tests.errors import refused
from tests.tools.launcher.fake_stages import FakeAlone, FakeOnCpu
from tests.tools.launcher.helpers import HERE, Attached, fake, graph_of, job_of, run_alone, steps, wait_for
from tools.launcher.execution import jobs, status
from tools.launcher.execution.job import query_states
from tools.launcher.graphs.graph import Node
from tools.launcher.graphs.start import start_graph
from tools.launcher.job_options import JobOptions

TWO_RANKS = replace(HERE, tasks=2)
TWO_STAGES = replace(HERE, tasks=1, parallel=2)


def test_two_ranks_and_their_environment(tmp_path: Path, capfd: pytest.CaptureFixture):
    assert run_alone(fake(tmp_path, "count", 2), TWO_RANKS) == 0
    assert "counting from 0" in capfd.readouterr().out
    assert read_json_or_empty(tmp_path / "results.json")["ranks"]["WORLD_SIZE"] == "2"
    status.print_status(tmp_path)
    assert "complete" in capfd.readouterr().out
    jobs.print_logs(tmp_path, rank=1, follow=False)
    assert "counting from 0" in capfd.readouterr().out


def test_a_killed_rank_ends_the_others(tmp_path: Path, capfd: pytest.CaptureFixture):
    def kill() -> None:
        wait_for(lambda: [path.read_text() != "" for path in tmp_path.glob("pid.*")] == [True, True])
        os.kill(int((tmp_path / "pid.1").read_text()), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    assert run_alone(fake(tmp_path, "hang"), TWO_RANKS) == 1
    assert "failed on rank 1" in (printed := capfd.readouterr().err)
    assert "rank 1: it was killed by SIGKILL (out of memory?)" in printed
    assert query_states([job_of(tmp_path)])[0].word == "ENDED"


def attach(folder: Path, function: str, *args: object, by: tuple[str, ...] = ()) -> Attached:
    return Attached(f"run_alone(fake({str(folder)!r}, {function!r}, *{args!r}))", by)


COUNT = ("count", 1000, 0.1)


def test_a_second_ctrl_c_while_the_first_one_is_answered_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def write(self, text: str) -> int:
            if "press Ctrl-C again" in text and "press" not in self.getvalue():
                super().write(text)
                os.kill(os.getpid(), signal.SIGINT)
            return super().write(text)

    def interrupt() -> None:
        wait_for((tmp_path / "count.0").exists)
        os.kill(os.getpid(), signal.SIGINT)

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    threading.Thread(target=interrupt, daemon=True).start()
    assert run_alone(fake(tmp_path, "count", 1000, 0.1, "", True)) == 130
    assert "stopped immediately by a second Ctrl-C" in terminal.getvalue()


@pytest.mark.parametrize(
    ("stage", "moment", "how", "said"),
    [
        (COUNT, "count.0", "Ctrl-C", "Ctrl-C: counted to"),
        (COUNT, "launch/launch.json", "Ctrl-C", "Ctrl-C"),  # a rank that is still importing dies by the signal
        (("count", 1000, 0.1, "", True), "count.0", "twice", "stopped immediately by a second Ctrl-C"),
        (COUNT, "count.0", "cancel", "launch.py cancel"),
        (COUNT, "launch/launch.json", "now", "launch.py cancel --now"),
    ],
)
def test_a_stage_that_its_user_ends_is_stopped_and_has_not_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture, stage: tuple[Any, ...], moment: str, how: str, said: str
):
    started = attach(tmp_path, *stage)
    wait_for((tmp_path / moment).exists)
    if how == "cancel":
        refused(lambda: run_alone(fake(tmp_path)), "launch is in use: the launcher of a run on")
    if how in ("cancel", "now"):
        jobs.cancel(tmp_path, now=how == "now")
    else:
        started.signal_twice(signal.SIGINT, signal.SIGINT) if how == "twice" else started.signal(signal.SIGINT)
    printed = started.end()
    assert said in printed and "to continue: python tools/launch.py resume" in printed
    assert not re.search("SIG|killed|memory|failed|without reporting an error", printed)
    capfd.readouterr()
    status.print_status(tmp_path)
    printed = capfd.readouterr().out.replace(STOP_REASON, "")
    assert re.search(r"fake +stopped", printed)
    assert not re.search("SIG|running|failed|without reporting an error", printed)
    jobs.cancel(tmp_path)
    assert f"no running jobs in {tmp_path}" in capfd.readouterr().out
    if stage == COUNT and moment == "count.0":
        done = int((tmp_path / "count.0").read_text())
        assert run_alone(fake(tmp_path, "count", done + 2)) == 0
        assert steps(tmp_path) == list(range(done + 2))


@pytest.mark.parametrize(("by", "status"), [((), 130), (("nohup",), 0)])
def test_only_a_run_under_nohup_outlives_its_terminal(tmp_path: Path, by: tuple[str, ...], status: int):
    started = attach(tmp_path, "count", 30, 0.1, by=by)
    wait_for((tmp_path / "count.0").exists)
    started.signal(signal.SIGHUP)
    started.end(status)
    assert (len(steps(tmp_path)) == 30) is (status == 0)


def test_the_end_of_a_session_sends_several_signals_and_leaves_time_for_the_checkpoint(tmp_path: Path):
    """As systemd does, or a shell and the kernel when a terminal is closed."""
    started = attach(tmp_path, "count", 1000, 0.5)
    wait_for((tmp_path / "count.0").exists)
    started.signal_twice(signal.SIGTERM, signal.SIGHUP)
    assert "SIGTERM: counted to" in started.end().replace("the end of its terminal (SIGHUP)", "SIGTERM")
    assert len(steps(tmp_path)) == int((tmp_path / "count.0").read_text())


def test_ctrl_c_at_the_end_of_a_stage_still_ends_the_command(tmp_path: Path):
    """The stage completes because no step is left to stop after, but a pipeline must not start the next one."""
    started = attach(tmp_path, "count", 20, 0.1, "", True)
    wait_for((tmp_path / "count.0").exists)
    started.signal(signal.SIGINT)
    assert "finished before the stop request" in started.end()
    assert steps(tmp_path) == list(range(20))


def test_ctrl_c_while_the_job_is_being_recorded(tmp_path: Path, programs: Callable):
    """The job has started, but the launcher is still asking git about the code."""
    programs("/usr/bin:/bin", git="exec sleep 30")
    started = attach(tmp_path, *COUNT)
    wait_for((tmp_path / "count.0").exists)
    started.signal(signal.SIGINT)  # ends git, too
    assert "Ctrl-C: counted to" in started.end()
    assert query_states([job_of(tmp_path)])[0].word == "ENDED"


@pytest.mark.parametrize(("count", "variable"), [(0, None), (2, "0")])
def test_a_job_is_told_which_gpus_it_has(tmp_path: Path, monkeypatch, count: int, variable: str | None):
    """A job without GPUs keeps the user's CUDA_VISIBLE_DEVICES."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "_count_devices", lambda: count)
    assert run_alone(fake(tmp_path, "meet", str(tmp_path)), JobOptions(cluster="local", tasks=1)) == 0
    assert read_json_or_empty(tmp_path / "results.json")["CUDA_VISIBLE_DEVICES"] == variable


def pair(folder: Path) -> list[Node]:
    """Build two stages, each of which fails unless the other one runs at the same time."""
    return [Node(a, fake(folder / a, "meet", str(folder / b))) for a, b in (("a", "b"), ("b", "a"))]


def test_two_stages_run_at_the_same_time_each_with_its_own_gpus(tmp_path: Path, monkeypatch, capfd):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    last = Node("last", fake(tmp_path / "last", "count", 1), ("a", "b"))
    assert start_graph(graph_of(tmp_path, *pair(tmp_path), last), replace(TWO_STAGES, gpus=1, cpus_per_task=1)) == 0
    variables = [read_json_or_empty(tmp_path / name / "results.json") for name in ("a", "b")]
    assert sorted(values["CUDA_VISIBLE_DEVICES"] for values in variables) == ["3", "5"]
    assert {values["OMP_NUM_THREADS"] for values in variables} == {"1"}
    printed = capfd.readouterr().out.splitlines()
    assert "last | counting from 0" in printed  # whose line it is
    assert [line.split(" done: ")[0] for line in printed if " done: " in line] == ["[1/3]", "[2/3]", "[3/3]"]


def test_a_stage_waits_for_its_gpus_and_one_without_gpus_does_not(tmp_path: Path, monkeypatch, capfd):
    """Stage c waits for the GPUs that a has; b, which needs none, meets a; d does not take the third one before c."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    a, b = pair(tmp_path)
    b = replace(b, stage=FakeOnCpu(b.stage.folder, b.stage.options))
    d = Node("d", FakeAlone(str(tmp_path / "d")))
    graph = graph_of(tmp_path, a, Node("c", fake(tmp_path / "c")), d, b)
    assert start_graph(graph, replace(TWO_STAGES, gpus=2, parallel=3)) == 0
    printed = capfd.readouterr().out
    assert printed.index("done: a, ") < printed.index("started c -> ") < printed.index("started d -> ")


def test_a_failure_ends_its_own_branch_only(tmp_path: Path, capfd: pytest.CaptureFixture):
    bad = Node("bad", fake(tmp_path / "bad", "fail", 0, True))
    child = Node("child", fake(tmp_path / "child"), ("bad",))
    assert start_graph(graph_of(tmp_path, bad, child, *pair(tmp_path)), TWO_STAGES) == 2
    printed = capfd.readouterr().err
    assert "failed: bad; the other branches continue" in printed
    assert "skipped child, because bad failed" in printed
    assert (tmp_path / "a/results.json").exists() and (tmp_path / "b/results.json").exists()


def test_cancel_stops_all_of_them_and_starts_no_other(tmp_path: Path):
    nodes = f"(Node(name, fake(Path({str(tmp_path)!r}, name), 'count', 1000, 0.05)) for name in 'abc')"
    started = Attached(f"start_graph(graph_of(Path({str(tmp_path)!r}), *{nodes}), {TWO_STAGES!r})")
    wait_for(lambda: (tmp_path / "a/count.0").exists() and (tmp_path / "b/count.0").exists())
    jobs.cancel(tmp_path)
    printed = started.end()
    for name in "ab":
        assert 0 < len(steps(tmp_path / name)) == int((tmp_path / name / "count.0").read_text()) < 1000
    assert f"to continue: python tools/launch.py resume {tmp_path}" in printed
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("open_output", [os.pipe, os.openpty], ids=["pipe", "terminal"])
def test_a_pipeline_goes_on_when_nobody_reads_its_output(tmp_path: Path, open_output: Callable[[], tuple[int, int]]):
    reader, writer = sorted(open_output())
    nodes = f"(Node(name, fake(Path({str(tmp_path)!r}, name), 'count', 20, 0.02)) for name in 'ab')"
    started = Attached(f"start_graph(graph_of(Path({str(tmp_path)!r}), *{nodes}), {HERE!r})", stdout=writer)
    os.close(writer)
    assert os.read(reader, 1)
    os.close(reader)
    assert "Error" not in started.end(0)
    assert [len(steps(tmp_path / name)) for name in "ab"] == [20, 20]


def test_the_status_says_that_nobody_will_start_what_a_killed_launcher_has_left(tmp_path: Path, capfd):
    nodes = f"(Node(name, fake(Path({str(tmp_path)!r}, name), 'count', 1000, 0.05)) for name in 'ab')"
    started = Attached(f"start_graph(graph_of(Path({str(tmp_path)!r}), *{nodes}), {HERE!r})")
    wait_for((tmp_path / "a/count.0").exists)
    assert status.print_status(tmp_path) == 0
    assert "nobody" not in capfd.readouterr().out
    started.kill()
    for states in ("1 running, 1 not started", "1 stopped, 1 not started"):
        assert status.print_status(tmp_path) == 0
        printed = capfd.readouterr().out
        assert states in printed and "not started: 1 stage, which nobody will start, because the launcher" in printed
        assert f"to continue: python tools/launch.py resume {tmp_path}" in printed
        jobs.cancel(tmp_path)
        capfd.readouterr()
        wait_for(lambda: query_states([job_of(tmp_path / "a")])[0].word == "ENDED")
