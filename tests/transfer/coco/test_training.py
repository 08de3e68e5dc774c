"""Data sets that cannot be trained on are refused before the training, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.errors import refused
from tests.transfer import tiny_coco
from transfer.coco import data

CROWD = {"iscrowd": 1}
UNLABELED = {"keypoints": [5, 5, 0] * 17, "num_keypoints": 0}
KEYPOINTS = {"MODEL__KEYPOINT_ON": True, "MODEL__ROI_HEADS__NUM_CLASSES": 1}


@pytest.mark.parametrize(
    ("change", "keys", "allowed", "names"),
    [
        (CROWD, {}, {"DATALOADER__FILTER_EMPTY_ANNOTATIONS": False}, ["iscrowd 1"]),
        (UNLABELED, KEYPOINTS, {"MODEL__ROI_KEYPOINT_HEAD__MIN_KEYPOINTS_PER_IMAGE": 0}, ["visibility 1 or 2"]),
        ({}, {"MODEL__MASK_ON": True}, {"INPUT__MASK_FORMAT": "bitmask"}, ["9 of its masks", "INPUT.MASK_FORMAT"]),
    ],
)
def test_the_reason_is_named(
    tmp_path: Path, change: dict[str, Any], keys: dict[str, Any], allowed: dict[str, Any], names: list[str]
) -> None:
    name = tiny_coco.write(tmp_path / "data", keypoints=keys is KEYPOINTS, rle="MODEL__MASK_ON" in keys)
    tiny_coco.edit(name, lambda content: [record.update(change) for record in content["annotations"]])
    cfg = tiny_coco.config(tmp_path / "out", name, **keys)
    for check in (data.prepare, data.check_early):
        refused(lambda check=check: check(cfg, [name]), name.split(":")[1], *names)
    data.check_early(tiny_coco.config(tmp_path / "out", name, **keys, **allowed), [name])
    good = tiny_coco.write(tmp_path / "good", keypoints=keys is KEYPOINTS)
    data.check_early(tiny_coco.config(tmp_path / "out", good, DATASETS__TEST=(name,), **keys), [good, name])
