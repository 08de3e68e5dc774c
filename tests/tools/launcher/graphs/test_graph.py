"""Graphs of stages: checks before anything starts, the order of stages, and how a local run is stopped."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.common.config import extensions
from pretrain.common.files import write_json
from pretrain.common.run.lease import claim
from pretrain.common.run.state import RunContext, update_state
from tests.errors import refused
from tests.tools.launcher import helpers
from tests.tools.launcher.fake_stages import Fake, FakeTraining
from tests.tools.launcher.helpers import HERE, build_convert, complete, fake, graph_of, job_of, run_alone, started
from tools.launcher.execution.rank_main import run_stage
from tools.launcher.graphs.dry_run import show_graph
from tools.launcher.graphs.graph import Graph, Node, build_single
from tools.launcher.graphs.plan import plan_graph
from tools.launcher.graphs.start import start_graph
from tools.launcher.job_options import JobOptions
from tools.stages.base import Stage
from tools.stages.completion import is_complete
from tools.stages.registry import build_stage

SLURM = JobOptions(cluster="slurm", gpus=0, partition="long", parallel=2)


def chain(folder: Path, extra: str = "") -> Graph:
    a, b = (fake(folder / name, "count", 1, 0.0, extra) for name in ("a", "b"))
    return graph_of(folder, Node("a", a), Node("b", b, ("a",)), Node("c", fake(folder / "c")))


def queue(cluster: Path, stage: Stage, job_id: str) -> None:
    """Add a running job of a stage."""
    started(Path(stage.folder), {**helpers.SLURM, "id": job_id}, spec=stage.to_json())
    with open(cluster / "queue", "a") as file:
        file.write(f"{job_id}|RUNNING|None|n\n")


@pytest.mark.core
def test_images_are_counted_before_a_stage_waits_or_is_shown_but_by_itself_if_it_starts_now(images: Path):
    words = [*helpers.TINY, "DATA.TRAIN", f"folder:{images}/train", "SOLVER.IMS_PER_BATCH", "512"]
    stage = helpers.build_pretrain(helpers.CONFIGS / "pretrain/mocov2_R50_IN1k_200ep.yaml", words)
    problem = "SOLVER.IMS_PER_BATCH is 512, but the data set has "
    assert problem in plan_graph(build_single(stage), HERE, is_dry_run=True).errors["pretrain"]
    assert problem in plan_graph(graph_of(Path("several"), Node("a", stage)), HERE).errors["a"]
    assert problem in plan_graph(build_single(stage), SLURM).errors["pretrain"]
    assert plan_graph(build_single(stage), HERE).errors == {}


def test_a_refused_stage_leaves_nothing_queued(tmp_path: Path, cluster: Path, capsys: pytest.CaptureFixture):
    complete(chain(tmp_path, "earlier").nodes[1].stage)
    changes = ("b: b contains a different run (arguments ", "; a has changed)", "nothing was started")
    refused(lambda: start_graph(chain(tmp_path), SLURM), "b: ", *changes)
    complete(chain(tmp_path, "earlier").nodes[0].stage)
    refused(lambda: start_graph(chain(tmp_path), SLURM), "2 of 3 stages are invalid")
    assert [line[:2] for line in capsys.readouterr().err.splitlines()] == ["a:", "b:"]
    assert not list(cluster.glob("*.script")) and not (tmp_path / "launch").exists()


def test_a_cause_that_several_stages_share_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture):
    words = [*helpers.TINY, "DATA.TRAIN", f"folder:{tmp_path}/missing"]
    recipe = helpers.CONFIGS / "pretrain/mocov2_R50_IN1k_200ep.yaml"
    stages = [helpers.build_pretrain(recipe, [*words, "OUTPUT_DIR", str(tmp_path / name)]) for name in "abc"]
    nodes = [Node(name, stage) for name, stage in zip("abc", stages, strict=True)]
    refused(lambda: start_graph(graph_of(tmp_path, *nodes), HERE), "3 of 3 stages are invalid")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "missing" in line]
    assert line.startswith("a and 2 other stages: no image folder at ")


def test_a_pipeline_that_was_edited_while_its_jobs_wait_is_refused(tmp_path: Path, cluster: Path, capsys):
    """The jobs do what the file said when they were submitted; what builds on an edited stage does other work, too."""
    assert start_graph(chain(tmp_path), SLURM) == 0
    jobs = [job_of(tmp_path / name) for name in ("a", "b", "c", "report")]
    (cluster / "queue").write_text("".join(f"{job.id}|PENDING|None|renamed|{job.script}\n" for job in jobs))
    recorded = (tmp_path / "launch/pipeline.json").read_text()
    assert start_graph(chain(tmp_path), SLURM) == 0
    assert "warning" not in capsys.readouterr().err
    assert start_graph(chain(tmp_path), replace(SLURM, sbatch={"dependency": "singleton"})) == 0
    assert "warning" not in capsys.readouterr().err  # a record does not keep it for resume
    assert start_graph(chain(tmp_path), replace(SLURM, partition="short")) == 0
    cancel = f"python tools/launch.py cancel {tmp_path}"
    printed = capsys.readouterr().err
    assert (
        f"the jobs of a, b, c, report keep the options that they were submitted with; to change them: {cancel}"
        in printed
    )
    (tmp_path / "launch/pipeline.json").write_text(recorded)
    edited = graph_of(tmp_path, Node("a", fake(tmp_path / "a", "count", 3)), *chain(tmp_path).nodes[1:])
    refused(lambda: start_graph(edited, SLURM), "2 of 3 stages")
    printed = capsys.readouterr().err
    assert "a: job 100_0 in the queue does other work (arguments " in printed and "launch.py cancel" in printed
    assert "b: job 101 in the queue does other work (a has changed)" in printed
    assert (tmp_path / "launch/pipeline.json").read_text() == recorded and len(list(cluster.glob("*.script"))) == 3
    assert start_graph(graph_of(tmp_path, chain(tmp_path).nodes[0]), SLURM) == 0
    printed = capsys.readouterr().err
    assert "an earlier command submitted b (job 101), c (job 100_1), which this one does not have; cancel" in printed


def test_a_module_that_was_edited_while_jobs_wait_is_refused(
    tmp_path: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    """Each of the jobs would refuse to start."""
    module = tmp_path / "my_queued_data.py"
    module.write_text("size = 1")
    monkeypatch.setenv(extensions.VARIABLE, os.pathsep.join([str(module), "tests.tools.launcher.fake_stages"]))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(Fake, "has_config", True)
    graph = graph_of(tmp_path, *(Node(name, fake(tmp_path / name)) for name in "ab"))
    assert start_graph(graph, SLURM) == 0
    jobs = [job_of(tmp_path / name) for name in ("a", "b", "report")]
    (cluster / "queue").write_text("".join(f"{job.id}|PENDING|None|n|{job.script}\n" for job in jobs))
    assert start_graph(graph, SLURM) == 0
    module.write_text("size = 2")
    refused(lambda: start_graph(graph, SLURM), "2 of 2 stages")
    printed = capsys.readouterr().err
    assert "a: job 100_0 in the queue does other work (your modules have changed: my_queued_data.py, " in printed
    assert "b: job 100_1 in the queue does other work (your modules have changed: my_queued_data.py, " in printed


def test_jobs_before_one_that_sbatch_refuses_are_cancelled(tmp_path: Path, cluster: Path, capsys):
    (cluster / "before").write_text("! grep -q job-name=.*-refused $1 || { echo invalid partition >&2; exit 1; }")
    parents = {"a": (), "b": ("a",), "refused": ("b",), "c": ("a",)}
    nodes = [Node(name, fake(tmp_path / name), before) for name, before in parents.items()]
    refused(lambda: start_graph(graph_of(tmp_path, *nodes), SLURM), "invalid partition")
    assert "cancelled the submitted jobs: 100, 101" in capsys.readouterr().err
    assert (cluster / "cancelled").read_text().split() == ["100", "101"] and len(list(cluster.glob("*.script"))) == 2


def test_each_probe_of_a_sweep_waits_for_its_own_pretraining(tmp_path: Path, cluster: Path):
    """Of the pretrainings, 0 is running, 1 and its probe are complete, 2 is complete without one, 3 and 4 are missing.

    A running report is left alone: a COMPLETING one cannot be cancelled.
    """
    nodes = []
    for i in range(5):
        folder = tmp_path / str(i)
        nodes += [
            Node(f"{i}/pretrain", fake(folder / "pretrain")),
            Node(f"{i}/linear", fake(folder / "linear"), (f"{i}/pretrain",)),
        ]
    graph = graph_of(tmp_path, *nodes)
    stages = {node.key: node.stage for node in graph.nodes}
    queue(cluster, stages["0/pretrain"], "42_3")
    queue(cluster, fake(tmp_path / "report"), "77")
    for key in ("1/pretrain", "1/linear", "2/pretrain"):
        complete(stages[key])
    assert start_graph(graph, SLURM) == 0
    pending = [key for key, stage in stages.items() if not is_complete(stage)]
    jobs = {key: job_of(tmp_path / key) for key in (*pending, "report")}
    assert {key: (job.id, job.dependency) for key, job in jobs.items()} == {
        "0/pretrain": ("42_3", ""),
        "0/linear": ("100", "afterok:42_3"),
        **{key: (f"101_{i}", "") for i, key in enumerate(("2/linear", "3/pretrain", "4/pretrain"))},  # an array
        "3/linear": ("102", "afterok:101_1"),
        "4/linear": ("103", "afterok:101_2"),
        "report": ("104", "afterany:42_3:100:101_0:101_1:101_2:102:103:77"),
    }
    assert len(list(tmp_path.glob("launch/code-*/tools"))) == len(list(tmp_path.glob("**/code-*/tools"))) == 1
    assert (cluster / "asked").read_text() == "\n"


def test_a_dry_run_prints_the_scripts_of_stages_that_can_start(tmp_path: Path, cluster: Path, capsys):
    bad = replace(fake(tmp_path / "bad"), inputs={"gone.pth": ""})
    nodes = [Node("bad", bad), Node("child", fake(tmp_path / "child"), ("bad",)), Node("good", fake(tmp_path / "good"))]
    nodes += [Node("grandchild", fake(tmp_path / "grandchild"), ("child",))]
    nodes += [Node("later", fake(tmp_path / "later"), ("good",))]
    assert show_graph(graph_of(tmp_path, *nodes), SLURM, ask_slurm=True) == 2
    shown = capsys.readouterr().out
    assert "# SLURM was not asked about invalid stages" in shown
    assert re.findall(r"^# (\w+)\n#!/bin/bash", shown, re.MULTILINE) == ["good", "later"]
    assert "no weights at gone.pth" in shown and "# 5 of 5 stages to run, of which 1 is invalid" in shown
    assert show_graph(graph_of(tmp_path, *nodes[2:3]), SLURM) == 0


def test_a_run_stays_complete_when_its_initial_weights_are_deleted(tmp_path: Path):
    stage = FakeTraining(str(tmp_path / "run"), Fake.Options(arguments=("weights.pth",)), inputs={"weights.pth": ""})
    Path("weights.pth").write_bytes(b"weights")
    earlier = build_single(stage).nodes[0].stage
    complete(earlier)
    write_json(tmp_path / "run/launch/launch.json", {"spec": earlier.to_json()})
    (tmp_path / "run/model_final.pth").touch()
    Path("weights.pth").unlink()
    assert is_complete(build_single(stage).nodes[0].stage)


def test_a_complete_graph_runs_nothing_again_even_if_a_stage_was_started_alone(tmp_path: Path, cluster: Path, capsys):
    graph = chain(tmp_path)
    assert start_graph(graph, HERE) == 0
    update_state(tmp_path / "b", state="running")
    alone = build_stage(json.loads(json.dumps(graph.nodes[1].stage.to_json())))  # as launch.json has it
    assert start_graph(build_single(alone), HERE) == 0
    assert all(is_complete(node.stage) for node in chain(tmp_path).nodes)
    (tmp_path / "b/results.json").unlink()  # b's output is gone, so only b runs again
    capsys.readouterr()
    assert start_graph(chain(tmp_path), HERE) == 0
    shown = capsys.readouterr().out
    assert "[1/3] done: a, already complete" in shown and "b, already complete" not in shown
    assert (tmp_path / "b/results.json").exists() and (tmp_path / "a/steps.0").read_text().split() == ["0"]
    (tmp_path / "report/results.json").unlink()
    assert start_graph(chain(tmp_path), SLURM) == 0  # reports without a job
    assert not list(cluster.glob("*.script")) and (tmp_path / "report/results.json").exists()


def test_a_stage_starts_only_after_complete_parents_that_it_was_built_on(tmp_path: Path, cluster: Path):
    """The parent was cancelled, ran with other settings, or is missing when the stage is run alone."""
    child = chain(tmp_path).nodes[1].stage
    for earlier in (None, chain(tmp_path, "other").nodes[0].stage):
        if earlier:
            complete(earlier)
        refused(lambda: run_stage(child, RunContext()), "builds on a, which is not complete", tmp_path / "a")
        for options in (HERE, SLURM):
            refused(lambda: start_graph(build_single(child), options), "builds on a, which is not complete")  # noqa: B023
    assert not (tmp_path / "b").exists() and not list(cluster.glob("*.script"))
    complete(chain(tmp_path).nodes[0].stage)
    run_stage(child, RunContext())
    assert is_complete(child)


@pytest.mark.parametrize("is_conversion", [False, True])
def test_what_was_made_from_another_checkpoint_is_not_complete(tmp_path: Path, is_conversion: bool):
    """The pretraining was still running or was run again, so it has equal settings but other weights."""
    pretraining = fake(tmp_path / "a/pretrain")
    probe = fake(tmp_path / "a/x")
    if is_conversion:
        probe = build_convert("a.pth", str(tmp_path / "a/x/product.pth"), probe.folder)
    nodes = (Node("a/pretrain", pretraining), Node("a/y", fake(tmp_path / "a/y"), ("a/pretrain",)))
    stage = graph_of(tmp_path, *nodes, Node("a/x", probe, ("a/y",))).nodes[2].stage
    complete(stage)
    write_json(
        Path(f"{stage.product}.json") if is_conversion else tmp_path / "a/x/results.json",
        {"source": {"source_sha256": "1234"}},
    )
    assert is_complete(stage)  # the pretraining's folder was removed
    (tmp_path / "a/pretrain").mkdir()
    update_state(tmp_path / "a/pretrain", stage="pretrain")
    assert not is_complete(stage)
    for sha, is_current in (("5678", False), ("1234", True)):
        write_json(tmp_path / "a/pretrain/results.json", {"checkpoint_sha256": sha})
        assert is_complete(stage) == is_current


def test_one_process_at_a_time_starts_a_graph(tmp_path: Path, cluster: Path):
    alone = fake(tmp_path / "run")
    with claim(tmp_path, "a pipeline"), claim(alone.folder, "a submission", file="launch"):
        for options in (HERE, SLURM):
            refused(lambda: start_graph(chain(tmp_path), options), "is in use: a pipeline")  # noqa: B023
        refused(lambda: run_alone(alone, SLURM), "run/launch is in use: a submission on")
        # Otherwise status would show the job that fails on the stage's own claim, not the one that runs
        refused(lambda: run_alone(alone, HERE), "run/launch is in use: a submission on")
    assert not list(cluster.glob("*.script")) and not (tmp_path / "a").exists()
    assert run_alone(alone, SLURM) == 0 and [path.name for path in (tmp_path / "run").iterdir()] == ["launch"]


def test_a_report_of_another_program_is_not_replaced(tmp_path: Path):
    (tmp_path / "report.md").write_text("precious")
    words = ("contains report.md of another program", "; choose another folder")
    refused(lambda: start_graph(chain(tmp_path), JobOptions(cluster="local")), *words)
    assert (tmp_path / "report.md").read_text() == "precious" and not (tmp_path / "a").exists()
