"""The reader, the mapper and the stream of batches, without Detectron2."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from pretrain.common.errors import UserError
from tests.transfer import tiny_coco
from transfer.coco import data as coco_data
from transfer.torchvision_engine import data as data


def mapper(**keys) -> data.Mapper:
    given = {"sizes": [64], "sampling": "choice", "max_size": 128, "flip": False, "image_format": "RGB", "masks": ""}
    return data.Mapper(**{**given, **keys})


def record(folder, image: Image.Image, **keys) -> dict:
    image.save(folder / "image.png", **keys)
    width, height = image.size
    return {"file_name": str(folder / "image.png"), "height": height, "width": width, "image_id": 1, "annotations": []}


def test_categories_are_numbered_in_the_order_of_their_ids(tmp_path):
    records, info = data.load_coco(tiny_coco.write(tmp_path))
    assert info.category_ids == [7, 14, 21]
    assert [r["image_id"] for r in records] == [1, 2, 3, 4, 5, 6]
    given = json.loads((tmp_path / "annotations.json").read_text())["annotations"]
    first = [a["label"] for a in records[0]["annotations"]]
    assert first == [a["category_id"] // 7 - 1 for a in given if a["image_id"] == 1]


def test_keypoints_move_to_pixel_centres_and_mirror_by_name(tmp_path):
    records, info = data.load_coco(tiny_coco.write(tmp_path, keypoints=True))
    given = json.loads((tmp_path / "annotations.json").read_text())["annotations"][0]["keypoints"]
    got = records[0]["annotations"][0]["keypoints"]
    assert np.allclose(got[:, :2], np.reshape(given, (-1, 3))[:, :2] + 0.5)
    assert info.flip == data.COCO_FLIP


def test_images_without_objects_or_keypoints_are_left_out_of_training(tmp_path):
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


@pytest.mark.parametrize(
    ("height", "width", "size", "most", "expected"),
    [
        (480, 640, 800, 1333, (800, 1067)),
        (640, 480, 800, 1333, (1067, 800)),
        (400, 1000, 800, 1333, (533, 1333)),
        (427, 640, 0, 1333, (427, 640)),
        (375, 500, 640, 1333, (640, 853)),
    ],
)
def test_size_of_the_resized_image(height, width, size, most, expected):
    assert mapper(sizes=[size], max_size=most).output_size(height, width, None) == expected


def test_sizes_are_drawn_from_the_choices_or_the_range():
    rng = np.random.default_rng(0)
    choice = {mapper(sizes=[64, 70, 90]).output_size(10, 10, rng)[0] for _ in range(100)}
    interval = [mapper(sizes=[64, 66], sampling="range").output_size(10, 10, rng)[0] for _ in range(300)]
    assert choice == {64, 70, 90}
    assert set(interval) == {64, 65, 66}


def test_images_are_upright_rgb_or_bgr(tmp_path):
    picture = Image.new("RGB", (4, 2), (250, 0, 10))
    picture.putpixel((0, 0), (0, 200, 0))
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side: shown after a turn to the right
    turned = record(tmp_path, picture, exif=exif) | {"height": 4, "width": 2}
    assert mapper().read(turned)[0, 1].tolist() == [0, 200, 0]
    assert mapper(image_format="BGR").read(turned)[3, 0].tolist() == [10, 0, 250]
    gray = record(tmp_path, Image.new("L", (4, 2), 77))
    assert mapper().read(gray).tolist() == [[[77] * 3] * 4] * 2
    with pytest.raises(UserError, match=r"is 4 x 2, its annotations say 5 x 2"):
        mapper().read(gray | {"width": 5})


def test_polygons_on_rle_data_are_refused_with_the_remedy(tmp_path):
    records, _ = data.load_coco(tiny_coco.write(tmp_path, rle=True))
    with pytest.raises(UserError, match=r"INPUT\.MASK_FORMAT bitmask"):
        mapper(masks="polygon")(records[0], np.random.default_rng(0))
    target = mapper(masks="bitmask")(records[0], np.random.default_rng(0))["target"]
    for box, mask in zip(target["boxes"], target["masks"], strict=True):
        rows, columns = torch.where(mask)
        tight = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert torch.allclose(torch.stack(tight).float(), box, atol=1.5)


def damaged_png(path) -> None:
    """A PNG of noise whose middle is zeros: its header and end are whole."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    content = bytearray(path.read_bytes())
    content[len(content) // 3 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 3)
    path.write_bytes(content)


def readers() -> list:
    def ours(path):
        return mapper().read({"file_name": str(path), "height": 64, "width": 96})

    def detectron2s(path):
        pytest.importorskip("detectron2")
        from transfer.detectron2_engine.data import read_image

        return read_image(str(path), "RGB")

    return [ours, detectron2s]


@pytest.mark.parametrize("read", readers(), ids=["torchvision", "detectron2"])
@pytest.mark.parametrize("form", ["png", "pgm", "tif"])
def test_16_bit_gray_is_scaled(tmp_path, read, form):
    deep = np.linspace(0, 65535, 64 * 96).reshape(64, 96).astype(np.uint16)
    path = tmp_path / f"deep.{form}"
    Image.fromarray(deep).save(path)
    got = read(path)
    assert got.dtype == np.uint8 and np.array_equal(got, np.repeat((deep >> 8)[:, :, None], 3, axis=2))


@pytest.mark.parametrize("read", readers(), ids=["torchvision", "detectron2"])
def test_a_damaged_png_is_named(tmp_path, read):
    damaged_png(tmp_path / "bad.png")
    with pytest.raises(UserError, match=r"cannot read image .*bad\.png"):
        read(tmp_path / "bad.png")


def test_what_was_left_out_is_in_the_runs_log(tmp_path, caplog):
    name = tiny_coco.write(tmp_path)
    content = json.loads((tmp_path / "annotations.json").read_text())
    content["annotations"][0]["bbox"] = [0, 0, 0, 0]
    (tmp_path / "annotations.json").write_text(json.dumps(content))
    cfg = coco_data.prepare(tiny_coco.config(tmp_path / "out", f"{name}:skip_bad"))
    for _ in range(2):
        data.load_coco(cfg.DATASETS.TEST[0])
    assert [text for text in caplog.messages if "skipped bad records: 1 annotations" in text] == caplog.messages
    assert len(caplog.messages) == 1
