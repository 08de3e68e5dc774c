"""Pictures of predictions beside the ground truth."""

from __future__ import annotations

import json
import os

import cv2
import numpy as np
import pytest

from pretrain.common.errors import UserError
from tests.transfer import tiny_coco
from transfer.coco import pictures


def predictions_of(folder) -> list[dict]:
    annotations = json.loads((folder / "annotations.json").read_text())["annotations"]
    return [{k: v for k, v in a.items() if k not in ("id", "iscrowd")} | {"score": 0.9} for a in annotations]


@pytest.mark.parametrize("kind", ["polygons", "rle", "keypoints"])
def test_equal_predictions_and_truth_look_the_same(tmp_path, kind):
    tiny_coco.write(tmp_path, keypoints=kind == "keypoints", rle=kind == "rle")
    written = pictures.draw(
        tmp_path / "annotations.json", tmp_path, predictions_of(tmp_path), tmp_path / "out", count=6
    )
    assert [p.name for p in written] == [f"{i}.jpg" for i in range(1, 7)]
    canvas = cv2.imread(str(written[0])).astype(int)  # image 1: two objects, no crowd
    half = canvas.shape[1] // 2
    left, right = canvas[40:, : half - 4], canvas[40:, half : 2 * half - 4]
    strip = 110  # the labels differ: a prediction has its score
    assert np.abs(left - right).mean() < 8
    empty = cv2.imread(str(written[5])).astype(int)[40:]
    assert np.abs(empty[:, : half - 4] - empty[:, half : 2 * half - 4]).mean() < 4
    plain = cv2.resize(cv2.imread(str(tmp_path / "1.png")), (half - 4, 480), interpolation=cv2.INTER_CUBIC).astype(int)
    assert np.abs(canvas[28 + strip :, : half - 4] - plain[strip:]).mean() > 3, "something is drawn"


def test_weak_predictions_are_skipped_except_the_best_one(tmp_path):
    tiny_coco.write(tmp_path)
    best, *rest = predictions_of(tmp_path)
    weak = [best | {"score": 0.3}] + [p | {"score": 0.1} for p in rest]
    (one,) = pictures.draw(tmp_path / "annotations.json", tmp_path, weak, tmp_path / "a", count=1)
    (alone,) = pictures.draw(tmp_path / "annotations.json", tmp_path, weak[:1], tmp_path / "b", count=1)
    assert one.read_bytes() == alone.read_bytes()


@pytest.mark.parametrize("kind", ["absolute", "../..", "a/b"])
def test_pictures_stay_in_their_folder(tmp_path, kind):
    tiny_coco.write(tmp_path)
    content = json.loads((tmp_path / "annotations.json").read_text())
    for image in content["images"]:
        start = str(tmp_path / "elsewhere") if kind == "absolute" else kind
        image["id"] = f"{start}/{image['id']}"
    (tmp_path / "annotations.json").write_text(json.dumps(content | {"annotations": []}))
    written = pictures.draw(tmp_path / "annotations.json", tmp_path, [], tmp_path / "out", count=6)
    assert len(set(written)) == 6 and {path.resolve().parent for path in written} == {tmp_path / "out"}


def test_a_missing_image_is_named(tmp_path):
    tiny_coco.write(tmp_path)
    (tmp_path / "1.png").unlink()
    with pytest.raises(UserError, match=r"1\.png"):
        pictures.draw(tmp_path / "annotations.json", tmp_path, [], tmp_path / "out", count=1)


def test_any_folder_and_any_category_name(tmp_path):
    folder = tmp_path / os.fsdecode(b"odd\xff")
    tiny_coco.write(folder)
    content = json.loads((folder / "annotations.json").read_text())
    for category in content["categories"]:
        category["name"] = "caf\u00e9 \ud800"  # half a surrogate pair: JSON allows it
    (folder / "annotations.json").write_text(json.dumps(content))
    written = pictures.draw(folder / "annotations.json", folder, [], folder / "out", count=6)
    assert len(written) == 6 and all(path.stat().st_size for path in written)
