"""`launch.py resume`: as it was started, with its resources, and never anything that is no stage."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pretrain.common.errors import UserError
from tests.tools.launcher.helpers import ROOT, TINY
from tests.tools.launcher.test_jobs import LOCAL
from tools import launch
from tools.launcher import stages
from tools.launcher.graph import Graph, Node
from tools.launcher.options import Options
from tools.launcher.spec import StageSpec, read_record


def write_record(folder: str, record: Any, name: str = "launch.json") -> Path:
    path = Path(folder) / "launch" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(record if isinstance(record, bytes) else json.dumps(record).encode())
    return path


@pytest.mark.parametrize(("kind", "file"), [("pipeline", "p.yaml"), ("sweep", "s.yaml")])
def test_a_resumed_graph_keeps_its_resources(kind: str, file: str, monkeypatch: pytest.MonkeyPatch):
    Path("p.yaml").write_text("BRANCHES: {random: {WEIGHTS: random}}\nKNN: ['']\n")
    Path("s.yaml").write_text(f"PRETRAIN: {stages.recipe_of('mocov2')}\nGRID: {{SOLVER.EPOCHS: [1, 2]}}\n")
    monkeypatch.setattr("tools.launcher.graph._submit_all", lambda graph, options: graph.remember(options) or 0)
    words = ["--cluster", "slurm", "--partition", "long", "--time", "5:00:00", "--gpus", "8"]
    words += ["--setup", "module load x"]
    assert launch.main(["pipeline", file, "--output", "out", *words]) == 0
    record = read_record(Path("out") / "launch" / f"{kind}.json")
    found = []
    monkeypatch.setattr("tools.launcher.commands.run", lambda graph, options: found.append((graph, options)) or 0)
    Path("out").rename("moved")
    for name in ("p.yaml", "s.yaml"):
        Path(name).unlink()  # it resumes what was begun, not the edited file
    assert launch.main(["resume", "moved"]) == 0
    ((graph, options),) = found
    assert (options.partition, options.minutes, options.gpus, options.setup) == ("long", 300, 8, ("module load x",))
    assert asdict(options) | {"setup": ["module load x"]} == record["options"]
    assert (graph.kind, graph.output) == (kind, str(Path("moved").absolute()))
    assert [node.spec.fingerprint() for node in graph.nodes] == [stage["fingerprint"] for stage in record["stages"]]


def test_a_resumed_stage_keeps_what_it_builds_on(monkeypatch: pytest.MonkeyPatch):
    spec = stages.probe("linear", "random", "", [*TINY, "OUTPUT_DIR", "x"])
    spec = StageSpec(**{**spec.to_json(), "args": spec.args, "parents": {"a/pretrain": "1234"}, "root": "/pipeline"})
    write_record("x", {"spec": spec.to_json(), "options": asdict(Options(cluster="local", gpus=0)), "jobs": [LOCAL]})
    found = []

    class LocalRun:
        def __init__(self, graph: Graph, options: Options, missing: dict[str, Node]) -> None:
            found.append((graph.nodes[0].spec, options))

        def run(self) -> int:
            return 0

    monkeypatch.setattr("tools.launcher.graph.LocalRun", LocalRun)
    with pytest.raises(UserError, match="no ImageNet at datasets/imagenet/train"):
        launch.main(["resume", "x"])
    Path("datasets/imagenet/train").mkdir(parents=True)
    assert launch.main(["resume", "x"]) == 0
    assert found == [(spec, Options(cluster="local", gpus=0))]


@pytest.mark.parametrize("entry", ["os:system", "tools.launcher.submit:snapshot", "pretrain.train:main"])
def test_only_a_stages_own_entry_is_called(entry: str, capfd: pytest.CaptureFixture):
    spec = {"stage": "knn", "folder": str(Path("x").absolute()), "entry": entry, "args": ["echo CALLED"]}
    write_record("x", {"spec": spec, "options": asdict(Options(cluster="local", gpus=0)), "jobs": []})
    stage = {"key": "a", "parents": [], "spec": spec}
    record = {"stages": [stage], "report": spec, "facts": [], "output": str(Path("x").absolute()), "options": {}}
    for begun in ({}, record):
        if begun:
            write_record("x", begun, "pipeline.json")
        with pytest.raises(UserError, match=f"'{entry}' is not a stage of this launcher"):
            launch.main(["resume", "x"])
    assert "CALLED" not in capfd.readouterr().out


def test_a_stage_of_a_moved_folder_is_not_resumed_in_the_old_place():
    spec = stages.convert("a.pth", "b.pth", "x")
    write_record("x", {"spec": spec.to_json(), "options": asdict(Options(cluster="local", gpus=0)), "jobs": []})
    Path("x").rename("y")
    with pytest.raises(UserError, match=r"y was at .*/x when its stage started"):
        launch.main(["resume", "y"])
    assert not Path("x").exists()


@pytest.mark.parametrize("name", ["launch.json", "pipeline.json", "sweep.json"])
@pytest.mark.parametrize(
    "record",
    [b"", b"\xff\xfe", [], {}, {"spec": [], "options": {}}, {"file": []},
     {"file": "p.yaml", "options": []}, {"file": "p.yaml", "options": {"cluster": "local", "gpu": 1}}],
)  # fmt: skip
def test_a_damaged_record_is_one_line(name: str, record: Any):
    Path("p.yaml").write_text("BRANCHES: {random: {WEIGHTS: random}}\n")
    write_record("x", record, name)
    with pytest.raises(UserError) as raised:
        launch.main(["resume", "x"])
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


SIDE_BY_SIDE = "--cluster local --parallel 2 --cpus-per-task 1"


@pytest.mark.parametrize(
    ("target", "command"),
    [
        (["demo"], f"pipeline configs/examples/demo.yaml {SIDE_BY_SIDE}"),
        (
            ["demo", "ENGINE=detectron2"],
            f"pipeline configs/examples/demo.yaml {SIDE_BY_SIDE} --engine detectron2 --output runs/demo_detectron2",
        ),
        (["demo-quick"], f"pipeline configs/examples/demo_quick.yaml {SIDE_BY_SIDE}"),
    ],
)
def test_make_runs_the_demo_on_this_machine(target: list[str], command: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("ENGINE", "MAKEFLAGS", "MAKELEVEL"):
        monkeypatch.delenv(name, raising=False)
    shown = subprocess.run(["make", "-n", *target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in shown.splitlines() if "tools/launch.py" in line]
    assert line.split("tools/launch.py ")[1].split() == command.split()
    parsed = vars(launch._parser().parse_args(command.split()))
    assert parsed["cluster"] == "local" and (ROOT / parsed["file"]).is_file()


@pytest.fixture
def pipeline_file() -> str:
    """A pipeline with a detector, by the torchvision engine."""
    Path("mask.yaml").write_text(f"_BASE_: {ROOT}/configs/Base-Mask-RCNN-FPN-1x.yaml\n")
    Path("p.yaml").write_text("BRANCHES: {a: {WEIGHTS: random}}\nTRANSFER: {mask: mask.yaml}\nENGINE: torchvision\n")
    return "p.yaml"


def engines(graph: Graph) -> set[str]:
    return {node.spec.args[0][node.spec.args[0].index("--engine") + 1] for node in graph.nodes}


def test_the_engine_of_a_pipeline_can_be_chosen_and_is_resumed(pipeline_file: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("transfer.train_net.pick_engine", lambda wanted: wanted)
    found = []
    monkeypatch.setattr("tools.launcher.commands.run", lambda graph, options: found.append(graph) or 0)
    for words in ([], ["--engine", "detectron2"]):
        assert launch.main(["pipeline", pipeline_file, "--output", "x", "--cluster", "local", *words]) == 0
        found[-1].remember(Options(cluster="local", gpus=0))
        assert launch.main(["resume", "x"]) == 0
    assert [engines(graph) for graph in found] == [{"torchvision"}] * 2 + [{"detectron2"}] * 2
    assert found[2].nodes == found[3].nodes


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("detectron", "engine 'detectron' is not one of .*did you mean 'detectron2'"),
        ("detectron2", "Detectron2 is not installed; run `make detectron2`, or use --engine torchvision"),
    ],
)
def test_an_engine_that_cannot_run_is_refused_before_the_first_stage(
    pipeline_file: str, monkeypatch: pytest.MonkeyPatch, engine: str, message: str
):
    monkeypatch.setattr("transfer.train_net.importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("tools.launcher.graph.LocalRun.run", lambda run: pytest.fail("it was started"))
    with pytest.raises(UserError, match=message):
        launch.main(["pipeline", pipeline_file, "--cluster", "local", "--engine", engine])
    single = ["transfer", "--config-file", "mask.yaml", "--cluster", "local"]
    with pytest.raises(UserError, match=message):
        launch.main([*single, "--engine", engine])


def test_an_engine_without_a_detector_is_refused():
    Path("p.yaml").write_text("BRANCHES: {a: {WEIGHTS: random}}\nKNN: ['']\n")
    with pytest.raises(UserError, match=r"--engine torchvision would have no effect, because p\.yaml has no TRANSFER"):
        launch.main(["pipeline", "p.yaml", "--engine", "torchvision"])
