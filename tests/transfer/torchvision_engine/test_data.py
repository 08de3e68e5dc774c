"""The reader of annotation files, without Detectron2."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.errors import refused
from tests.transfer import tiny_coco
from transfer.torchvision_engine import data
from transfer.torchvision_engine.engine import TorchvisionEngine
from transfer.torchvision_engine.mapper import build_mapper


def test_images_without_objects_or_keypoints_are_not_trained_on(tmp_path):
    name = tiny_coco.write(tmp_path, keypoints=True)

    def change(content):
        for annotation in content["annotations"]:
            if annotation["image_id"] == 1:
                annotation |= {"keypoints": [0] * 51, "num_keypoints": 0}
            annotation["iscrowd"] = int(annotation["image_id"] == 3)

    tiny_coco.edit(name, change)
    keys = {"MODEL__KEYPOINT_ON": True, "MODEL__ROI_HEADS__NUM_CLASSES": 1}
    records, _ = data.load_training_records(tiny_coco.config(tmp_path / "out", name, **keys))
    assert [r["image_id"] for r in records] == [2, 4, 5]
    records, _ = data.load_training_records(tiny_coco.config(tmp_path / "out", name))
    assert [r["image_id"] for r in records] == [1, 2, 4, 5]
    off = tiny_coco.config(tmp_path / "out", name, DATALOADER__FILTER_EMPTY_ANNOTATIONS=False)
    assert len(data.load_training_records(off)[0]) == 6


def test_a_box_counts_whatever_its_mask_unless_masks_are_trained(tmp_path):
    name = tiny_coco.write(tmp_path)
    tiny_coco.edit(name, lambda content: content["annotations"][0].update(segmentation=[[5, 5, 9, 9]]))
    for masks, boxes in ((False, 2), (True, 1)):
        cfg = tiny_coco.config(tmp_path / "out", name, MODEL__MASK_ON=masks)
        records, flip = data.load_training_records(cfg)
        (first,) = [record for record in records if record["image_id"] == 1]
        target = build_mapper(cfg, True, flip)(first, (0, 0))["target"]
        assert len(target["boxes"]) == len(target.get("masks", target["boxes"])) == boxes


def test_records_come_back_as_they_were_packed():
    plain: list[Any] = [{"file_name": f"{i}.jpg", "annotations": [{"box": np.arange(i)}] * i} for i in range(5)]
    records = pickle.loads(pickle.dumps(data.Records(iter(plain))))  # as a worker that is not forked gets them
    assert len(records) == 5 and [record["file_name"] for record in records] == [image["file_name"] for image in plain]
    assert records[3]["annotations"][2]["box"].tolist() == [0, 1, 2]
    with pytest.raises(IndexError):
        records[5]
    assert list(data.Records(())) == []


def test_a_record_is_a_function_of_its_position_in_the_stream(tmp_path):
    """The images of a pass, in batches that begin anywhere, have the same sizes, flips and boxes."""
    cfg = tiny_coco.config(tmp_path / "out", tiny_coco.write(tmp_path), SOLVER__IMS_PER_BATCH=1)
    images = TorchvisionEngine(cfg).load_training_data()

    def some(start: int) -> list[Any]:
        batches = images.batches(seed=3, start=start, workers=0)
        return [batch[0] for batch in itertools.islice(batches, 20 - start)]

    for first, again in zip(some(0)[7:], some(7), strict=True):
        assert first["file_name"] == again["file_name"] and torch.equal(first["image"], again["image"])
        assert torch.equal(first["target"]["boxes"], again["target"]["boxes"])
    assert (
        len({(image["file_name"], *image["image"].shape, image["image"][0, 9, :9].sum().item()) for image in some(0)})
        > 10
    )
    test_image: Any = TorchvisionEngine(cfg).test_images(images.records)[0, 0]
    assert "target" not in test_image


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_named_in_one_line(tmp_path, workers):
    name = tiny_coco.write(tmp_path)
    path = tmp_path / "2.png"
    path.write_bytes(path.read_bytes()[:300])
    cfg = tiny_coco.config(tmp_path / "out", name, DATALOADER__NUM_WORKERS=workers)
    engine = TorchvisionEngine(cfg)
    records, _ = engine.load_test_set(name)
    refused(lambda: engine.run_on_test_set(nn.Identity(), records, list), path)
    batches = engine.load_training_data().batches(seed=0, start=0, workers=workers)
    refused(lambda: list(itertools.islice(batches, 9)), path)
