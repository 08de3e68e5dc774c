"""The picture of a run's curves: a panel per metric that it has logged."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np

from pretrain.common import curves


def picture(folder: Path, *lines: dict) -> np.ndarray | None:
    folder.mkdir()
    (folder / "metrics.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves.write(folder)
    file = folder / curves.FILE
    return cv2.imread(str(file)) if file.exists() else None


def test_a_panel_per_metric(tmp_path: Path):
    one = picture(tmp_path / "a", {"iteration": 0, "loss": 2.0}, {"iteration": 9, "loss": 1.0, "other": 3})
    two = picture(tmp_path / "b", {"iteration": 0, "loss": 2.0}, {"iteration": 9, "loss": 1.0, "bbox/AP": 30.0})
    assert one is not None and two is not None and two.shape[1] == 2 * one.shape[1]
    falls = picture(tmp_path / "c", {"iteration": 0, "loss": 1.0}, {"iteration": 9, "loss": 2.0, "other": 3})
    assert falls is not None and falls.shape == one.shape and (falls != one).any()


def test_each_test_set_has_its_own_curve_of_ap():
    logged = [
        {"iteration": 1, "lr": 0.1, "a/bbox/AP": 1.0, "coco:/x/b.json:/y/bbox/AP": 2.0, "a/bbox/AP50": 3.0},
        {"iteration": 1, "coco:/z/b.json:/y/bbox/AP": 6.0},
        {"iteration": 3, "a/bbox/AP": 4.0, "AP": 5.0},
    ]
    expected = {
        "learning rate": [(2, 0.1)], "box AP on a": [(2, 1.0), (4, 4.0)],
        "box AP on /x/b.json:/y": [(2, 2.0)], "box AP on /z/b.json:/y": [(2, 6.0)],
    }  # fmt: skip
    assert curves.points(logged) == expected


def test_nothing_is_drawn_of_nothing(tmp_path: Path):
    assert picture(tmp_path / "a", {"iteration": 0, "loss": 2.0}) is None
    assert picture(tmp_path / "b", {"iteration": 0, "x": 2.0}, {"iteration": 1, "x": 2.0}) is None
    (tmp_path / "c").mkdir()
    curves.write(tmp_path / "c")
    assert not list((tmp_path / "c").iterdir())
