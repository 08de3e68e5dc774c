"""Image files of every format, mode and bit depth, written without the code under test, with the pixels to expect."""

import struct
import zlib
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import cv2
import numpy as np
from PIL import Image

from tests.pretrain.images import encoded, picture

H = 40
W = 56
RGB = picture(0, H, W)
ALPHA = np.tile(np.arange(W, dtype=np.uint8) * 4, (H, 1))  # 0 at the left
RGBA = np.dstack([RGB, ALPHA])
DEEP = RGBA.astype(np.uint16) * 256 + np.random.default_rng(1).integers(0, 256, RGBA.shape, dtype=np.uint16)
LOSSLESS = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
    "PPM": ("1", "L", "RGB", "I;16"),
    "TIFF": ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "I;16"),
    "GIF": ("1", "L", "P"),
    "JPEG2000": ("L", "LA", "RGB", "RGBA", "I;16"),
    "WEBP": ("L", "RGB", "RGBA"),
}
LOSSY = {
    "JPEG": ("L", "RGB", "CMYK"),
    "MPO": ("L", "RGB"),
    "WEBP": ("L", "RGB", "RGBA"),
    "AVIF": ("L", "RGB", "RGBA"),
    "JPEG2000": ("L", "RGB", "RGBA"),
}


class Kind(NamedTuple):
    """A file, and its pixels (H, W, 3) uint8."""

    name: str
    data: bytes
    pixels: np.ndarray


def tiff(
    values: np.ndarray,
    photometric: int,
    *,
    extra: tuple[int, ...] = (),
    planar: bool = False,
    deflated: bool = False,
    tiled: bool = False,
    order: Literal["<", ">"] = "<",
    sample_format: int = 1,
    orientation: int = 1,
) -> bytes:
    """Write (H, W, bands) of any type as a TIFF with one strip, or tiles of 16 x 16, per plane.

    Args:
        photometric: the tag PhotometricInterpretation: 0 white is zero, 1 black is zero, 2 RGB, 5 CMYK.
        extra: the tag ExtraSamples: 0 unspecified, 1 alpha that was multiplied with the colors, 2 alpha.
    """
    height, width, bands = values.shape
    planes = np.split(values, bands, axis=2) if planar else [values]
    if tiled:
        padded = [np.pad(plane, ((0, -height % 16), (0, -width % 16), (0, 0))) for plane in planes]
        corners = [(y, x) for y in range(0, height, 16) for x in range(0, width, 16)]
        planes = [plane[y : y + 16, x : x + 16] for plane in padded for y, x in corners]
    parts = [plane.astype(values.dtype.newbyteorder(order)).tobytes() for plane in planes]
    parts = [zlib.compress(part) for part in parts] if deflated else parts
    bits = values.dtype.itemsize * 8
    tags: dict[int, tuple[str, list[int]]] = {256: ("H", [width]), 257: ("H", [height]), 258: ("H", [bits] * bands)}
    tags |= {259: ("H", [8 if deflated else 1]), 262: ("H", [photometric]), 277: ("H", [bands])}
    tags |= {274: ("H", [orientation]), 284: ("H", [2 if planar else 1]), 339: ("H", [sample_format] * bands)}
    offsets = [8 + sum(map(len, parts[:i])) for i in range(len(parts))]
    sizes = [len(part) for part in parts]
    if tiled:
        tags |= {322: ("H", [16]), 323: ("H", [16]), 324: ("L", offsets), 325: ("L", sizes)}
    else:
        tags |= {273: ("L", offsets), 278: ("H", [height]), 279: ("L", sizes)}
    if extra:
        tags[338] = ("H", list(extra))
    body = b"".join(parts)
    rows = b""
    for tag, (kind, numbers) in sorted(tags.items()):
        content = struct.pack(f"{order}{len(numbers)}{kind}", *numbers)
        if len(content) > 4:
            body += content
            content = struct.pack(f"{order}L", 8 + len(body) - len(content))
        rows += struct.pack(f"{order}HHL", tag, 3 if kind == "H" else 4, len(numbers)) + content.ljust(4, b"\0")
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}L", 8 + len(body))
    return start + body + struct.pack(f"{order}H", len(tags)) + rows + bytes(4)


def png(values: np.ndarray, *chunks: tuple[bytes, bytes], after: tuple[tuple[bytes, bytes], ...] = ()) -> bytes:
    """Write (H, W, 1 to 4) uint8 or uint16 as a PNG with more ``chunks`` before, and ``after``, its pixels."""
    height, width, bands = values.shape
    bits = values.dtype.itemsize * 8
    rows = b"".join(b"\0" + row.astype(values.dtype.newbyteorder(">")).tobytes() for row in values)
    header = struct.pack(">IIBBBBB", width, height, bits, {1: 0, 2: 4, 3: 2, 4: 6}[bands], 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(rows)), *after, (b"IEND", b"")]
    written = [struct.pack(">I", len(d)) + kind + d + struct.pack(">I", zlib.crc32(kind + d)) for kind, d in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


def in_mode(mode: str) -> Image.Image:
    """Convert the picture to a mode of Pillow."""
    if mode == "I;16":
        return Image.fromarray(DEEP[:, :, 0])
    if mode == "PA":
        image = Image.fromarray(RGBA).convert("RGB").convert("P").convert("PA")
        image.putalpha(Image.fromarray(ALPHA))
        return image
    return Image.fromarray(RGBA if mode in ("RGBA", "LA") else RGB).convert(mode)


def in_rgb(mode: str) -> np.ndarray:
    """Return the stored values of `in_mode` as RGB, without the alpha and the low byte."""
    return gray(DEEP) if mode == "I;16" else np.array(in_mode(mode).convert("RGB"))


def gray(values: np.ndarray) -> np.ndarray:
    """Repeat the first band of 8 or 16 bits as RGB of 8 bits."""
    return np.repeat((values[:, :, :1] >> (values.dtype.itemsize - 1) * 8).astype(np.uint8), 3, axis=2)


def lossless() -> Iterator[Kind]:
    """Yield files that contain the picture's values."""
    for form, modes in LOSSLESS.items():
        for mode in modes:
            options = {"lossless": True, "exact": True} if form == "WEBP" else {}
            yield Kind(f"{form} {mode}", encoded(in_mode(mode), form, **options), in_rgb(mode))
    indices = in_mode("RGB").quantize(16)
    palette = np.array(indices.convert("RGB"))
    for form in ("PNG", "GIF"):
        yield Kind(f"{form} P with a transparent color", encoded(indices, form, transparency=3), palette)
    yield Kind("PNG P with alpha per color", encoded(indices, "PNG", transparency=bytes(range(0, 256, 16))), palette)
    yield Kind("PNG P 4 bits", encoded(indices, "PNG", bits=4), palette)
    yield Kind("PNG L with a transparent value", encoded(in_mode("L"), "PNG", transparency=7), in_rgb("L"))
    yield Kind("PNG RGB 8 with gamma", png(RGB, (b"gAMA", struct.pack(">I", 100_000))), RGB)
    yield Kind("PNG RGB 8 with a broken profile", png(RGB, (b"iCCP", b"x\0\0" + zlib.compress(b"?"))), RGB)
    for form in ("PNG", "WEBP", "GIF"):
        frames = {"save_all": True, "append_images": [in_mode("RGB").transpose(Image.Transpose.FLIP_TOP_BOTTOM)]}
        yield Kind(f"{form} animated", *animated(form, frames))
    for bands in (1, 2, 3, 4):
        pixels = RGB if bands > 2 else gray(RGBA)
        values = DEEP[:, :, [0, 3]] if bands == 2 else DEEP[:, :, :bands]
        yield Kind(f"PNG {bands} bands of 16 bits", png(values), pixels)
        if bands > 2:
            bgr = values[:, :, [2, 1, 0, 3][:bands]]
            data = cv2.imencode(".jp2", bgr, [cv2.IMWRITE_JPEG2000_COMPRESSION_X1000, 1000])
            yield Kind(f"JPEG2000 {bands} bands of 16 bits", data[1].tobytes(), RGB)
    yield from tiffs()


def animated(form: str, frames: dict[str, object]) -> tuple[bytes, np.ndarray]:
    options = {"lossless": True} if form == "WEBP" else {}
    image = in_mode("P" if form == "GIF" else "RGB")
    return encoded(image, form, **frames, **options), np.array(image.convert("RGB"))


def tiffs() -> Iterator[Kind]:
    """Yield the layouts of TIFF."""
    layouts: list[dict[str, Any]] = [
        {"order": "<"},
        {"order": ">", "tiled": True},
        {"order": ">", "deflated": True},
        {"order": "<", "deflated": True, "tiled": True},
    ]
    layouts += [{**layout, "planar": True} for layout in layouts]
    for layout in layouts:
        words = " ".join(f"{key} {value}" for key, value in layout.items())
        for values in (RGBA, DEEP):
            bits = values.dtype.itemsize * 8
            yield Kind(f"TIFF RGB {bits} {words}", tiff(values[:, :, :3], 2, **layout), RGB)
            yield Kind(f"TIFF RGB and alpha {bits} {words}", tiff(values, 2, extra=(2,), **layout), RGB)
            yield Kind(f"TIFF RGB and NIR {bits} {words}", tiff(values, 2, extra=(0,), **layout), RGB)
            if "planar" not in layout:
                yield Kind(f"TIFF gray {bits} {words}", tiff(values[:, :, :1], 1, **layout), gray(values))
            if "planar" not in layout and (bits == 8 or layout["order"] == "<"):
                yield Kind(f"TIFF inverted {bits} {words}", tiff(~values[:, :, :1], 0, **layout), gray(values))
        pair = RGBA[:, :, [0, 3]]
        yield Kind(f"TIFF gray and alpha {words}", tiff(pair, 1, extra=(2,), **layout), gray(RGBA))
        inks = np.dstack([255 - RGB, np.zeros_like(ALPHA)])
        yield Kind(f"TIFF CMYK {words}", tiff(inks, 5, **layout), RGB)


def lossy() -> Iterator[Kind]:
    """Yield files that contain approximately the picture."""
    for form, modes in LOSSY.items():
        for mode in modes:
            options = {"irreversible": True} if form == "JPEG2000" else {"quality": 95}
            yield Kind(f"lossy {form} {mode}", encoded(in_mode(mode), form, **options), in_rgb(mode))
    for subsampling in (0x111111, 0x211111, 0x221111, 0x411111, 0x121111):
        for progressive in (0, 1):
            options = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, subsampling, cv2.IMWRITE_JPEG_PROGRESSIVE, progressive]
            options += [cv2.IMWRITE_JPEG_RST_INTERVAL, 3, cv2.IMWRITE_JPEG_QUALITY, 98]
            data = cv2.imencode(".jpg", RGB[:37, :51, ::-1], options)[1].tobytes()
            yield Kind(f"JPEG {subsampling:x} {progressive}", data, RGB[:37, :51])
    stored_rgb = encoded(in_mode("RGB"), "JPEG", quality=95, subsampling=0, keep_rgb=True)
    yield Kind("JPEG of RGB", stored_rgb, RGB)
