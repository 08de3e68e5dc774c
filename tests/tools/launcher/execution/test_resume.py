"""`launch.py resume` runs a stage as it was started, and nothing that is not a stage."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from pretrain.config import from_yaml_text
from tests.errors import refused
from tests.tools.launcher.helpers import HERE, LOCAL, ROOT, TINY, build_pretrain, build_probe, end
from tools import launch
from tools.launcher.execution.job import Job
from tools.launcher.execution.records import record_job
from tools.launcher.graphs import start
from tools.launcher.graphs.graph import Graph, write_graph
from tools.launcher.job_options import JobOptions
from tools.stages import recipes

Started = list[tuple[Graph, JobOptions]]


def write_record(folder: str, record: dict[str, Any], name: str = "launch.json") -> None:
    path = Path(folder) / "launch" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))


def write_launch_file(graph: Graph, options: JobOptions, _needs_data: bool) -> int:
    (node,) = graph.nodes
    record_job(node.stage, options.for_stage(node.stage), Job.from_record(Path(node.stage.folder), LOCAL))
    return 0


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Record what the commands would start, without starting it; graphs are written to their folders."""
    calls: Started = []

    def run(graph: Graph, options: JobOptions, _needs_data: bool) -> int:
        write_graph(graph, options)
        calls.append((graph, options))
        return 0

    monkeypatch.setattr("tools.launcher.graphs.start.start_graph", run)
    return calls


def test_a_resumed_graph_keeps_its_resources(started: Started):
    Path("s.yaml").write_text(f"PRETRAIN: {recipes.find_recipe('mocov2')}\nGRID: {{SOLVER.EPOCHS: [1, 2]}}\n")
    words = ["--cluster", "slurm", "--partition", "long", "--time", "5:00:00", "--gpus", "8"]
    config = Path("config/pretrain-to-transfer")
    config.mkdir(parents=True)
    (config / "cluster.yaml").write_text("setup: module load x\n")
    assert launch.main(["pipeline", "s.yaml", "--output", "out", *words]) == 0
    Path("s.yaml").unlink()  # it resumes what was started, not the edited file
    assert launch.main(["resume", "out"]) == 0
    (first, options), (second, same) = started
    assert (options.partition, options.time, options.setup) == ("long", "5:00:00", ("module load x",))
    assert options == same and second == first
    Path("out").rename("moved")
    refused(lambda: launch.main(["resume", "moved"]), "moved was moved from", "out; rerun the original command")


def test_relative_names_are_those_of_the_folder_that_a_run_was_started_in(
    started: Started, tmp_path: Path, monkeypatch, capsys
):
    words = ["pretrain", "--method", "mocov2", "--cluster", "local", "--gpus", "0", "OUTPUT_DIR", "run", *TINY]
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(start, "start_graph", write_launch_file)
    assert launch.main([*words, "DATA.TRAIN", "folder:data"]) == 0
    folders: list[str] = []
    monkeypatch.setattr(start, "start_graph", lambda *_: folders.append(os.getcwd()) or 0)
    assert launch.main(["resume", "run"]) == 0
    assert "relative names" not in capsys.readouterr().err
    monkeypatch.chdir(tmp_path / "other")
    assert launch.main(["resume", "../run"]) == 0
    assert f"relative names are those of {tmp_path}" in capsys.readouterr().err
    assert folders == [str(tmp_path)] * 2 and os.getcwd() == str(tmp_path / "other")
    record = tmp_path / "run/launch/launch.json"
    record.write_text(record.read_text().replace(f'"cwd": "{tmp_path}"', '"cwd": "/gone"'))
    refused(lambda: launch.main(["resume", "../run"]), "was started in /gone, which is gone")


def test_a_probe_finds_the_images_of_its_run_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = build_pretrain("", [*TINY, "DATA.TRAIN", "folder:data", "OUTPUT_DIR", "run"]).config
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(text)
    end(tmp_path / "run", "complete", stage="pretrain", cwd=str(tmp_path))
    near = build_probe("knn", "run")
    monkeypatch.chdir(tmp_path / "run")
    far = build_probe("knn", ".")
    assert from_yaml_text(near.config).DATA.TRAIN == "folder:data"
    assert (f"folder:{tmp_path}/data", f"{tmp_path}/datasets") == (
        from_yaml_text(far.config).DATA.TRAIN,
        from_yaml_text(far.config).DATA.ROOT,
    )


def test_a_resumed_stage_keeps_what_it_builds_on(started: Started):
    stage = build_probe("linear", "random", "", [*TINY, "OUTPUT_DIR", "x"])
    stage = replace(stage, parents={"a/pretrain": "1234"}, root="/pipeline")
    write_record("x", {"spec": stage.to_json(), "options": asdict(HERE), "jobs": [LOCAL]})
    assert launch.main(["resume", "x"]) == 0
    ((graph, options),) = started
    assert (graph.nodes[0].stage, graph.report, options) == (stage, None, HERE)


def test_a_resumed_stage_gets_the_limit_of_the_site_file_as_far_as_it_needs_it(started: Started):
    """The record has what the user asked for: nothing, here and in the second case only for all stages."""
    Path("site.yaml").write_text("time: 24:00:00\n")
    site = ["--cluster", "slurm", "--cluster-file", "site.yaml"]
    limits = []
    for folder, words in (("a", site), ("b", [*site, "--time", "12:00:00"]), ("c", ["--cluster", "slurm"])):
        assert launch.main(["knn", "random", *words, "OUTPUT_DIR", folder, *TINY]) == 0
        graph, options = started.pop()
        stage = graph.nodes[0].stage
        record_job(stage, options.for_stage(stage), Job.from_record(Path(stage.folder), LOCAL))
        assert launch.main(["resume", folder]) == 0
        limits.append([options.for_stage(stage).minutes, started.pop()[1].for_stage(stage).minutes])
    assert limits == [[240, 240], [720, 720], [240, 240]]


def test_a_limit_of_a_stage_that_the_command_does_not_start_is_refused(started: Started):
    Path("p.yaml").write_text("BRANCHES: {a: {WEIGHTS: random}}\nKNN: own\n")
    for words in (["knn", "random"], ["pipeline", "p.yaml"]):
        command = [*words, "--cluster", "slurm", "--time", "24:00:00,convert=2"]
        refused(
            lambda command=command: launch.main(command), "--time limits convert, which is not part of this command"
        )
    assert launch.main(["pipeline", "p.yaml", "--cluster", "slurm", "--time", "knn=9,report=3"]) == 0
    assert len(started) == 1


@pytest.mark.parametrize("stage", ["os:system", "tools.launcher.execution.submit:snapshot", "os"])
def test_only_a_known_stage_is_started(stage: str, started: Started):
    folder = str(Path("x").absolute())
    spec = {"stage": stage, "folder": folder, "entry": "os:system", "args": ["echo CALLED"]}
    alone = {"spec": spec, "options": asdict(HERE), "jobs": []}
    stages = [{"key": "a", "parents": [], "spec": spec}]
    graph = {"stages": stages, "report": spec, "study": {}, "output": folder, "options": asdict(HERE)}
    for record, name in ((alone, "launch.json"), (graph, "pipeline.json")):
        write_record("x", record, name)
        refused(lambda: launch.main(["resume", "x"]), f"'{stage}' is not a known stage")
    assert started == []


@pytest.mark.parametrize("record", [{}, {"spec": {"args": [], "removed": 1}}])
def test_a_record_of_another_version_is_one_line(record: dict[str, Any]):
    write_record("x", record)
    refused(lambda: launch.main(["resume", "x"]), "from another version")


@pytest.fixture
def pipeline_file() -> str:
    """Write a pipeline with a detector of the torchvision engine."""
    Path("mask.yaml").write_text(f"_BASE_: {ROOT}/configs/coco_mask_R50_FPN_1x.yaml\n")
    Path("p.yaml").write_text("BRANCHES: {a: {WEIGHTS: random}}\nTRANSFER: {mask: mask.yaml}\nENGINE: torchvision\n")
    return "p.yaml"


def test_the_engine_of_a_pipeline_can_be_chosen_and_is_resumed(pipeline_file: str, started: Started):
    words = ["pipeline", pipeline_file, "--output", "x", "--cluster", "local", "--gpus", "0"]
    for engine, more in (("torchvision", []), ("detectron2", ["--engine", "detectron2"])):
        assert launch.main([*words, *more]) == launch.main(["resume", "x"]) == 0
        assert [graph.nodes[0].stage.options.engine for graph, _ in started[-2:]] == [engine] * 2


def test_an_engine_that_cannot_run_is_refused_before_the_first_stage(pipeline_file: str, monkeypatch):
    monkeypatch.setattr("transfer.preflight.importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("tools.launcher.graphs.start.LocalRun.run", lambda run: pytest.fail("it was started"))
    words = ["pipeline", pipeline_file, "--cluster", "local", "--gpus", "0", "--engine"]
    refused(lambda: launch.main([*words, "detectron"]), "'detectron'", "did you mean 'detectron2'")
    refused(lambda: launch.main([*words, "detectron2"]), "Detectron2 is not installed", "--engine torchvision")
