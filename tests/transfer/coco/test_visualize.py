"""Pictures of predictions beside the ground truth."""

from __future__ import annotations

import json

import cv2
import numpy as np
import pytest

from tests.transfer import tiny_coco
from transfer.coco import data, visualize


def predictions_of(folder) -> list[dict]:
    annotations = json.loads((folder / "annotations.json").read_text())["annotations"]
    return [{k: v for k, v in a.items() if k not in ("id", "iscrowd")} | {"score": 0.9} for a in annotations]


@pytest.mark.parametrize("kind", ["polygons", "rle", "keypoints"])
def test_equal_predictions_and_truth_look_the_same(tmp_path, kind):
    tiny_coco.write(tmp_path, keypoints=kind == "keypoints", rle=kind == "rle")
    visualize.draw(
        data.read(tmp_path / "annotations.json"), tmp_path, predictions_of(tmp_path), tmp_path / "out", count=6
    )
    written = sorted((tmp_path / "out").iterdir())
    assert [p.name for p in written] == [f"{i}.png" for i in range(1, 7)]
    canvas = cv2.imread(str(written[0])).astype(int)  # image 1: two objects, no crowd
    half = canvas.shape[1] // 2
    left, right = canvas[40:, : half - 4], canvas[40:, half : 2 * half - 4]
    strip = 110  # the labels differ: a prediction has its score
    assert np.abs(left - right).mean() < 8
    empty = cv2.imread(str(written[5])).astype(int)[40:]
    assert np.abs(empty[:, : half - 4] - empty[:, half : 2 * half - 4]).mean() < 4
    plain = cv2.resize(cv2.imread(str(tmp_path / "1.png")), (half - 4, 480), interpolation=cv2.INTER_CUBIC).astype(int)
    assert np.abs(canvas[28 + strip :, : half - 4] - plain[strip:]).mean() > 3, "something is drawn"


def test_detectors_stand_beside_the_truth_in_panels_of_one_size(tmp_path):
    tiny_coco.write(tmp_path)
    content = data.read(tmp_path / "annotations.json")
    (first,) = [image for image in content["images"] if image["id"] == 1]
    second = dict(first, id=99)  # the same photo without an object
    truth = predictions_of(tmp_path)
    columns = {"all": truth, "none": [], "weak": [p | {"score": 0.1} for p in truth]}
    out = tmp_path / "out.png"
    visualize.compare(content, [first, second], tmp_path, columns, out)
    canvas = cv2.imread(str(out)).astype(int)
    side, title, gap = 360, 28, 4
    assert canvas.shape == (2 * (side + title), 4 * (side + gap), 3)

    def panel(row, column):
        top, left = row * (side + title) + title, column * (side + gap)
        return canvas[top : top + round(side * first["height"] / first["width"]), left : left + side]

    plain = panel(1, 0)
    drawn = [np.abs(panel(0, column) - plain).sum(axis=2) > 60 for column in range(4)]
    assert not any(np.abs(panel(1, column) - plain).any() for column in range(4))
    assert not drawn[2].any(), "no prediction, nothing drawn"
    scale = side / first["width"]
    boxes = [record["bbox"] for record in truth if record["image_id"] == 1]
    for column, shown in ((0, boxes), (1, boxes), (3, boxes[:1])):  # of weak predictions only the best is shown
        for box in boxes:
            x, y, w, h = (round(value * scale) for value in box)
            edge = drawn[column][y + h - 4 : y + h + 4, x + 4 : x + w - 4].any(axis=0).mean()
            assert (edge > 0.9) == (box in shown), (column, box)


def test_the_compared_images_are_the_first_with_an_object(tmp_path):
    tiny_coco.write(tmp_path)
    content = data.read(tmp_path / "annotations.json")
    content["images"].reverse()
    content["annotations"] = [record for record in content["annotations"] if record["image_id"] != 2]
    assert [image["id"] for image in visualize.first_annotated(content, 3)] == [1, 3, 4]
    assert [image["id"] for image in visualize.first_annotated(content, 9)] == [1, 3, 4, 5]  # the last has none


def test_a_picture_keeps_its_images_name_and_stays_in_its_folder() -> None:
    names = {"a.jpg": "a.jpg", "b/c.PNG": "b/c.PNG", "c.tif": "c.tif.jpg", "/data/d.jpg": "data/d.jpg", "../e": "e.jpg"}
    assert {name: str(visualize.picture_file("out", name)) for name in names} == {
        name: f"out/{kept}" for name, kept in names.items()
    }
