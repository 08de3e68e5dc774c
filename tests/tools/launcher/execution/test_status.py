"""The status of a pipeline says what has not started and what it waits for, and asks SLURM once."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrain.common.config import extensions
from pretrain.common.errors import UserError
from pretrain.common.interrupt import Stopped
from pretrain.common.run.lease import claim
from pretrain.common.run.stage import enter_run_folder
from pretrain.common.run.state import RunContext, update_state, write_failure
from tests.tools.launcher.helpers import HERE, LOCAL, SLURM, end, fake, shown, started
from tools import launch
from tools.launcher.execution import job, status
from tools.launcher.execution.slurm import JobState
from tools.launcher.graphs.graph import Node, build_graph, write_graph


def by_key(folder: Path) -> dict[str, dict[str, Any]]:
    return {entry["key"]: entry for entry in status.collect(folder)}


def test_stages_that_have_not_started_say_what_they_wait_for(tmp_path: Path, capsys: pytest.CaptureFixture):
    folder = tmp_path / "runs/p"
    parents = {"a": (), "b": ("a",), "c": ("a", "b")}
    nodes = tuple(Node(name, fake(folder / name), before) for name, before in parents.items())
    write_graph(build_graph(str(folder), nodes, fake(folder / "report")), HERE)
    started(tmp_path / "runs/p/a", LOCAL)
    end(tmp_path / "runs/p/a", "complete")
    with claim(folder, "a pipeline"):  # by the launcher
        states = {key: (entry["state"], entry["waits_for"]) for key, entry in by_key(tmp_path / "runs").items()}
        assert states == {"a": ("complete", []), "b": ("not started", []), "c": ("not started", ["b"])}
        assert launch.main(["status", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("2 not started, 1 complete\n")
    assert f"{tmp_path / 'runs/p/c'}: waits for b" in shown and "nobody" not in shown
    rows = [" ".join(line.split()[:3]) for line in shown.splitlines()[2:5]]
    assert rows == ["knn complete local", "fake not started", "fake not started"]


def test_slurm_is_asked_once_for_all_jobs(tmp_path: Path, programs: Callable):
    for number, name in enumerate("abc"):
        started(tmp_path / "runs" / name, {**SLURM, "id": str(70 + number)})
    squeue = "echo $* >> asked; echo '70|RUNNING|None|n'; echo '71|PENDING|Priority|n'"
    programs(squeue=squeue, sacct="echo $* >> asked; echo '72|OUT_OF_MEMORY|None|n'")
    states = {key: (entry["state"], entry["reason"]) for key, entry in by_key(tmp_path / "runs").items()}
    assert states == {"a": ("running", ""), "b": ("pending", "Priority"), "c": ("out_of_memory", "")}
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 2 and "70,71,72" in asked[0] and asked[1].endswith("-j 72")


def test_runs_without_the_launcher(tmp_path: Path):
    runs = tmp_path / "runs"
    with enter_run_folder("knn", runs / "complete", RunContext()):
        pass
    with pytest.raises(Stopped), enter_run_folder("linear", runs / "stopped", RunContext()):
        raise Stopped("SIGTERM")
    with pytest.raises(RuntimeError), enter_run_folder("transfer", runs / "failed", RunContext()):
        raise RuntimeError("a bug")
    update_state(runs / "lost", stage="transfer", state="running", job="", started=1.0, pid=1, attempt=0, host="h")
    (runs / "lost/metrics.json").write_text(json.dumps({"iteration": 4, "total_loss": 0.5}))
    started(runs / "job", LOCAL)
    with enter_run_folder("knn", runs / "job/knn", RunContext()):  # below the folder of another run
        pass
    with enter_run_folder("pretrain", runs / "running", RunContext()):
        entries = by_key(runs)
    states = {key: (entry["stage"], entry["state"], entry["reason"]) for key, entry in entries.items()}
    lost = "it exited without reporting an error"
    assert states == {
        "complete": ("knn", "complete", ""),
        "stopped": ("linear", "stopped", "SIGTERM"),
        "failed": ("transfer", "failed", "a bug"),
        "lost": ("transfer", "lost", lost),
        "running": ("pretrain", "running", ""),
        "job": ("knn", "lost", lost),
        "job/knn": ("knn", "complete", ""),
    }
    assert entries["failed"]["failure"]["error"] == "RuntimeError: a bug"
    assert entries["running"]["job"] == {"cluster": "process", "id": str(os.getpid())}
    assert entries["lost"]["progress"] == "step 5  total_loss 0.5"
    assert by_key(runs)["running"]["state"] == "complete"
    assert set(by_key(runs / "job")) == {".", "knn"}


def test_the_newest_start_of_a_stage_counts(tmp_path: Path):
    """A stage may be started by the launcher, by its own command, and by the launcher again."""
    started(tmp_path, {**LOCAL, "submitted": 1.0})
    end(tmp_path, "stopped", started=2.0)
    assert by_key(tmp_path)["."]["state"] == "stopped"
    with enter_run_folder("knn", tmp_path, RunContext()):
        assert by_key(tmp_path)["."]["state"] == "running"
    assert by_key(tmp_path)["."]["state"] == "complete"
    shutil.rmtree(tmp_path / "launch")
    started(tmp_path, {**LOCAL, "submitted": time.time() + 1})
    assert by_key(tmp_path)["."]["state"] == "lost"  # the job ended before its stage was started


def test_a_failure_stands_below_the_table_and_in_the_logs_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(extensions.VARIABLE)  # which `resume` would need
    folder = started(tmp_path / "run", {**LOCAL, "logs": str(tmp_path / "run/launch/s")})
    (folder / "launch/s").mkdir()
    (folder / "launch/s/0.out").write_text("a line\n")
    record = json.loads((folder / "launch/launch.json").read_text())
    (folder / "launch/launch.json").write_text(json.dumps({**record, "cwd": "/w", "command": "launch.py knn random"}))
    end(folder, "failed", attempt=1)
    write_failure(folder, 0, UserError("the data set holds too few images"), "s")
    assert launch.main(["status", str(folder)]) == 1
    counts, note, remedy, _, row = capsys.readouterr().out.splitlines()
    assert remedy.startswith("to continue: correct that") and remedy.endswith(": cd /w && python launch.py knn random")
    assert counts == "1 failed"
    assert row.split()[:5] == ["knn", "failed", "local", LOCAL["id"], "2"]
    assert note.startswith(f"failed: {folder}: rank 0 on ") and note.endswith(": the data set holds too few images")
    launch.main(["logs", str(folder.rename(tmp_path / "moved"))])
    assert capsys.readouterr() == ("a line\n", "error: the data set holds too few images\n")


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (UserError("DEVICE is cuda, but torch sees no CUDA device"), "correct that, then run the original command"),
        (RuntimeError("nccl has timed out"), "python tools/launch.py resume"),
        ("it was killed by SIGKILL", "python tools/launch.py resume"),
        (None, "correct that, then run the original command"),  # such as a line of the site's setup
    ],
)
def test_a_failure_has_one_remedy(
    tmp_path: Path, programs: Callable, capsys, error: Exception | str | None, remedy: str
):
    programs(squeue="echo '77|FAILED|NonZeroExitCode|n'")
    folder = started(tmp_path / "run", SLURM)
    if error:
        write_failure(folder, 0, error, "s")
    assert launch.main(["status", str(folder)]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "continue" in line or "resume" in line]
    assert line.startswith(f"to continue: {remedy}")


def test_the_logs_of_a_pipeline_are_those_of_the_stage_that_runs_or_failed_last(tmp_path: Path, monkeypatch, capsys):
    def shown() -> str:
        assert launch.main(["logs", str(tmp_path)]) == 0
        out, err = capsys.readouterr()
        assert err.splitlines()[0].startswith(f"{tmp_path}/{out[0]}: ") and "launch.py status" in err
        return out

    ends = {"a": 20.0, "b": 30.0, "c": 40.0, "d": 50.0}  # b fails last, d ends last
    for name, ended in ends.items():
        logs = tmp_path / name / "launch/s"
        folder = started(tmp_path / name, {**LOCAL, "logs": str(logs)})
        logs.mkdir()
        (logs / "0.out").write_text(f"{name}\n")
        end(folder, {"c": "complete", "d": "stopped"}.get(name, "failed"), started=1.0, ended=ended)
        if name in "ab":
            monkeypatch.setattr("pretrain.common.run.state.time.time", lambda ended=ended: ended)
            write_failure(folder, 0, RuntimeError(name), "s")
    assert shown() == "b\n"
    monkeypatch.setattr(
        job.Job, "read_process_state", lambda job: JobState("RUNNING" if "/c/" in job.logs else "ENDED")
    )
    assert shown() == "c\n"
    monkeypatch.setattr(job.Job, "read_process_state", lambda job: JobState("ENDED"))
    for name in "ab":
        (tmp_path / name / "launch/launch.json").unlink()
    assert shown() == "d\n"


def test_progress_has_the_newest_loss_and_an_eta_only_where_something_runs(tmp_path: Path):
    lines = [{"iteration": 3, "loss": 2.5, "images_per_second": 80.2, "eta_seconds": 60}, {"iteration": 4, "knn": 50}]
    (tmp_path / "metrics.json").write_text("\n".join(map(json.dumps, lines)))
    update_state(tmp_path, stage="pretrain")
    with enter_run_folder("pretrain", tmp_path, RunContext()):
        assert by_key(tmp_path)["."]["progress"] == "step 5  loss 2.5  80 images/s  eta 0:01:00"
    assert by_key(tmp_path)["."]["progress"] == "step 5  loss 2.5  80 images/s"


@pytest.mark.parametrize(
    ("state", "shown", "exit_status"),
    [
        ("OUT_OF_MEMORY", "out_of_memory", 1),
        ("NODE_FAIL", "node_fail", 1),
        ("CANCELLED", "cancelled", 0),
        ("COMPLETING", "finishing", 0),  # its ranks have ended
    ],
)
def test_a_stage_that_slurm_ended_has_failed_unless_it_was_cancelled(
    tmp_path: Path, programs: Callable, state: str, shown: str, exit_status: int
):
    started(tmp_path, SLURM)
    programs(squeue=f"echo '77|{state}|None|n'")
    assert by_key(tmp_path)["."]["state"] == shown and launch.main(["status", str(tmp_path)]) == exit_status


def test_a_requeued_job_that_is_no_longer_in_the_queue_is_lost(tmp_path: Path, programs: Callable):
    """It was cancelled there, and SLURM has forgotten it; nobody will start it again."""
    started(tmp_path, SLURM)
    end(tmp_path, "requeued", reason="USR2")
    programs(squeue="echo '77|PENDING|Resources|n'", sacct="")
    assert shown(tmp_path)["state"] == "pending"
    programs(squeue="", sacct="")
    stage = shown(tmp_path)
    assert stage["state"] == "lost" and "no longer there" in stage["reason"]
    assert launch.main(["status", str(tmp_path)]) == 1
