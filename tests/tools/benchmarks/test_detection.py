"""The benchmark of the two detection engines runs and prints what it measured."""

from __future__ import annotations

import re

import pytest

from tests.transfer import tiny_coco
from tools import benchmark


@pytest.mark.detectron2
def test_detection_prints_both_engines_and_their_ratios(tmp_path, capsys):
    (tmp_path / "tiny.yaml").write_text(tiny_coco.config(tmp_path, "unused", MODEL__MASK_ON=True).dump())
    words = ["--config-file", str(tmp_path / "tiny.yaml"), "--images", "1", "--side", "64", "--rounds", "2"]
    assert benchmark.main(["detection", *words]) == 0
    printed = capsys.readouterr().out
    for name in ("torchvision", "detectron2", "ratio"):
        numbers = re.search(rf"^{name} +([0-9.]+) +([0-9.]+) +[0-9.na]+$", printed, re.MULTILINE)
        assert numbers, printed
        assert float(numbers[1]) > 0


@pytest.mark.detectron2
def test_trainer_prints_this_engine_and_detectron2s(tmp_path, capsys):
    name = tiny_coco.write(tmp_path / "data")
    (tmp_path / "tiny.yaml").write_text(tiny_coco.config(tmp_path / "out", name, SOLVER__MAX_ITER=1).dump())
    assert benchmark.main(["trainer", "--config-file", str(tmp_path / "tiny.yaml"), "--rounds", "3"]) == 0
    printed = capsys.readouterr().out
    for name in ("this project", "detectron2", "ratio"):
        numbers = re.search(rf"^{name} +([0-9.]+) +([0-9.]+) +[0-9.na]+$", printed, re.MULTILINE)
        assert numbers and float(numbers[1]) > 0, printed
