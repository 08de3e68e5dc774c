"""A folder of an earlier version: today's code resumes, shows, reports and reads what it contains.

`run/` is the folder of one pipeline; beside it are a pretraining of the same settings that was stopped after step 8 of
12 and two more conversions. `evaluating/` is a fine-tuning that was stopped in the evaluation after 4 of 6 iterations.
Those versions wrote them as ``/earlier``, which each test replaces by its own copy.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pretrain.common.files import read_json
from pretrain.common.weights import checkpoint
from tests import in_process, tiny
from tests.pretrain.runs import lines
from tests.tools.reporting.runs import column, render
from tests.transfer import tiny_coco
from tools import launch
from tools.launcher.execution.status import collect
from transfer import load_detector
from transfer.weights.convert import convert
from transfer.weights.load import read_weights

ROOT = Path(__file__).parents[2]
# What computed the bits of run/; another version of torch or another processor may round differently.
ARITHMETIC = ("2.15.0", "AVX512")
STAGES = ("random_seed=1/knn", *(f"moco_seed=1/{name}" for name in ("pretrain", "knn", "linear", "convert", "box")))


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.use(monkeypatch, 2)
    monkeypatch.chdir(ROOT)  # for the recipes that pipeline.yaml names


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of run/ with the content that it would have if it had been written there."""
    return copy("run", tmp_path / "earlier")


def copy(name: str, target: Path, earlier: str = "/earlier") -> Path:
    """Copy a folder that an earlier version wrote as ``earlier``."""
    shutil.copytree(Path(__file__).parent / name, target)
    for path in target.rglob("*"):
        if path.suffix in (".json", ".yaml", ".txt"):
            path.write_text(path.read_text().replace(earlier, str(target)))
    return target


def test_a_stopped_pretraining_resumes_to_the_end_of_an_uninterrupted_one(folder: Path) -> None:
    assert in_process.main(["resume", str(folder / "stopped")]) == 0
    run = folder / "stopped"
    expected = folder / "moco_seed=1/pretrain"
    version = torch.__version__.partition("+")[0]
    tolerance = 0 if (version, torch.backends.cpu.get_cpu_capability()) == ARITHMETIC else 1e-3
    first = checkpoint.read(run / checkpoint.FINAL)
    second = checkpoint.read(expected / checkpoint.FINAL)
    assert first["step"] == second["step"] == 12
    for part in (
        (first["state_dict"], second["state_dict"]),
        (first["optimizer"]["state"], second["optimizer"]["state"]),
    ):
        torch.testing.assert_close(*part, rtol=tolerance, atol=tolerance)
    losses = [[line["loss"] for line in lines(output, "loss")] for output in (run, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=tolerance, abs=0) and len(losses[0]) == 12


def test_status_shows_every_stage(folder: Path) -> None:
    states = {str(entry["folder"].relative_to(folder)): entry["state"] for entry in collect(folder)}
    assert states == {**dict.fromkeys(STAGES, "complete"), "stopped": "stopped"}


def test_the_report_has_every_result(folder: Path) -> None:
    text = render([folder])
    assert "Incomplete" not in text
    assert column(text, "moco_seed=1", "kNN top-1") == "100.0"
    assert column(text, "moco_seed=1", "linear top-1") == "100.0"
    assert column(text, "random_seed=1", "kNN top-1") == "75.0"
    assert column(text, "moco_seed=1/box", "method") == "mocov2"
    assert column(text, "moco_seed=1/box", "box AP") == "4.7"


@pytest.mark.parametrize(("command", "file"), [("resume", ""), ("pipeline", "pipeline.yaml")])
def test_complete_stages_are_complete(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, file: str
) -> None:
    assert launch.main([command, str(folder / file), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert [stage for stage in STAGES if f"complete {stage} " not in printed] == []


@pytest.mark.parametrize("name", ["moco_seed=1/backbone.pth", "converted.pkl", "converted.safetensors"])
def test_a_converted_backbone_is_what_a_conversion_writes_today(folder: Path, name: str) -> None:
    earlier = read_weights(folder / name)
    target = folder / f"today{os.path.splitext(name)[1]}"
    convert(folder / "moco_seed=1/pretrain", target)
    today = read_weights(target)
    assert earlier.state.keys() == today.state.keys()
    assert all(torch.equal(earlier.state[key], today.state[key]) for key in today.state)
    first, second = (weights.summary()["provenance"] for weights in (earlier, today))
    for fact in ("source", "source_sha256", "method", "epoch", "arch", "encoder", "config"):
        assert first[fact] == second[fact] != ""


def test_a_detector_predicts_and_trains_on(folder: Path, tmp_path: Path) -> None:
    tiny_coco.write(folder / "coco")
    image = tmp_path / "image.png"
    Image.fromarray(np.full((64, 64, 3), 90, np.uint8)).save(image)
    box = folder / "moco_seed=1/box"
    detector = load_detector(box)
    assert [category["name"] for category in detector.categories] == ["c1", "c2", "c3"]
    assert {"bbox", "score"} <= set(detector.predict(image)[0])
    keys = ["SOLVER.MAX_ITER", "5", "OUTPUT_DIR", str(box)]
    command = ["--config-file", str(box / "config.yaml"), "--engine", "torchvision", "--resume", *keys]
    assert tiny_coco.fine_tune(command)["iteration"] == 5
    assert [line["iteration"] for line in lines(box, "total_loss")][-1] == 4


def test_an_unfinished_evaluation_is_completed(tmp_path: Path) -> None:
    """The resumed run knows the best score so far, and ends with the digits of the earlier version's whole run."""
    run = copy("evaluating", tmp_path / "run", "/earlier/run")
    tiny_coco.write(tmp_path / "coco")
    for path in (run / "config.yaml", run / "best.json"):
        path.write_text(path.read_text().replace("/earlier", str(tmp_path)))
    command = ["--config-file", str(run / "config.yaml"), "--engine", "torchvision", "--resume"]
    assert tiny_coco.fine_tune(command)["iteration"] == 6
    assert sorted(path.name for path in run.glob("*.pth")) == ["model_best.pth", "model_final.pth"]
    assert (read_json(run / "best.json")["done"], torch.load(run / "model_best.pth")["iteration"]) == (4, 3)
    version = torch.__version__.partition("+")[0]
    tolerance = 1e-6 if (version, torch.backends.cpu.get_cpu_capability()) == ARITHMETIC else 1e-3  # 1e-6: of threads
    expected = map(json.loads, (run / "whole_metrics.json").read_text().splitlines())
    for line, earlier in zip(lines(run, "bbox/AP"), expected, strict=True):
        scores = {name: value for name, value in earlier.items() if name.startswith("bbox/") or "loss" in name}
        assert {name: line[name] for name in scores} == pytest.approx(scores, rel=tolerance, abs=tolerance)
