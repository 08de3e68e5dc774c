"""Every kind of image file becomes upright 8-bit RGB, or an error that names it."""

import contextlib
import errno
import io
import logging
import os
import re
import struct
from pathlib import Path
from unittest import mock

import cv2
import numpy as np
import pytest
from PIL import Image

from pretrain.common import images
from pretrain.common.errors import UserError
from pretrain.common.images import CorruptImage, decode
from pretrain.data.sources import Files
from tests.pretrain.images import encoded, picture

RGB = picture()
PIL_RGB = Image.fromarray(RGB)


FORMS = [(form, "RGB") for form in ("BMP", "TIFF", "PPM")]
FORMS += [("PNG", mode) for mode in ("RGB", "L", "LA", "1", "P", "RGBA")]


@pytest.mark.parametrize(("form", "mode"), FORMS)
def test_lossless_files_give_their_pixels_in_rgb(form: str, mode: str):
    image = PIL_RGB.convert(mode)
    np.testing.assert_array_equal(decode(encoded(image, form), "x"), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("quality", [50, 95])
def test_a_jpeg_is_decoded_as_pillow_does(quality: int):
    data = encoded(PIL_RGB, "JPEG", quality=quality)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    assert np.abs(decode(data, "x") - expected).max() <= 1


def test_cmyk_jpeg():
    image = PIL_RGB.convert("CMYK")
    got = decode(encoded(image, "JPEG", quality=95), "x").astype(int)
    assert np.abs(got - RGB).mean() < 8  # JPEG's loss; inverted inks would be off by about 128


@pytest.mark.parametrize("channels", [1, 3])
def test_16_bit_png_is_scaled_to_8_bit(channels: int):
    deep = np.linspace(0, 65535, 40 * 56).reshape(40, 56).astype(np.uint16)
    data = cv2.imencode(".png", np.dstack([deep] * channels))[1].tobytes()
    got = decode(data, "x")
    assert got.dtype == np.uint8 and got.shape == (40, 56, 3)
    assert np.abs(got - deep[:, :, None] / 257).max() <= 1


def of_values(values: np.ndarray, suffix: str) -> bytes:
    return cv2.imencode(suffix, values)[1].tobytes()


def refused_by_both(folder: Path, data: bytes, says: str) -> None:
    """Assert that OpenCV's way of reading a file and Pillow's alone refuse it in these words."""
    path = folder / "a.png"
    path.write_bytes(data)
    for read in (Files(folder, [path.name]).read, lambda _: images.open_upright(str(path))):
        with pytest.raises(CorruptImage, match=rf"a\.png: .*{says}"):
            read(0)


@pytest.mark.parametrize("kind", ["float32", "float64", "int16", "int32"])
@pytest.mark.parametrize("channels", [1, 3])
def test_values_without_a_known_range_are_refused(tmp_path: Path, kind: str, channels: int):
    """If they were clipped to 8 bits, floating-point numbers from 0 to 1 would be black and large integers white."""
    data = of_values((np.ones((40, 56, channels)) * 100).astype(kind), ".tif")
    refused_by_both(tmp_path, data, "8 (and|or) 16 bits")


def packed_tiff(values: np.ndarray) -> bytes:
    """Write a 12-bit gray TIFF with two pixels in three bytes, as microscopes do."""
    left = values[:, ::2].astype(int)
    right = values[:, 1::2].astype(int)
    pixels = np.stack([left >> 4, (left & 15) << 4 | right >> 8, right & 255], -1).astype(np.uint8).tobytes()
    height, width = values.shape
    tags = {256: width, 257: height, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: height, 279: len(pixels)}
    rows = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<I", 8 + len(pixels)) + pixels + struct.pack("<H", len(tags)) + rows + bytes(4)


@pytest.mark.parametrize("form", ["PGM", "PPM", "TIFF"])
def test_12_bits_that_the_header_states_are_scaled(tmp_path: Path, form: str):
    values = np.linspace(0, 4095, 40 * 56).reshape(40, 56).astype(np.uint16)
    shown = np.dstack([values] * 3) if form == "PPM" else values
    header = b"%s\n56 40\n4095\n" % (b"P6" if form == "PPM" else b"P5")
    data = packed_tiff(values) if form == "TIFF" else header + shown.astype(">u2").tobytes()
    (tmp_path / "a").write_bytes(data)
    for got in (decode(data, "x"), images.open_upright(f"{tmp_path}/a").convert("RGB")):
        assert np.abs(np.asarray(got)[..., 1] - values / 4095 * 255).max() <= 1


@pytest.mark.parametrize("suffix", [".png", ".tif"])
@pytest.mark.parametrize("channels", [1, 3])
def test_16_bit_files_of_fewer_bits_are_named_once(tmp_path: Path, monkeypatch, suffix: str, channels: int):
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger("pretrain.common.images"), "warning", lines.append)
    values = np.linspace(0, 4000, 40 * 56 * channels).reshape(40, 56, channels).astype(np.uint16)
    data = of_values(values, suffix)
    path = tmp_path / f"b{suffix}"
    path.write_bytes(data)
    decode(of_values(values * 16, suffix), "full")
    decode(of_values((values // 256).astype(np.uint8), suffix), "8 bits")
    assert not lines
    for read in (lambda: decode(data, path.name), lambda: images.open_upright(str(path))):
        lines.clear()
        monkeypatch.setattr(images, "_has_warned", False)
        read()
        read()
        assert len(lines) == 1 and path.name in lines[0] and re.search("is 1[56] of 255", lines[0])


def test_opencv_writes_no_lines_of_its_own(capfd):
    for data in (packed_tiff(np.zeros((40, 56), np.uint16)), encoded(PIL_RGB, "TIFF")[:3000]):
        with contextlib.suppress(CorruptImage):
            decode(data, "x")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_exif_orientation_is_applied(orientation: int, form: str):
    exif = Image.Exif()
    exif[0x0112] = orientation
    transposed = RGB.transpose(1, 0, 2)
    upright = [RGB, RGB[:, ::-1], RGB[::-1, ::-1], RGB[::-1]]  # of the orientations 1 to 4
    upright += [transposed, np.rot90(RGB, -1), transposed[::-1, ::-1], np.rot90(RGB)]  # of 5 to 8
    options = {"quality": 100, "subsampling": 0} if form == "JPEG" else {}
    got = decode(encoded(PIL_RGB, form, exif=exif, **options), "x")
    assert got.shape == upright[orientation - 1].shape
    assert np.abs(got.astype(int) - upright[orientation - 1]).mean() < 2


@pytest.mark.parametrize("form", ["JPEG", "PNG", "BMP", "TIFF", "WEBP"])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.9])
def test_truncated_files_are_corrupt(form: str, share: float):
    data = encoded(PIL_RGB, form)
    with pytest.raises(CorruptImage, match=r"/a/b\.jpg"):
        decode(data[: int(len(data) * share)], "/a/b.jpg")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "it is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "it contains text, 'version https://git-lfs."),
        (b"\0\0\0\x24ftypheic\0\0", "HEIC needs pip install pillow-heif"),
    ],
)
def test_what_is_no_image_is_described(tmp_path: Path, content: bytes, says: str):
    refused_by_both(tmp_path, content, says)


def test_pillow_reads_what_opencv_cannot(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(images.cv2, "imdecode", lambda *_: None)
    np.testing.assert_array_equal(decode(encoded(PIL_RGB, "PNG"), "x"), RGB)
    deep = np.linspace(0, 65535, 40 * 56).reshape(40, 56).astype(np.uint16)
    np.testing.assert_array_equal(decode(encoded(Image.fromarray(deep), "PNG"), "x")[..., 1], deep >> 8)


def test_too_many_pixels_are_refused_before_they_are_decoded(tmp_path: Path, monkeypatch):
    """Above Pillow's limit it warns and torchvision reads; above twice as many, both refuse."""
    (tmp_path / "a.png").write_bytes(encoded(PIL_RGB, "PNG"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", RGB.size // 3 - 1)
    np.testing.assert_array_equal(Files(tmp_path, ["a.png"]).read(0), RGB)
    monkeypatch.setattr(images.cv2, "imdecode", lambda *_: pytest.fail("decoded"))
    monkeypatch.setattr(images, "upright", lambda *_: pytest.fail("decoded"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", RGB.size // 6 - 1)
    refused_by_both(tmp_path, encoded(PIL_RGB, "PNG"), "exceeds limit of 2238 pixels; cut it .*, or shrink it$")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_a_disk_that_fails_is_tried_again_and_is_no_corrupt_image(monkeypatch: pytest.MonkeyPatch, number: int):
    failure = OSError(number, os.strerror(number))
    monkeypatch.setattr(images, "_RETRY_AFTER_S", 0.0)
    monkeypatch.setattr(Path, "read_bytes", mock.Mock(side_effect=[failure, b"data", failure, failure]))
    assert images.read_file("a.png") == b"data"
    with pytest.raises(UserError, match=f"a.png: {os.strerror(number)} \\(tried twice\\)") as caught:
        images.read_file("a.png")
    assert not isinstance(caught.value, CorruptImage)
