"""What distinguishes two runs, and the step at which their curves part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pretrain.common.errors import UserError
from tests.tools.reporting.runs import detector, pretrain, write
from tools import launch
from tools.reporting.compare import compare


def run_in(folder: Path, losses: list[float], *overrides: str, torch: str = "2.15.0", knn: float = 50.0) -> Path:
    pretrain(folder, *overrides, knn=knn)
    lines = [
        {"iteration": 10 * i + 9, "loss": loss, "lr": 0.1, "epoch": (i + 1) / 2, "images_per_second": 7.0 * i + loss}
        for i, loss in enumerate(losses)
    ]
    (folder / "metrics.json").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"iteration": 4')
    first = "started: a\ncommand: b\ngit: old\ntorch: 2.0\n"
    (folder / "environment.txt").write_text(f"{first}\nstarted: c\ncommand: {folder}\ngit: new\ntorch: {torch}\n")
    return folder


def test_differences_and_the_step_at_which_the_curves_part(tmp_path: Path, capsys: pytest.CaptureFixture):
    one = run_in(tmp_path / "one", [5.0, 4.0, 3.0])
    two = run_in(tmp_path / "two", [5.0, 4.5, 3.5, 2.0], "SOLVER.BASE_LR", "0.5", torch="2.16.0", knn=52.5)
    launch.main(["compare", str(one), str(two)])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    for line in (
        ["SOLVER.BASE_LR", "0.06", "0.5"],
        ["torch", "2.15.0", "2.16.0"],
        ["data", "and", "weights:", "equal"],
        ["knn_top1", "50", "52.5"],
        ["curves:", "part", "at", "step", "20;", "1", "metrics", "are", "equal"],  # lr; speed is the machine's
        ["loss", "20", "4", "4.5"],
    ):
        assert line in shown
    text = "\n".join(map(" ".join, shown))
    assert "git" not in text and "OUTPUT_DIR" not in text and "images_per_second" not in text


def test_equal_runs(tmp_path: Path):
    one, two = (run_in(tmp_path / name, [5.0, 4.0]) for name in ("one", "two"))
    text = compare(one, two)
    for title in ("config", "engine, versions and machine", "data and weights", "results"):
        assert f"{title}: equal" in text
    assert text.endswith("curves: equal in all 2 metrics, at every iteration that both runs logged")


def test_other_data_and_weights_are_named(tmp_path: Path):
    one, two = (run_in(tmp_path / name, [5.0]) for name in ("one", "two"))
    results: dict[str, Any] = json.loads((two / "results.json").read_text())
    results["knn_protocol"]["train_images"] = 299
    results["weights"] = {"sha256": "ab" * 32}
    (two / "results.json").write_text(json.dumps(results))
    text = " ".join(compare(one, two).split())
    assert "train_images 300 299" in text and f"weights - {'ab' * 32}" in text


def test_engines_and_data_are_named_and_the_device_is_the_one_that_was_used(tmp_path: Path):
    for name, engine, device in (("one", "detectron2", "cpu"), ("two", "torchvision", "cuda")):
        data = detector("MODEL.DEVICE", device, "DATASETS.TRAIN", f"('coco:{name}.json:images',)", engine=engine)
        write(tmp_path / name, data, data["config"])
        (tmp_path / name / "environment.txt").write_text("started: a\ncommand: b\ndevices: cpu\n")
    text = compare(tmp_path / "one", tmp_path / "two")
    assert "DEVICE" not in text and "devices" not in text and "config: equal" in text
    words = " ".join(text.split())
    assert "engine detectron2 0.6 torchvision 0.6" in words
    assert "DATASETS.TRAIN ['coco:one.json:images'] ['coco:two.json:images']" in words


def test_runs_that_logged_at_other_steps(tmp_path: Path):
    one, two = run_in(tmp_path / "one", [5.0]), run_in(tmp_path / "two", [])
    assert compare(one, two).endswith("curves: the runs logged no metric at the same iterations")


def test_what_is_no_run_folder(tmp_path: Path):
    good = run_in(tmp_path / "good", [1.0])
    with pytest.raises(UserError, match=r"no config of a run at .*nowhere/config.yaml"):
        compare(tmp_path / "nowhere", good)
    (good / "config.yaml").write_text("[")
    with pytest.raises(UserError, match=r"config.yaml: is not YAML"):
        compare(good, good)
