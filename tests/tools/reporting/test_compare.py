"""Differences between two runs, and the step at which their curves diverge."""

from pathlib import Path

import pytest

from tests.errors import refused
from tests.tools.reporting.runs import detector, log, pretrain, write
from tools import launch
from tools.reporting.compare import compare


def run_in(folder: Path, losses: list[float], *overrides: str, torch: str = "2.15.0", knn: float = 50.0) -> Path:
    pretrain(folder, *overrides, knn=knn)
    lines = ({"iteration": 10 * i + 9, "loss": loss, "lr": 0.1, "time": loss} for i, loss in enumerate(losses))
    start = "started: {}\ncommand: {}\ntorch: {}\n"
    log(folder, lines, f"{start.format('a', 'b', '2.0')}\n{start.format('c', folder, torch)}")
    return folder


def test_differences_and_the_step_at_which_the_curves_diverge(tmp_path: Path, capsys: pytest.CaptureFixture):
    first = run_in(tmp_path / "one", [5.0, 4.0, 3.0])
    second = run_in(tmp_path / "two", [5.0, 4.5, 3.5, 2.0], "SOLVER.BASE_LR", "0.5", torch="2.16.0", knn=52.5)
    launch.main(["compare", str(first), str(second)])
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert [line for line in shown if line and line != "one two"][2:] == [
        "config, data and weights:",
        "SOLVER.BASE_LR 0.06 0.5",
        "engine, versions and machine:",
        "torch 2.15.0 2.16.0",
        "results:",
        "knn_top1 50 52.5",
        "curves diverge at step 20; equal metrics: 1 of 2",
        "diverge at step one two",
        "loss 20 4 4.5",
    ]
    assert compare(first, first).endswith("curves: equal in all 2 metrics, at every iteration that both runs logged")
    (first / "metrics.json").unlink()
    assert compare(first, second).endswith("curves: the runs logged no metric at the same iterations")


def test_engines_data_and_weights_are_named_and_the_device_is_the_one_that_was_used(tmp_path: Path):
    for name, engine, device in (("one", "detectron2", "cpu"), ("two", "torchvision", "cuda")):
        data = detector("MODEL.DEVICE", device, "DATASETS.TRAIN", f"('coco:{name}.json:images',)", engine=engine)
        write(tmp_path / name, data | {"weights": {"sha256": name}}, data["config"])
        (tmp_path / name / "environment.txt").write_text("started: a\ncommand: b\ndevices: cpu\n")
    words = " ".join(compare(tmp_path / "one", tmp_path / "two").split())
    assert "DEVICE" not in words and "devices" not in words
    assert "engine detectron2 0.6 torchvision 0.6" in words and "initial weights one two" in words
    assert "DATASETS.TRAIN ['coco:one.json:images'] ['coco:two.json:images']" in words


def test_what_is_no_run_folder(tmp_path: Path):
    refused(lambda: compare(tmp_path, tmp_path), "no config of a run at", tmp_path / "config.yaml")
