"""The reader of annotation files, tested without Detectron2."""

import itertools
import logging
from pathlib import Path

import pytest
from torch import nn

from tests.errors import refused
from tests.transfer import tiny_coco
from transfer.coco.records import PackedList, pack
from transfer.torchvision_engine import data
from transfer.torchvision_engine.engine import TorchvisionEngine
from transfer.torchvision_engine.mapper import build_mapper


def test_images_without_objects_or_keypoints_are_not_trained_on(tmp_path, caplog):
    name = tiny_coco.write(tmp_path, keypoints=True)

    def change(content):
        for annotation in content["annotations"]:
            if annotation["image_id"] == 1:
                annotation |= {"keypoints": [0] * 51, "num_keypoints": 0}
            annotation["iscrowd"] = int(annotation["image_id"] == 3)

    tiny_coco.edit(name, change)
    data_sets = tiny_coco.read_data_sets(tiny_coco.config(tmp_path / "out", name))
    keys = {"MODEL__KEYPOINT_ON": True, "MODEL__ROI_HEADS__NUM_CLASSES": 1}
    records, _ = data.load_training_records(tiny_coco.config(tmp_path / "out", name, **keys), data_sets)
    assert [r["image_id"] for r in records] == [2, 4, 5]
    caplog.set_level(logging.INFO)
    TorchvisionEngine(tiny_coco.config(tmp_path / "out", name, **keys), data_sets).load_training_data()
    (line,) = [line for line in caplog.messages if "skipping" in line]
    filtering = "(DATALOADER.FILTER_EMPTY_ANNOTATIONS True)"
    counts = "2 without objects, 1 with fewer than 1 labeled keypoint"
    assert line == f"skipping 3 of 6 training images: {counts} {filtering}"
    caplog.clear()
    TorchvisionEngine(tiny_coco.config(tmp_path / "out", name), data_sets).load_training_data()
    assert f"skipping 2 of 6 training images: 2 without objects {filtering}" in caplog.messages
    records, _ = data.load_training_records(tiny_coco.config(tmp_path / "out", name), data_sets)
    assert [r["image_id"] for r in records] == [1, 2, 4, 5]
    off = tiny_coco.config(tmp_path / "out", name, DATALOADER__FILTER_EMPTY_ANNOTATIONS=False)
    assert len(data.load_training_records(off, data_sets)[0]) == 6


def test_shapes_of_images_are_known_without_unpacking_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of two sets, the first of which is selected in part."""
    name = tiny_coco.write(tmp_path)
    data_set = tiny_coco.read_data_sets(tiny_coco.config(tmp_path / "out", name))[name]
    images = [image for image, _ in data_set.images or ()]
    for index, image in enumerate(images):
        image["width"] = image["height"] + index % 3 - 1
    content = {"images": images, "categories": [], "annotations": []}
    sets = [pack(data_set.source, content, []) for _ in range(2)]
    chosen = iter([False, *[True] * 99])
    records = data.Records(sets, lambda _: next(chosen))
    expected = [record["width"] > record["height"] for record in records]
    monkeypatch.setattr(PackedList, "__getitem__", None)
    assert records.list_wide() == expected and len(expected) == 2 * len(images) - 1 and True in expected[:4]


def test_a_box_counts_whatever_its_mask_unless_masks_are_trained(tmp_path):
    name = tiny_coco.write(tmp_path)
    tiny_coco.edit(name, lambda content: content["annotations"][0].update(segmentation=[[5, 5, 9, 9]]))
    for masks, boxes in ((False, 2), (True, 1)):
        cfg = tiny_coco.config(tmp_path / "out", name, MODEL__MASK_ON=masks)
        records, flip = data.load_training_records(cfg, tiny_coco.read_data_sets(cfg))
        (first,) = [record for record in records if record["image_id"] == 1]
        target = build_mapper(cfg, True, flip)(first, (0, 0))["target"]
        assert len(target["boxes"]) == len(target.get("masks", target["boxes"])) == boxes


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_named_in_one_line(tmp_path, workers):
    name = tiny_coco.write(tmp_path)
    path = tmp_path / "2.png"
    path.write_bytes(path.read_bytes()[:300])
    cfg = tiny_coco.config(tmp_path / "out", name, DATALOADER__NUM_WORKERS=workers)
    engine = TorchvisionEngine(cfg, tiny_coco.read_data_sets(cfg))
    records, _ = engine.load_test_set(name)
    refused(lambda: engine.run_on_test_set(nn.Identity(), records, list), path)
    batches = engine.load_training_data().batches(seed=0, start=0, workers=workers)
    refused(lambda: list(itertools.islice(batches, 9)), path)
