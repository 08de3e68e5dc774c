"""Training learns: a detector finds the objects of the images that it was trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.transfer import tiny_coco
from transfer import train
from transfer.torchvision_engine import engine
from transfer.weights import read_weights


@pytest.mark.core
def test_a_detector_learns(tmp_path: Path) -> None:
    """Six images, 150 iterations, a fixed seed."""
    name = tiny_coco.write(tmp_path / "data")
    keys = {"SOLVER__MAX_ITER": 150, "SOLVER__STEPS": (120,), "SOLVER__BASE_LR": 0.02, "SEED": 1}
    cfg = tiny_coco.config(tmp_path / "out", name, **keys)
    (metrics,) = train.run(engine, cfg, weights=read_weights(cfg.MODEL.WEIGHTS)).values()
    assert metrics["bbox"]["AP50"] > 50, metrics  # 80 measured
