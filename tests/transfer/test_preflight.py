"""What fine-tuning checks before it imports torch: categories, ends of the data, options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pretrain.common.errors import UserError
from tests.transfer import tiny_coco
from transfer.coco import data


def check(*names: str, classes: int = 3) -> None:
    data.check_early(tiny_coco.config(Path(), names[0], MODEL__ROI_HEADS__NUM_CLASSES=classes), names)


def test_categories_and_ends_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, val = (tiny_coco.write(tmp_path / split) for split in ("train", "val"))
    check(train, val)
    with pytest.raises(UserError, match=r"train/annotations\.json has 3 categories; set .*NUM_CLASSES 3, not 80"):
        check(train, val, classes=80)
    path = tmp_path / "val" / "annotations.json"
    content = json.loads(path.read_text())
    content["categories"].reverse()
    content["categories"][0]["id"], content["categories"][2]["id"] = 7, 21
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"category 1 in the order of ids is 'c1' in .*, but 'c3' in .*val"):
        check(train, val)
    last = tmp_path / "train" / "6.png"
    last.write_bytes(last.read_bytes()[:200])
    with pytest.raises(UserError, match=r"cannot decode image .*train/6\.png|cannot read image .*train/6\.png"):
        check(train)
    monkeypatch.setattr(data, "_LARGE_BYTES", 1000)
    check(train, val, classes=80)  # too slow to read here
