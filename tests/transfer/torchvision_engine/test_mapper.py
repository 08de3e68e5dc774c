"""Reading, resizing and flipping an image, tested without Detectron2."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pretrain.common.errors import UserError
from tests.transfer import tiny_coco
from transfer.torchvision_engine.data import load_coco
from transfer.torchvision_engine.mapper import ImageMapper


def mapper(**keys) -> ImageMapper:
    defaults = {"sizes": [64], "sampling": "choice", "max_size": 128, "flip": False, "image_format": "RGB", "masks": ""}
    return ImageMapper(**{**defaults, **keys})


def record(folder, image: Image.Image, **keys) -> Any:
    image.save(folder / "image.png", **keys)
    width, height = image.size
    return {"file_name": str(folder / "image.png"), "height": height, "width": width, "image_id": 1, "annotations": []}


def test_sizes_are_drawn_from_the_choices_or_the_range():
    rng = np.random.default_rng(0)
    choice = {mapper(sizes=[64, 70, 90]).output_size(10, 10, rng)[0] for _ in range(100)}
    interval = [mapper(sizes=[64, 66], sampling="range").output_size(10, 10, rng)[0] for _ in range(300)]
    assert choice == {64, 70, 90}
    assert set(interval) == {64, 65, 66}


def test_images_are_upright_rgb_or_bgr(tmp_path):
    image = Image.new("RGB", (4, 2), (250, 0, 10))
    image.putpixel((0, 0), (0, 200, 0))
    exif = Image.Exif()
    exif[0x0112] = 6  # stored on its side, and displayed after a rotation to the right
    turned = record(tmp_path, image, exif=exif) | {"height": 4, "width": 2}
    assert mapper().read(turned)[0, 1].tolist() == [0, 200, 0]
    assert mapper(image_format="BGR").read(turned)[3, 0].tolist() == [10, 0, 250]
    gray = record(tmp_path, Image.new("L", (4, 2), 77))
    assert mapper().read(gray).tolist() == [[[77] * 3] * 4] * 2
    with pytest.raises(UserError, match=r"is 4 x 2, but its annotations say 5 x 2"):
        mapper().read(gray | {"width": 5})


def test_a_thin_image_keeps_a_pixel_of_its_shorter_side():
    rng = np.random.default_rng(0)
    for size, resized in (((2, 3000), (1, 128)), ((3000, 2), (128, 1)), ((20, 3000), (1, 128))):  # 0.85 is rounded
        assert mapper().output_size(*size, rng) == resized


def test_masks_of_rle_fit_their_boxes(tmp_path):
    name = tiny_coco.write(tmp_path, rle=True)
    records, _ = load_coco(tiny_coco.read_data_sets(tiny_coco.config(tmp_path, name))[name])
    target = mapper(masks="bitmask")(records[0], (0, 0))["target"]
    for box, mask in zip(target["boxes"], target["masks"], strict=True):
        rows, columns = torch.where(mask)
        tight = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert torch.allclose(torch.stack(tight).float(), box, atol=1.5)
