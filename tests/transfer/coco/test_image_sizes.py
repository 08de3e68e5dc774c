"""Sizes and damage of image files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pretrain.common.image_io import open_upright
from tests.errors import refused
from transfer.coco.image_sizes import image_size, sound_sizes

PIXELS = np.random.default_rng(0).integers(0, 255, (30, 40, 3), np.uint8)


@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "tif", "bmp"])
@pytest.mark.parametrize("decode", [False, True])
def test_sizes_are_the_decoded_images(tmp_path: Path, kind: str, decode: bool) -> None:
    paths = [str(tmp_path / f"{orientation}.{kind}") for orientation in (1, 3, 6, 8)]
    for orientation, path in zip((1, 3, 6, 8), paths, strict=True):
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.fromarray(PIXELS).save(path, exif=exif)  # a BMP has none
    sizes = {path: open_upright(path).size for path in paths}
    assert sound_sizes(paths, decode) == sizes == {path: image_size(path) for path in paths}
    assert kind == "bmp" or set(sizes.values()) == {(40, 30), (30, 40)}


@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "tif", "bmp"])
def test_damage_is_seen(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    Image.fromarray(PIXELS).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole + b"appended by a telephone")
    assert image_size(str(path)) == (40, 30)
    for damaged in (whole[: len(whole) // 2], b"", b"<html></html>"):
        path.write_bytes(damaged)
        assert sound_sizes([str(path)], False) == {str(path): None}
        refused(lambda: image_size(str(path)), path)


def test_damage_in_the_middle_is_seen_by_decoding(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(PIXELS).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:1000] + bytes(200) + whole[1200:])
    assert sound_sizes([str(path)], False) == {str(path): (40, 30)}
    assert sound_sizes([str(path)], True) == {str(path): None}


def test_missing_files_have_no_size(tmp_path: Path) -> None:
    assert sound_sizes([str(tmp_path / "gone.jpg"), str(tmp_path)], False) == {
        str(tmp_path / "gone.jpg"): None,
        str(tmp_path): None,
    }
