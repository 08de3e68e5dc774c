"""The reader of annotation files, without Detectron2."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from tests.transfer import tiny_coco
from transfer.torchvision_engine import data


def test_categories_are_numbered_in_the_order_of_their_ids(tmp_path):
    records, info = data.load_coco(tiny_coco.write(tmp_path))
    assert info.category_ids == [7, 14, 21]
    assert [r["image_id"] for r in records] == [1, 2, 3, 4, 5, 6]
    given = json.loads((tmp_path / "annotations.json").read_text())["annotations"]
    first = [a["label"] for a in records[0]["annotations"]]
    assert first == [a["category_id"] // 7 - 1 for a in given if a["image_id"] == 1]


def test_keypoints_move_to_pixel_centers_and_mirror_by_name(tmp_path):
    records, info = data.load_coco(tiny_coco.write(tmp_path, keypoints=True))
    given = json.loads((tmp_path / "annotations.json").read_text())["annotations"][0]["keypoints"]
    got = records[0]["annotations"][0]["keypoints"]
    assert np.allclose(got[:, :2], np.reshape(given, (-1, 3))[:, :2] + 0.5)
    assert info.flip == [0, 2, 1, 4, 3, 6, 5, 8, 7, 10, 9, 12, 11, 14, 13, 16, 15]


def test_images_without_objects_or_keypoints_are_not_trained_on(tmp_path):
    name = tiny_coco.write(tmp_path, keypoints=True)
    content = json.loads((tmp_path / "annotations.json").read_text())
    for annotation in content["annotations"]:
        if annotation["image_id"] == 1:
            annotation |= {"keypoints": [0] * 51, "num_keypoints": 0}
        annotation["iscrowd"] = int(annotation["image_id"] == 3)
    (tmp_path / "annotations.json").write_text(json.dumps(content))
    keys = {"MODEL__KEYPOINT_ON": True, "MODEL__ROI_HEADS__NUM_CLASSES": 1}
    records, _ = data.training_records(tiny_coco.config(tmp_path / "out", name, **keys))
    assert [r["image_id"] for r in records] == [2, 4, 5]
    records, _ = data.training_records(tiny_coco.config(tmp_path / "out", name))
    assert [r["image_id"] for r in records] == [1, 2, 4, 5]
    off = tiny_coco.config(tmp_path / "out", name, DATALOADER__FILTER_EMPTY_ANNOTATIONS=False)
    assert len(data.training_records(off)[0]) == 6


def test_records_come_back_as_they_were_packed():
    plain = [{"file_name": f"{i}.jpg", "annotations": [{"box": np.arange(i)}] * i} for i in range(5)]
    records = pickle.loads(pickle.dumps(data.Records(iter(plain))))  # as a worker that is not forked gets them
    assert len(records) == 5 and [record["file_name"] for record in records] == [one["file_name"] for one in plain]
    assert records[3]["annotations"][2]["box"].tolist() == [0, 1, 2]
    with pytest.raises(IndexError):
        records[5]
    assert list(data.Records(())) == []
