"""The data sets of the studies are valid for pycocotools, and their pixels are those of the recorded runs."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from pycocotools.coco import COCO

from studies.people.draw import KEYPOINTS, add_crowd, write_people
from studies.tools import clutter
from tests.tools.test_make_data import check_record
from tools.data.coco_writer import CocoWriter


def test_clutter_hides_parts_of_the_digit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(clutter, "_IMAGES", {"train": 20, "val": 10})
    clutter.write_cluttered_digits(tmp_path)
    paths = sorted((tmp_path / "images").rglob("*.jpg"))
    pixels: list[Any] = [cv2.imread(str(path), cv2.IMREAD_GRAYSCALE) for path in paths]
    assert len(paths) == 30 and {image.shape for image in pixels} == {(32, 32)}
    assert np.mean([np.abs(np.diff(image.astype(int), axis=0)).mean() for image in pixels]) > 20  # noise of 30 levels


def test_people(tmp_path: Path):
    people = tmp_path / "people"
    write_people(people, {"train": 40, "val": 10}, 96, seed=0)
    coco: Any = COCO(str(people / "coco" / "annotations" / "keypoints_train.json"))
    category = coco.loadCats([1])[0]
    assert category["keypoints"] == KEYPOINTS and len(KEYPOINTS) == 17 and len(category["skeleton"]) == 19
    annotations = coco.loadAnns(coco.getAnnIds())
    crowds = [a for a in annotations if a["iscrowd"]]
    assert len(crowds) == 4 and all(isinstance(a["segmentation"]["counts"], list) for a in crowds)
    assert sum(not coco.getAnnIds(i) for i in coco.getImgIds()) == 4  # one image in ten is empty
    flags: list[int] = []
    for annotation in annotations:
        image = coco.loadImgs([annotation["image_id"]])[0]
        mask = coco.annToMask(annotation).astype(bool)
        check_record(annotation, mask)
        x, y, v = np.array(annotation["keypoints"]).reshape(17, 3).T
        assert annotation["num_keypoints"] == (v > 0).sum() and not (x[v == 0].any() or y[v == 0].any())
        assert (x < image["width"]).all() and (y < image["height"]).all() and (x >= 0).all() and (y >= 0).all()
        if annotation["iscrowd"]:
            assert not v.any()
            continue
        assert not (v[5] and v[6]) or x[5] > x[6]  # shoulders of a person who faces us
        flags += v.tolist()
        grown = cv2.dilate(mask.astype(np.uint8), np.ones((3, 3))).astype(bool)
        assert grown[y[v == 2], x[v == 2]].all()  # what is visible lies on the figure
    assert (np.bincount(flags, minlength=3) > 10).all()


@pytest.mark.parametrize("corner", [0, 1])
def test_crowds_run_lengths_are_their_pixels(tmp_path: Path, corner: int):
    mask = np.zeros((9, 7), bool)
    mask[2:5, 1:6] = True
    mask[0, 0] = corner
    writer = CocoWriter(tmp_path, "train", [{"id": 1, "name": "thing"}])
    add_crowd(writer, writer.add_image(np.zeros((9, 7, 3), np.uint8)), mask)
    writer.write("instances")
    coco = COCO(str(tmp_path / "annotations" / "instances_train.json"))
    annotation = coco.loadAnns([1])[0]
    np.testing.assert_array_equal(coco.annToMask(annotation), mask)
    assert annotation["area"] == mask.sum() and annotation["iscrowd"] == 1
