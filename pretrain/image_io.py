"""Where images come from (files, arrays), each read as upright 8-bit RGB.

OpenCV decodes; Pillow has the last word on what OpenCV cannot read.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import cv2
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from .common.errors import UserError

_PILLOW_ERRORS = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # SyntaxError: a broken PNG


class CorruptImage(UserError):
    """An image that cannot be decoded; the message names the file."""


def decode(encoded: bytes, name: str) -> np.ndarray:
    """Decodes JPEG, PNG, WebP, TIFF, BMP, PNM or GIF.

    Gray, palette and CMYK become RGB, 16 bits become 8, alpha is dropped, the EXIF rotation is applied.

    Args:
        encoded: the file's bytes.
        name: what to call it in an error.

    Returns:
        (H, W, 3) uint8, RGB.

    Raises:
        CorruptImage: truncated, damaged or not an image.
    """
    image = None
    if encoded:
        try:
            image = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)
        except cv2.error:  # a header it cannot parse, or more than 2^30 pixels
            image = None
    if image is None:
        return _decode_with_pillow(encoded, name)
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


def _decode_with_pillow(encoded: bytes, name: str) -> np.ndarray:
    try:
        return np.array(upright(Image.open(io.BytesIO(encoded))).convert("RGB"))
    except UnidentifiedImageError as error:
        raise CorruptImage(f"cannot decode image {name}: it is not in a known image format") from error
    except _PILLOW_ERRORS as error:
        raise CorruptImage(f"cannot decode image {name}: {' '.join(str(error).split())}") from error


def upright(image: Image.Image) -> Image.Image:
    """An image that Pillow opened: decoded, turned as its EXIF data say, 16-bit gray scaled to 8 bits.

    Pillow's own conversion clips: every value above 255 would be white.
    """
    image.load()  # first: a damaged file must fail here, not inside a reader of EXIF data that forgives all
    # "I" has 32 bits, of which these formats use 16
    deep = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    image = ImageOps.exif_transpose(image)
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)) if deep else image


def open_upright(path: str) -> Image.Image:
    """The image of a file (see `upright`), by Pillow alone: for pixels that equal Detectron2's.

    Raises:
        CorruptImage: missing, damaged or not an image.
    """
    try:
        with Image.open(path) as file:
            return upright(file)
    except _PILLOW_ERRORS as error:
        text = " ".join(str(error).split())
        raise CorruptImage(f"cannot read image {path}: {text}; restore it or remove it from the annotations") from error


class Source(Protocol):
    """Where the pixels of a data set come from: `read` as `decode` returns them, `name` for messages."""

    def __len__(self) -> int: ...
    def read(self, index: int) -> np.ndarray: ...
    def name(self, index: int) -> str: ...


class Files:
    """Image files. Their names lie in one byte string: a million Python strings would be copied into every worker."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        encoded = [os.fsencode(name) for name in names]
        self.folder = str(folder)
        self._ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
        self._bytes = b"".join(encoded)

    def __len__(self) -> int:
        return len(self._ends)

    def name(self, index: int) -> str:
        start = self._ends[index - 1] if index else 0
        return os.path.join(self.folder, os.fsdecode(self._bytes[start : self._ends[index]]))

    def read(self, index: int) -> np.ndarray:
        path = self.name(index)
        try:
            with open(path, "rb") as file:
                encoded = file.read()
        except OSError as error:
            raise CorruptImage(f"cannot read image {path}: {error.strerror}") from error
        return decode(encoded, path)


class Array:
    """Images that lie decoded in memory or in a memory-mapped file.

    Args:
        images: (N, H, W) or (N, H, W, 3) uint8, or (N, 3, W, H) with ``transposed`` (STL10 is stored column by column).
        origin: what to call them in messages.
    """

    def __init__(self, images: np.ndarray, origin: str, transposed: bool = False) -> None:
        self.images, self.origin, self.transposed = images, origin, transposed

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        return f"{self.origin}[{index}]"

    def read(self, index: int) -> np.ndarray:
        image = np.asarray(self.images[index])
        if self.transposed:
            image = image.transpose(2, 1, 0)
        elif image.ndim == 2:
            image = np.repeat(image[:, :, None], 3, axis=2)
        return np.ascontiguousarray(image)


class Joined:
    """Several sources, one after the other."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        self._ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _locate(self, index: int) -> tuple[Source, int]:
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self.sources[part], index - int(self._ends[part] - len(self.sources[part]))

    def read(self, index: int) -> np.ndarray:
        source, within = self._locate(index)
        return source.read(within)

    def name(self, index: int) -> str:
        source, within = self._locate(index)
        return source.name(within)


class Chosen:
    """Some of another source's images, by their positions in it."""

    def __init__(self, source: Source, positions: np.ndarray) -> None:
        self.source, self.positions = source, positions

    def __len__(self) -> int:
        return len(self.positions)

    def read(self, index: int) -> np.ndarray:
        return self.source.read(int(self.positions[index]))

    def name(self, index: int) -> str:
        return self.source.name(int(self.positions[index]))
