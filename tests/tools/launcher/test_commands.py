"""`launch.py resume`: as it was started, with its resources, and never anything that is no stage."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pretrain.common.errors import UserError
from tests.tools.launcher.helpers import TINY
from tools import launch
from tools.launcher import commands, stages
from tools.launcher.options import Options
from tools.launcher.spec import StageSpec, read_json


def write_record(folder: str, record: Any, name: str = "launch.json") -> Path:
    path = Path(folder) / "launch" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(record if isinstance(record, bytes) else json.dumps(record).encode())
    return path


@pytest.mark.parametrize(("kind", "file"), [("pipeline", "p.yaml"), ("sweep", "s.yaml")])
def test_a_resumed_graph_keeps_its_resources(kind: str, file: str, monkeypatch: pytest.MonkeyPatch):
    Path("p.yaml").write_text("BRANCHES: {random: {WEIGHTS: random}}\nKNN: ['']\n")
    Path("s.yaml").write_text(f"PRETRAIN: {stages.recipe_of('mocov2')}\nGRID: {{SOLVER.EPOCHS: [1, 2]}}\n")
    monkeypatch.setattr("tools.launcher.resolve._check_partition", lambda options: None)
    monkeypatch.setattr("tools.launcher.graph.submit_all", lambda graph, options: graph.remember(options) or 0)
    words = ["--cluster", "slurm", "--partition", "long", "--time", "5:00:00", "--gpus", "8"]
    words += ["--setup", "module load x"]
    assert launch.main([kind, file, "--output", "out", *words]) == 0
    record = read_json(Path("out") / "launch" / f"{kind}.json")
    found = []
    monkeypatch.setattr("tools.launcher.commands.run", lambda graph, options: found.append((graph, options)) or 0)
    Path("out").rename("moved")
    assert launch.main(["resume", "moved"]) == 0
    ((graph, options),) = found
    assert (options.partition, options.minutes, options.gpus, options.setup) == ("long", 300, 8, ("module load x",))
    assert asdict(options) | {"setup": ["module load x"]} == record["options"]
    assert (graph.kind, graph.output) == (kind, str(Path("moved").absolute()))
    assert [node.spec.fingerprint() for node in graph.nodes] == [stage["fingerprint"] for stage in record["stages"]]


def test_a_resumed_stage_keeps_what_it_builds_on(monkeypatch: pytest.MonkeyPatch):
    spec = stages.probe("linear", "random", "", [*TINY, "OUTPUT_DIR", "x"])
    spec = StageSpec(**{**spec.to_json(), "args": spec.args, "parents": {"a/pretrain": "1234"}, "root": "/pipeline"})
    write_record("x", {"spec": spec.to_json(), "options": asdict(Options(cluster="local", gpus=0)), "jobs": [{}]})
    found = []
    monkeypatch.setattr(commands, "run_stage", lambda spec, options: found.append((spec, options)) or 0)
    with pytest.raises(UserError, match="no ImageNet at datasets/imagenet/train"):
        launch.main(["resume", "x"])
    Path("datasets/imagenet/train").mkdir(parents=True)
    assert launch.main(["resume", "x"]) == 0
    assert found == [(spec, Options(cluster="local", gpus=0))]


@pytest.mark.parametrize("entry", ["os:system", "tools.launcher.submit:snapshot", "pretrain.train:main"])
def test_only_a_stages_own_entry_is_called(entry: str, capfd: pytest.CaptureFixture):
    spec = {"stage": "knn", "folder": str(Path("x").absolute()), "entry": entry, "args": ["echo CALLED"]}
    write_record("x", {"spec": spec, "options": asdict(Options(cluster="debug", gpus=0)), "jobs": []})
    with pytest.raises(UserError, match=f"names '{entry}', which is not a stage of this launcher"):
        launch.main(["resume", "x"])
    assert "CALLED" not in capfd.readouterr().out


def test_a_stage_of_a_moved_folder_is_not_resumed_in_the_old_place():
    spec = stages.convert("a.pth", "b.pth", "x")
    write_record("x", {"spec": spec.to_json(), "options": asdict(Options(cluster="local", gpus=0)), "jobs": []})
    Path("x").rename("y")
    with pytest.raises(UserError, match=r"y was .*/x when its stage was started"):
        launch.main(["resume", "y"])
    assert not Path("x").exists()


@pytest.mark.parametrize("name", ["launch.json", "pipeline.json", "sweep.json"])
@pytest.mark.parametrize(
    "record",
    [b"", b"\xff\xfe", b"[" * 100_000, [], {}, {"spec": [], "options": {}}, {"file": []},
     {"file": "p.yaml", "options": []}, {"file": "p.yaml", "options": {"cluster": "local", "gpu": 1}}],
)  # fmt: skip
def test_a_damaged_record_is_one_line(name: str, record: Any):
    Path("p.yaml").write_text("BRANCHES: {random: {WEIGHTS: random}}\n")
    write_record("x", record, name)
    with pytest.raises(UserError) as raised:
        launch.main(["resume", "x"])
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_options_of_another_kind_are_one_line():
    Path("p.yaml").write_text("BRANCHES: {random: {WEIGHTS: random}}\n")
    for options in ({**asdict(Options()), "partition": 3}, {**asdict(Options()), "gpus": "8"}, {"cluster": "cloud"}):
        write_record("x", {"file": "p.yaml", "options": options}, "pipeline.json")
        with pytest.raises(UserError):
            launch.main(["resume", "x"])


@pytest.mark.parametrize(
    "command", ["pipeline", "sweep", "linear", "convert", "transfer", "status", "resume", "report"]
)
def test_a_symlink_loop_is_one_line(command: str):
    Path("loop").symlink_to("loop")
    words = {"convert": ["loop", "out.pth"], "transfer": ["--config-file", "loop"]}.get(command, ["loop"])
    with pytest.raises(UserError) as raised:
        launch.main([command, *words])
    assert "\n" not in str(raised.value)


def test_a_symlink_loop_as_output_is_one_line():
    Path("loop").symlink_to("loop")
    Path("p.yaml").write_text("BRANCHES: {random: {WEIGHTS: random}}\n")
    for folder in ("loop", "loop/below"):
        with pytest.raises(UserError):
            launch.main(["pipeline", "p.yaml", "--output", folder, "--cluster", "local", "--gpus", "0"])


def test_make_demo_stays_on_this_machine():
    makefile = (Path(__file__).parents[3] / "Makefile").read_text()
    (line,) = [line for line in makefile.splitlines() if "configs/pipeline/demo.yaml" in line]
    assert line.endswith("--cluster local")
