"""Every kind of image file becomes upright 8-bit RGB, or an error that names it."""

import contextlib
import errno
import io
import os
import struct
from pathlib import Path
from unittest import mock

import cv2
import numpy as np
import pytest
from PIL import Image, ImageFile

from pretrain.common import images
from pretrain.common.errors import UserError
from pretrain.common.images import CorruptImage, decode
from pretrain.common.logs import setup_logging
from pretrain.data.sources import Files
from tests.pretrain import image_formats
from tests.pretrain.image_formats import DEEP, RGB, RGBA, Kind, gray, png, tiff
from tests.pretrain.images import encoded, picture

LARGE = picture(0, 152, 200)
PICTURE = Image.fromarray(RGB)


@pytest.mark.parametrize("kind", list(image_formats.lossless()), ids=lambda kind: kind.name)
def test_lossless_files_give_their_stored_values(kind: Kind):
    """Alpha is dropped, and never multiplied."""
    np.testing.assert_array_equal(decode(kind.data, "x"), kind.pixels)


@pytest.mark.parametrize("kind", list(image_formats.lossy()), ids=lambda kind: kind.name)
def test_lossy_files_give_pillows_pixels(kind: Kind):
    got = decode(kind.data, "x")
    np.testing.assert_array_equal(got, np.asarray(Image.open(io.BytesIO(kind.data)).convert("RGB")))
    assert np.abs(got.astype(int) - kind.pixels).mean() < 12  # inverted or exchanged colors would be off by about 100


def test_colors_that_a_tiff_states_were_multiplied_by_alpha_are_divided_by_it():
    stored = RGBA // 2
    stored[:, :, 3] = 128
    np.testing.assert_allclose(decode(tiff(stored, 2, extra=(1,)), "x"), RGB, atol=2)
    np.testing.assert_allclose(decode(tiff(stored[:, :, [0, 3]], 1, extra=(1,)), "x"), gray(RGB), atol=2)


def of_values(values: np.ndarray, suffix: str) -> bytes:
    return cv2.imencode(suffix, values)[1].tobytes()


def refused(folder: Path, data: bytes, says: str) -> None:
    """Assert that a file is refused in these words."""
    (folder / "a.png").write_bytes(data)
    with pytest.raises(CorruptImage, match=rf"a\.png: .*{says}"):
        Files(folder, ["a.png"]).read(0)


@pytest.mark.parametrize("kind", ["float32", "float64", "int8", "int16", "int32"])
@pytest.mark.parametrize("bands", [1, 3])
def test_values_without_a_known_range_are_refused(tmp_path: Path, kind: str, bands: int):
    """If they were clipped to 8 bits, floating-point numbers from 0 to 1 would be black and large integers white."""
    sample_format = 3 if kind.startswith("float") else 2
    data = tiff(np.ones((40, 56, bands), kind) * 100, 2 if bands == 3 else 1, sample_format=sample_format)
    refused(tmp_path, data, "8 and 16 bits")


@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("kind", ["uint8", "uint16"])
@pytest.mark.parametrize(("bands", "photometric"), [(3, 1), (4, 1), (5, 1), (13, 1), (7, 2), (13, 2)])
def test_bands_that_are_not_rgb_are_counted(tmp_path: Path, capfd, bands, photometric, kind, planar):
    extra = (0,) * (bands - (3 if photometric == 2 else 1))
    data = tiff(np.ones((40, 56, bands), kind), photometric, extra=extra, planar=planar)
    refused(tmp_path, data, f" {bands} bands.*RGB")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("values", "photometric", "extra", "says"),
    [
        (RGBA, 2, (0,), "has 4 bands, of which only the first 3 are read"),
        (DEEP, 2, (0,), "has 4 bands, of which only the first 3 are read"),
        (np.dstack([RGBA, RGB[:, :, 0]]), 2, (2, 0), "has 5 bands, of which only the first 3 are read"),
        (RGBA[:, :, [0, 3]], 1, (0,), "has 2 bands, of which only the first 1 is read"),
        (RGBA, 2, (2,), ""),
    ],
)
def test_dropped_bands_are_named_once_per_run(tmp_path: Path, values, photometric: int, extra: tuple, says: str):
    data = tiff(values, photometric, extra=extra)
    for run in ("first", "second"):
        setup_logging(tmp_path / run)
        decode(data, "a.tif")
        decode(data, "b.tif")
        lines = (tmp_path / run / "log.txt").read_text().splitlines()
        assert len(lines) == bool(says)
        assert all(says in line and "a.tif" in line for line in lines)


def test_a_fourth_band_of_jpeg_2000_is_alpha_only_if_the_file_says_so(tmp_path: Path):
    setup_logging(tmp_path)
    data = encoded(Image.fromarray(RGBA), "JPEG2000")
    decode(data, "alpha.jp2")
    decode(data[data.index(b"\xff\x4f\xff\x51") :], "near_infrared.j2k")
    assert "near_infrared.j2k has 4 bands" in (tmp_path / "log.txt").read_text()
    assert "alpha.jp2" not in (tmp_path / "log.txt").read_text()


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
def test_12_bits_that_the_header_states_are_scaled(form: str):
    values = np.linspace(0, 4095, 40 * 56).reshape(40, 56).astype(np.uint16)
    shown = np.dstack([values] * 3) if form == "PPM" else values
    header = b"%s\n56 40\n4095\n" % (b"P6" if form == "PPM" else b"P5")
    data = packed_tiff(values) if form == "TIFF" else header + shown.astype(">u2").tobytes()
    assert np.abs(decode(data, "x")[..., 1] - values / 4095 * 255).max() <= 1


@pytest.mark.parametrize("suffix", [".png", ".tif"])
@pytest.mark.parametrize("channels", [1, 3])
def test_16_bit_files_of_fewer_bits_are_named_once_per_run(tmp_path: Path, suffix: str, channels: int):
    values = np.linspace(0, 4000, 40 * 56 * channels).reshape(40, 56, channels).astype(np.uint16)
    for run in ("first", "second"):
        setup_logging(tmp_path / run)
        decode(of_values(values * 16, suffix), "full")
        decode(of_values((values // 256).astype(np.uint8), suffix), "8 bits")
        decode(of_values(values, suffix), "dark")
        decode(of_values(values, suffix), "dark, too")
        lines = (tmp_path / run / "log.txt").read_text().splitlines()
        assert len(lines) == 1
        assert "image dark has 16 bits" in lines[0] and "is 15 of 255" in lines[0]


def test_opencv_writes_no_lines_of_its_own(capfd):
    for data in (packed_tiff(np.zeros((40, 56), np.uint16)), encoded(PICTURE, "TIFF")[:3000]):
        with contextlib.suppress(CorruptImage):
            decode(data, "x")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "AVIF", "TIFF", "MPO"])
def test_exif_orientation_is_applied(orientation: int, form: str):
    exif = Image.Exif()
    exif[0x0112] = orientation
    transposed = RGB.transpose(1, 0, 2)
    upright = [RGB, RGB[:, ::-1], RGB[::-1, ::-1], RGB[::-1]]  # of the orientations 1 to 4
    upright += [transposed, np.rot90(RGB, -1), transposed[::-1, ::-1], np.rot90(RGB)]  # of 5 to 8
    options = {"quality": 100, "subsampling": 0} if form in ("JPEG", "MPO") else {"quality": 100}
    data = encoded(PICTURE, form, exif=exif, **options)
    if form == "TIFF":  # whose own tag states it
        data = tiff(RGB, 2, orientation=orientation)
    got = decode(data, "x")
    assert got.shape == upright[orientation - 1].shape
    assert np.abs(got.astype(int) - upright[orientation - 1]).mean() < 10


@pytest.mark.parametrize("form", ["JPEG", "PNG", "BMP", "TIFF", "WEBP"])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.9])
def test_truncated_files_are_corrupt(form: str, share: float):
    data = encoded(PICTURE, form)
    with pytest.raises(CorruptImage, match=r"/a/b\.jpg") as raised:
        decode(data[: int(len(data) * share)], "/a/b.jpg")
    assert "band" not in str(raised.value)  # the tags of a TIFF are at its end


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "it is empty; use another copy"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "a pointer of Git LFS; run git lfs pull"),
        (b"<html>404</html>", "it contains text, '<html>404</html>'; download the file itself"),
        (b"\0\0\0\x24ftypheic\0\0", "HEIC needs pip install pillow-heif"),
    ],
)
def test_what_is_no_image_is_described(tmp_path: Path, content: bytes, says: str):
    refused(tmp_path, content, says)


def exif_of(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()[6:]  # without the prefix of JPEG


XMP = b'<rdf:Description tiff:Orientation="6"/>'
TEXT = (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP)


@pytest.mark.parametrize(
    "data",
    [
        png(RGB, (b"eXIf", exif_of(6))),
        png(RGB, after=((b"eXIf", exif_of(6)),)),
        png(RGB, TEXT),
        png(RGB, after=(TEXT,)),
        encoded(PICTURE, "JPEG", xmp=XMP),
        encoded(PICTURE, "WEBP", xmp=XMP),
    ],
    ids=["PNG", "PNG, after the pixels", "PNG, XMP", "PNG, XMP after the pixels", "JPEG, XMP", "WebP, XMP"],
)
def test_an_orientation_is_found_wherever_pillow_finds_it(data: bytes):
    got = decode(data, "x")
    assert got.shape == (56, 40, 3)
    assert np.abs(got.astype(int) - np.rot90(RGB, -1)).mean() < 10


def test_damaged_exif_data_is_ignored():
    data = encoded(PICTURE, "JPEG", exif=b"Exif\0\0damaged")
    assert decode(data, "x").shape == RGB.shape


@pytest.mark.parametrize("reduction", [1, 2, 4, 8])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_a_jpeg_is_reduced_while_it_is_decoded(reduction: int, mode: str):
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(Image.fromarray(LARGE).convert(mode), "JPEG", quality=95, exif=exif)
    sizes: list[tuple[int, int]] = []

    def choose(height: int, width: int) -> int:
        sizes.append((height, width))
        return reduction

    got = decode(data, "x", choose)
    full = decode(data, "x")
    assert sizes == [LARGE.shape[:2]]
    height, width = (-(-side // reduction) for side in full.shape[:2])
    assert got.shape == (height, width, 3)
    area_mean = cv2.resize(full, (width, height), interpolation=cv2.INTER_AREA)
    assert np.abs(got.astype(int) - area_mean).mean() < 4


def test_other_formats_are_not_reduced():
    chooser = mock.Mock(return_value=2)
    for form in ("PNG", "WEBP", "TIFF"):
        assert decode(encoded(PICTURE, form), "x", chooser).shape == RGB.shape
    assert not chooser.called


def test_a_truncated_jpeg_is_corrupt_at_any_size():
    data = encoded(Image.fromarray(LARGE), "JPEG")
    with pytest.raises(CorruptImage):
        decode(data[: len(data) // 2], "x", lambda *_: 4)


def test_pillow_reads_what_opencv_cannot(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(images.cv2, "imdecode", lambda *_: None)
    for values in (RGB, DEEP):
        np.testing.assert_array_equal(decode(png(values), "x"), RGB)


def test_too_many_pixels_are_refused_before_they_are_decoded(tmp_path: Path, monkeypatch):
    """Above Pillow's limit it warns and torchvision reads; above twice as many, both refuse."""
    (tmp_path / "a.png").write_bytes(encoded(PICTURE, "PNG"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", RGB.size // 3 - 1)
    np.testing.assert_array_equal(Files(tmp_path, ["a.png"]).read(0), RGB)
    monkeypatch.setattr(images.cv2, "imdecode", lambda *_: pytest.fail("decoded"))
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("decoded"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", RGB.size // 6 - 1)
    refused(tmp_path, encoded(PICTURE, "PNG"), " 2238 pixels.*cut .*shrink")


def test_what_is_no_file_is_refused_at_once(tmp_path: Path):
    """Opening a pipe that nobody writes to would take forever."""
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "device.png").symlink_to("/dev/zero")
    (tmp_path / "loop.png").symlink_to("loop.png")
    (tmp_path / "folder.png").mkdir()
    kinds = {"pipe": "a pipe or a device", "device": "a pipe or a device", "loop": "symbolic links", "folder": "direct"}
    for name, says in kinds.items():
        with pytest.raises(CorruptImage, match=f"cannot read image .*{name}.png: .*{says}.*; replace it"):
            images.read_file(str(tmp_path / f"{name}.png"))


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_a_disk_that_fails_is_tried_again_and_is_no_corrupt_image(monkeypatch: pytest.MonkeyPatch, number: int):
    failure = OSError(number, os.strerror(number))
    opened = mock.Mock(side_effect=[failure, io.BytesIO(b"data"), failure, failure])
    monkeypatch.setattr(images, "open_regular", opened)
    assert images.read_file("a.png", retry_after_s=0) == b"data"
    with pytest.raises(UserError, match=f"a.png: {os.strerror(number)} \\(tried twice\\)") as caught:
        images.read_file("a.png", retry_after_s=0)
    assert not isinstance(caught.value, CorruptImage)
