"""Where images come from (files, arrays), each read as upright 8-bit RGB.

OpenCV decodes; Pillow reads the header first, and decodes what OpenCV cannot.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import time
import warnings
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import cv2
import numpy as np
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from .errors import UserError, one_line

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp", ".gif")
SUFFIXES += (".avif", ".jp2", ".j2k", ".mpo", ".pbm", ".pnm")
with contextlib.suppress(ImportError):
    import pillow_heif  # pyright: ignore[reportMissingImports]

    pillow_heif.register_heif_opener()
    SUFFIXES += (".heic", ".heif", ".hif")
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # CorruptImage says it, with the file's name
log = logging.getLogger(__name__)
_RETRY_AFTER_S = 1.0
_ABOUT_THE_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EISDIR}  # others: about the disk


class CorruptImage(UserError):
    """An image that cannot be decoded; the message names the file."""


def read_file(path: str) -> bytes:
    """The content of a file. An error of the disk or the file server, such as EIO or ESTALE, is tried once more.

    Raises:
        CorruptImage: missing, not permitted, or a folder.
        UserError: reading failed twice for a reason that lies outside the file.
    """
    for is_last_try in (False, True):
        try:
            return Path(path).read_bytes()
        except OSError as error:
            if error.errno in _ABOUT_THE_FILE:
                raise CorruptImage(f"cannot read image {path}: {error.strerror}; replace it") from error
            if is_last_try:
                raise UserError(
                    f"cannot read image {path}: {error.strerror or error}, twice; check the disk or the file server"
                ) from error
        time.sleep(_RETRY_AFTER_S)
    raise AssertionError


def decode(encoded: bytes, name: str) -> np.ndarray:
    """Decodes a file in one of the formats of SUFFIXES.

    Gray, palette and CMYK become RGB, 16 bits become 8, alpha is dropped, the EXIF rotation is applied.

    Args:
        encoded: the file's bytes.
        name: what to call it in an error.

    Returns:
        (H, W, 3) uint8, RGB.

    Raises:
        CorruptImage: truncated, damaged, not an image, of 32-bit values, or larger than Pillow and torchvision allow
            (twice Image.MAX_IMAGE_PIXELS).
    """
    image = None
    with _decoding(name):
        header = _open(encoded)
        with contextlib.suppress(cv2.error):  # a header that OpenCV cannot parse
            if header.format != "PPM":  # whose largest value the header states, which OpenCV ignores
                image = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR_RGB)
        if image is None:
            image = np.array(upright(header).convert("RGB"))
    _warn_if_dark(encoded, image, name)
    return image


@contextlib.contextmanager
def _decoding(name: str) -> Iterator[None]:
    """Raises CorruptImage, with the image's name, in the place of what Pillow raises."""
    try:
        yield
    except Image.DecompressionBombError as error:
        excess = one_line(error).partition(",")[0]  # what follows speaks of an attack
        raise CorruptImage(f"cannot decode image {name}: {excess}; cut it into tiles, or shrink it") from error
    except (OSError, ValueError, SyntaxError) as error:  # SyntaxError: a broken PNG
        reason = one_line(error)
        if isinstance(error, UnidentifiedImageError):  # its text is an address in memory
            reason = "it is in no format that is read (TIFF: of 8 or 16 bits; HEIC: pip install pillow-heif)"
        raise CorruptImage(f"cannot decode image {name}: {reason}; replace or convert it") from error


def _open(encoded: bytes) -> ImageFile.ImageFile:
    """Opens an image with Pillow, which reads no more than the header."""
    with warnings.catch_warnings(action="ignore"):  # for example about odd EXIF data
        image = Image.open(io.BytesIO(encoded))
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise ValueError("its values are signed or have 32 bits, of unknown range (8 and 16 bits are read)")
    return image


def _warn_if_dark(encoded: bytes, image: Image.Image | np.ndarray, name: str) -> None:
    """Names the process's first image of 16 bits that uses 14 or fewer: the range that was meant cannot be known."""
    brightest = int(np.max(np.asarray(image)))
    if brightest < 64 and not _dark:
        header = _open(encoded)
        if ";16" in f"{header.mode} {header.tile}":  # RGB of 16 bits has the mode RGB
            _dark.append(name)
            log.warning(
                f"image {name} has 16 bits, but scaled to 8 its largest value is {brightest} of 255; if all are dark "
                "(12-bit values in 16 bits, say), multiply their values until they fill 16 bits"
            )


_dark: list[str] = []  # images that a warning has named


def upright(header: ImageFile.ImageFile) -> Image.Image:
    """An image that Pillow opened: decoded, turned as its EXIF data say, gray of more than 8 bits scaled to 8.

    Pillow's own conversion clips: every value above 255 would be white.
    """
    surplus_bits = 4 if "I;12" in str(header.tile) else 8
    header.load()  # first, so that a damaged file fails: the EXIF reader ignores errors
    deep = header.mode.startswith("I")  # "I" has 32 bits, of which PNG and PPM use 16
    image = ImageOps.exif_transpose(header)
    return Image.fromarray((np.asarray(image) >> surplus_bits).astype(np.uint8)) if deep else image


def open_upright(path: str) -> Image.Image:
    """The image of a file (see `upright`), by Pillow alone: for pixels that equal Detectron2's."""
    encoded = read_file(path)
    with _decoding(path):
        image = upright(_open(encoded))
    _warn_if_dark(encoded, image, path)
    return image


class Source(Protocol):
    """Where the pixels of a data set come from: `read` as `decode` returns them, `name` for messages."""

    def __len__(self) -> int: ...
    def read(self, index: int) -> np.ndarray: ...
    def name(self, index: int) -> str: ...


class Files:
    """Image files. Their names are one array of bytes, which forked workers share: they would copy Python strings."""

    def __init__(self, folder: str | Path, names: Iterable[str]) -> None:
        text, ends = bytearray(), array("q")
        for name in names:
            text += os.fsencode(name)
            ends.append(len(text))
        self.folder, self.text, self.ends = str(folder), np.frombuffer(text, np.uint8), np.frombuffer(ends, np.int64)

    def __len__(self) -> int:
        return len(self.ends)

    def name(self, index: int) -> str:
        start = int(self.ends[index - 1]) if index else 0
        return os.path.join(self.folder, os.fsdecode(self.text[start : int(self.ends[index])].tobytes()))

    def read(self, index: int) -> np.ndarray:
        return decode(read_file(self.name(index)), self.name(index))


class Array:
    """Decoded images in memory or in a memory-mapped file.

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


class Concatenated:
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


class Subset:
    """Some of another source's images, by their positions in it."""

    def __init__(self, source: Source, positions: np.ndarray) -> None:
        self.source, self.positions = source, positions

    def __len__(self) -> int:
        return len(self.positions)

    def read(self, index: int) -> np.ndarray:
        return self.source.read(int(self.positions[index]))

    def name(self, index: int) -> str:
        return self.source.name(int(self.positions[index]))
