"""The status of whole pipelines: what has not started, what it waits for, and a single question to SLURM."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.common.errors import UserError
from pretrain.common.run.lock import claim
from pretrain.common.run.stage import stage
from tests.tools.launcher.helpers import HERE, fake, programs
from tests.tools.launcher.test_jobs import SLURM, started
from tools import launch
from tools.launcher import local_job, status
from tools.launcher.graph import Node, build_graph, write_graph
from tools.launcher.records import RankRecord


def by_key(folder: Path) -> dict[str, dict[str, Any]]:
    return {one["key"]: one for one in status.collect(folder)}


def test_stages_that_have_not_started_say_what_they_wait_for(tmp_path: Path, capsys: pytest.CaptureFixture):
    folder = tmp_path / "runs/p"
    parents = {"a": (), "b": ("a",), "c": ("a", "b")}
    nodes = tuple(Node(name, fake(folder / name), before) for name, before in parents.items())
    write_graph(build_graph(str(folder), nodes, fake(folder / "report")), HERE)
    started(tmp_path / "runs/p/a", {**SLURM, "cluster": "local"})
    RankRecord(tmp_path / "runs/p/a", "s", 0, 0).end("done")
    (tmp_path / "runs/p/a/launch/complete.json").write_text("{}")
    (tmp_path / "runs/p/a/results.json").write_text("{}")
    found = by_key(tmp_path / "runs")
    assert {key: (one["state"], one["waits_for"]) for key, one in found.items()} == {
        "a": ("done", []), "b": ("not started", []), "c": ("not started", ["b"]),
    }  # fmt: skip
    assert launch.main(["status", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    assert f"{tmp_path / 'runs/p/c'}: waits for b" in shown
    assert [line.split()[:3] for line in shown.splitlines()[1:4]] == [
        ["knn", "done", "local"], ["fake", "not", "started"], ["fake", "not", "started"],
    ]  # fmt: skip


def test_slurm_is_asked_once_for_all_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for number, name in enumerate("abc"):
        started(tmp_path / "runs" / name, {**SLURM, "id": str(70 + number)})
    programs(
        monkeypatch, tmp_path,
        squeue=f"echo $* >> {tmp_path}/asked; echo '70|RUNNING|None|n'; echo '71|PENDING|Priority|n'",
        sacct=f"echo $* >> {tmp_path}/asked; echo '72|OUT_OF_MEMORY|None|n'",
    )  # fmt: skip
    found = by_key(tmp_path / "runs")
    assert {key: (one["state"], one["reason"]) for key, one in found.items()} == {
        "a": ("running", ""), "b": ("pending", "Priority"), "c": ("out_of_memory", ""),
    }  # fmt: skip
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 2 and "70,71,72" in asked[0] and asked[1].endswith("-j 72")


def write_run(folder: Path, stage: str, **files: str) -> Path:
    """A run folder as a stage without the launcher leaves it."""
    for name, text in {"stage.txt": f"{stage}\n", **{f"{name}.json": text for name, text in files.items()}}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_runs_without_the_launcher(tmp_path: Path, capsys: pytest.CaptureFixture):
    write_run(tmp_path / "runs/done", "transfer", results="{}")
    write_run(tmp_path / "runs/stopped", "transfer", metrics=json.dumps({"iteration": 4, "total_loss": 0.5}))
    held = write_run(tmp_path / "runs/held", "pretrain", results="{}")
    with pytest.raises(RuntimeError), stage("transfer", tmp_path / "runs/failed", torch.device("cpu")):
        raise RuntimeError("a bug")
    started(tmp_path / "runs/job", {**SLURM, "cluster": "local"})
    write_run(tmp_path / "runs/job/knn", "knn", results="{}")  # below the folder of another run
    with claim(held, "a test"):
        found = by_key(tmp_path / "runs")
    assert {key: (one["stage"], one["state"]) for key, one in found.items() if key != "job"} == {
        "done": ("transfer", "done"), "stopped": ("transfer", "stopped"), "held": ("pretrain", "running"),
        "job/knn": ("knn", "done"), "failed": ("transfer", "failed"),
    }  # fmt: skip
    assert found["failed"]["reason"] == "a bug"
    with stage("transfer", tmp_path / "runs/failed", torch.device("cpu")):
        assert by_key(tmp_path / "runs")["failed"]["state"] == "running"
    assert by_key(tmp_path / "runs")["failed"]["state"] == "stopped"
    assert found["held"]["job"] == {"cluster": "process", "id": str(os.getpid())}
    assert found["stopped"]["progress"] == "step 5  total_loss 0.5"
    assert by_key(tmp_path / "runs")["held"]["state"] == "done"
    assert set(by_key(tmp_path / "runs/job")) == {".", "knn"}


def test_a_failure_stands_below_the_table_and_in_the_logs_once(tmp_path: Path, capsys: pytest.CaptureFixture):
    folder = started(tmp_path / "run", {**SLURM, "cluster": "local", "logs": str(tmp_path / "run/launch/s")})
    (folder / "launch/s").mkdir()
    (folder / "launch/s/0.out").write_text("a line\n")
    RankRecord(folder, "s", 0, 0).end("requeued", "USR2")
    RankRecord(folder, "s", 1, 0).fail(UserError("the data set holds too few images"))
    assert launch.main(["status", str(folder)]) == 1
    _, row, note = capsys.readouterr().out.splitlines()
    assert row.split()[:5] == ["knn", "failed", "local", "77", "2"]
    assert note.startswith(f"{folder}: rank 0 on ") and note.endswith(": the data set holds too few images")
    launch.main(["logs", str(folder.rename(tmp_path / "moved"))])
    assert capsys.readouterr() == ("a line\n", "error: the data set holds too few images\n")


def test_the_logs_of_a_pipeline_are_those_of_the_stage_that_runs_or_failed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    def shown() -> str:
        assert launch.main(["logs", str(tmp_path)]) == 0
        out, err = capsys.readouterr()
        assert err.splitlines()[0].startswith(f"{tmp_path}/{out[0]}: ") and "launch.py status" in err
        return out

    ends = {"a": 20.0, "b": 30.0, "c": 40.0, "d": 50.0}  # b fails last, d ends last
    for name, end in ends.items():
        logs = tmp_path / name / "launch/s"
        folder = started(tmp_path / name, {**SLURM, "cluster": "local", "logs": str(logs)})
        logs.mkdir()
        (logs / "0.out").write_text(f"{name}\n")
        record = RankRecord(folder, "s", 0, 0)
        monkeypatch.setattr("tools.launcher.records.time.time", lambda end=end: end)
        record.fail(RuntimeError(name)) if name in "ab" else record.end("done" if name == "c" else "stopped")
    assert shown() == "b\n"
    monkeypatch.setattr(local_job, "is_running", lambda job: "/c/" in job["logs"])
    assert shown() == "c\n"
    monkeypatch.setattr(local_job, "is_running", lambda job: False)
    for name in "ab":
        (tmp_path / name / "launch/launch.json").unlink()
    assert shown() == "d\n"


def test_progress_has_the_newest_loss_and_an_eta_only_where_something_runs(tmp_path: Path):
    lines = [{"iteration": 3, "loss": 2.5, "images_per_second": 80.2, "eta_seconds": 60}, {"iteration": 4, "knn": 50}]
    folder = write_run(tmp_path / "run", "pretrain", metrics="\n".join(map(json.dumps, lines)))
    assert by_key(folder)["."]["progress"] == "step 5  loss 2.5  80 images/s"
    with claim(folder, "a test"):
        assert by_key(folder)["."]["progress"] == "step 5  loss 2.5  80 images/s  eta 0:01:00"


@pytest.mark.parametrize(("state", "exit_status"), [("OUT_OF_MEMORY", 1), ("NODE_FAIL", 1), ("CANCELLED", 0)])
def test_a_stage_that_slurm_ended_has_failed_unless_it_was_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, exit_status: int
):
    started(tmp_path / "run", SLURM)
    programs(monkeypatch, tmp_path, squeue="", sacct=f"echo '77|{state}|None|n'")
    assert launch.main(["status", str(tmp_path)]) == exit_status
