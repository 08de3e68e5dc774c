"""Graphs of stages: what is checked before anything starts, what waits for what, and how a local run is stopped."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pretrain.common.errors import UserError
from pretrain.common.lock import claim
from tests.tools.launcher.helpers import HERE, fake
from tools.launcher import checks
from tools.launcher import graph as module
from tools.launcher.graph import Graph, Node, run, show, single
from tools.launcher.options import Options
from tools.launcher.spec import StageSpec

SLURM = Options(cluster="slurm", gpus=0, partition="long", parallel=2)


def graph_of(folder: Path, *nodes: Node, kind: str = "pipeline") -> Graph:
    return Graph(kind, str(folder), nodes, fake(folder / "report"), "file.yaml")


def chain(folder: Path, extra: str = "") -> Graph:
    a, b = (fake(folder / name, "count", 1, 0.0, extra) for name in ("a", "b"))
    return graph_of(folder, Node("a", a), Node("b", b, ("a",)), Node("c", fake(folder / "c")))


class FakeJob:
    """A job of a cluster without machines."""

    cancelled: list[str]
    codes: set[Path]
    questions: int  # to the scheduler

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id

    def cancel(self, check: bool = True) -> None:
        self.cancelled.append(self.job_id)


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str]]:
    """Folder names and dependency of every submission; ids count from 100; the folder ``refused`` is refused."""
    found: list[tuple[list[str], str]] = []
    FakeJob.cancelled, FakeJob.codes, FakeJob.questions = [], set(), 0

    def submit(specs: Sequence[StageSpec], options: Options, *, dependency: str = "", code: Path) -> list[Any]:
        names = [Path(spec.folder).parent.name + "/" + Path(spec.folder).name for spec in specs]
        if any(name.endswith("/refused") for name in names):
            raise UserError("sbatch refused fake-refused: invalid partition")
        found.append((names, dependency))
        assert (code / "tools/launcher/job.py").is_file()
        FakeJob.codes.add(code)
        number = 99 + len(found)
        return [FakeJob(f"{number}_{i}" if len(specs) > 1 else str(number)) for i in range(len(specs))]

    def job_states(jobs: Sequence[dict[str, Any]]) -> list[str]:
        FakeJob.questions += 1
        return [job["state"] for job in jobs]

    monkeypatch.setattr(module, "submit", submit)
    monkeypatch.setattr(checks, "job_states", job_states)
    return found


def job_in(folder: Path, job_id: str, state: str, cluster: str = "slurm") -> None:
    (folder / "launch").mkdir(parents=True, exist_ok=True)
    job = {"id": job_id, "cluster": cluster, "state": state, "host": socket.gethostname(), "name": "", "logs": ""}
    (folder / "launch/launch.json").write_text(json.dumps({"spec": {}, "jobs": [{**job, "tasks": 1}]}))


def complete(spec: StageSpec) -> None:
    spec.mark_complete()
    Path(spec.folder, spec.produces).write_text("{}")


def test_a_refused_stage_leaves_nothing_queued(tmp_path: Path, submitted: list, capsys: pytest.CaptureFixture):
    complete(chain(tmp_path, "earlier").nodes[1].spec)
    with pytest.raises(
        UserError, match=r"b: .*/b holds other work \(arguments .*; a has changed\).*nothing was started"
    ):
        run(chain(tmp_path), SLURM)
    complete(chain(tmp_path, "earlier").nodes[0].spec)
    with pytest.raises(UserError, match="2 of 3 stages are refused"):
        run(chain(tmp_path), SLURM)
    assert [line[:2] for line in capsys.readouterr().err.splitlines()] == ["a:", "b:"]
    assert submitted == [] and not (tmp_path / "launch").exists()


def test_a_job_that_is_not_slurms_is_refused_before_anything_is_submitted(tmp_path: Path, submitted: list):
    job_in(tmp_path / "b", "77", "RUNNING", "local")
    with pytest.raises(UserError, match=r"b: .*job 77"):
        run(chain(tmp_path), SLURM)
    assert submitted == []


def test_jobs_before_one_that_sbatch_refuses_are_cancelled(tmp_path: Path, submitted: list, capsys):
    nodes = [Node(name, fake(tmp_path / name)) for name in ("a", "b", "refused", "c")]
    with pytest.raises(UserError, match="invalid partition"):
        run(graph_of(tmp_path, *nodes), SLURM)
    assert "cancelled the 2 jobs" in capsys.readouterr().err
    assert FakeJob.cancelled == ["100", "101"] and len(submitted) == 2
    assert list(tmp_path.glob("launch/*/code/tools")) == [code / "tools" for code in FakeJob.codes]


def test_each_probe_of_a_sweep_waits_for_its_own_pretraining(tmp_path: Path, submitted: list):
    """Pretrainings: 0 is running, 1 is complete with its probe, 2 is complete without, 3 and 4 are missing."""
    nodes = []
    for i in range(5):
        folder = tmp_path / str(i)
        nodes += [
            Node(f"{i}/pretrain", fake(folder / "pretrain")),
            Node(f"{i}/linear", fake(folder / "linear"), (f"{i}/pretrain",)),
        ]
    graph = graph_of(tmp_path, *nodes, kind="sweep")
    specs = {node.key: node.spec for node in graph.nodes}
    job_in(tmp_path / "0/pretrain", "42_3", "RUNNING")
    for key in ("1/pretrain", "1/linear", "2/pretrain"):
        complete(specs[key])
    assert run(graph, SLURM) == 0
    assert submitted == [
        (["2/linear", "3/pretrain", "4/pretrain"], ""),  # in the tests they are all of one kind: one array
        (["0/linear"], "afterok:42_3"),
        (["3/linear"], "afterok:100_1"),
        (["4/linear"], "afterok:100_2"),
        ([f"{tmp_path.name}/report"], "afterany:42_3:100_0:100_1:100_2:101:102:103"),
    ]
    assert len(FakeJob.codes) == 1  # all jobs of a submission import the same copy
    assert FakeJob.questions == 1


def test_a_dry_run_shows_an_array_as_it_is_submitted(tmp_path: Path, capsys: pytest.CaptureFixture):
    show(graph_of(tmp_path, *(Node(f"{i}", fake(tmp_path / str(i))) for i in range(3)), kind="sweep"), SLURM)
    shown = capsys.readouterr().out
    assert shown.count("#SBATCH --array=0-2%2\n") == shown.count("#!/bin/bash") == 1


def test_weights_that_a_stage_before_makes_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "content_of", lambda path: pytest.fail(f"{path} was read"))
    a, b = fake(tmp_path / "a"), replace(fake(tmp_path / "b"), inputs={str(tmp_path / "a"): ""})
    assert graph_of(tmp_path, Node("a", a), Node("b", b, ("a",))).nodes[1].spec.inputs == {}


def test_a_new_report_waits_for_one_that_is_running(tmp_path: Path, submitted: list):
    """scancel would not end it at once, and a COMPLETING one cannot be cancelled."""
    job_in(tmp_path / "report", "77", "RUNNING")
    assert run(graph_of(tmp_path, Node("a", fake(tmp_path / "a"))), SLURM) == 0
    assert submitted[-1] == ([f"{tmp_path.name}/report"], "afterany:100:77") and FakeJob.cancelled == []


def test_a_complete_graph_is_reported_here_and_now(tmp_path: Path, submitted: list):
    graph = chain(tmp_path)
    for node in graph.nodes:
        complete(node.spec)
    assert run(graph, SLURM) == 0
    assert submitted == [] and (tmp_path / "report/results.json").exists()


def test_a_stage_by_itself_has_the_mark_that_its_pipeline_accepts(tmp_path: Path):
    graph = chain(tmp_path)
    assert run(graph, HERE) == 0
    (tmp_path / "b/launch/complete.json").unlink()
    alone = StageSpec.from_json(json.loads(json.dumps(graph.nodes[1].spec.to_json())))  # as launch.json has it
    assert run(single(alone), HERE) == 0
    assert all(node.spec.is_complete() for node in chain(tmp_path).nodes)


def test_one_process_at_a_time_runs_a_graph(tmp_path: Path, submitted: list):
    with claim(tmp_path, "pipeline"):
        for options in (HERE, SLURM):
            with pytest.raises(UserError, match="is in use: pipeline"):
                run(chain(tmp_path), options)
    assert submitted == [] and not (tmp_path / "a").exists()


def test_two_stages_in_one_folder_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="a/knn and a/linear would share"):
        graph_of(tmp_path, Node("a/linear", fake(tmp_path / "x")), Node("a/knn", fake(tmp_path / "x")))


def test_a_graph_redoes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture):
    graph = graph_of(tmp_path, Node("a", fake(tmp_path / "a")), Node("b", fake(tmp_path / "b"), ("a",)))
    assert run(graph, HERE) == 0
    assert (tmp_path / "a/steps.0").read_text().split() == ["0"]
    (tmp_path / "b/results.json").unlink()  # b's product is gone: b alone is done again
    capsys.readouterr()
    assert run(graph, HERE) == 0
    shown = capsys.readouterr().out
    assert "[1/2] a: already complete" in shown and "[2/2] b: already complete" not in shown
    assert (tmp_path / "b/results.json").exists()
