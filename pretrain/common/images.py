"""Decodes image files to upright 8-bit RGB.

OpenCV decodes; Pillow reads the header first, and decodes what OpenCV cannot.
"""

import contextlib
import errno
import io
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from .errors import UserError, one_line
from .files import describe_text

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp", ".gif")
SUFFIXES += (".avif", ".jp2", ".j2k", ".mpo", ".pbm", ".pnm")
with contextlib.suppress(ImportError):
    import pillow_heif  # pyright: ignore[reportMissingImports]

    pillow_heif.register_heif_opener()
    SUFFIXES += (".heic", ".heif", ".hif")
_logging: Any = cv2 if hasattr(cv2, "setLogLevel") else cv2.utils.logging  # before OpenCV 5, and from it on
_logging.setLogLevel(0)  # silent: CorruptImage names the file instead
log = logging.getLogger(__name__)
_RETRY_AFTER_S = 1.0
_has_warned = False  # about a dark image
_ABOUT_THE_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EISDIR}  # other errors are the disk's


class CorruptImage(UserError):
    """An image that cannot be decoded; the message names the file."""


def read_file(path: str) -> bytes:
    """Read a file; after an error of the disk or the file server, such as EIO or ESTALE, retry once.

    Raises:
        CorruptImage: missing, not permitted, or a folder.
        UserError: reading failed twice for a reason outside the file.
    """
    return retry(Path(path).read_bytes, path)


def retry(read: Callable[[], bytes], name: str, attempts: int = 2) -> bytes:
    """Call ``read``, which reads the image ``name``, again after an error of the disk (see `read_file`)."""
    try:
        return read()
    except OSError as error:
        reason = f"cannot read image {name}: {error.strerror or error}"
        if error.errno in _ABOUT_THE_FILE:
            raise CorruptImage(f"{reason}; replace it") from error
        if attempts == 1:
            raise UserError(f"{reason} (tried twice); check the disk or the file server") from error
    time.sleep(_RETRY_AFTER_S)
    return retry(read, name, attempts - 1)


def decode(encoded: bytes, name: str) -> np.ndarray:
    """Decode a file in one of the formats of SUFFIXES.

    Gray, palette and CMYK become RGB, 16 bits become 8, alpha is dropped, the EXIF rotation is applied.

    Args:
        encoded: the file's bytes.
        name: its name, for errors.

    Returns:
        (H, W, 3) uint8, RGB.

    Raises:
        CorruptImage: it is truncated, damaged, not an image, has 32-bit values, or is larger than Pillow and
            torchvision allow (twice Image.MAX_IMAGE_PIXELS).
    """
    image = None
    with _translate_errors(name):
        header = _open(encoded)
        with contextlib.suppress(cv2.error):  # a header that OpenCV cannot parse
            if header.format != "PPM":  # whose largest value the header states, which OpenCV ignores
                image = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR_RGB)
        if image is None:
            image = np.array(upright(header).convert("RGB"))
    _warn_if_dark(encoded, image, name)
    return image


@contextlib.contextmanager
def _translate_errors(name: str) -> Iterator[None]:
    """Convert Pillow's errors to CorruptImage, with the image's name."""
    try:
        yield
    except Image.DecompressionBombError as error:
        excess = one_line(error).partition(",")[0]  # the rest of the text warns of an attack
        raise CorruptImage(f"cannot decode image {name}: {excess}; cut it into tiles, or shrink it") from error
    except (OSError, ValueError, SyntaxError) as error:  # SyntaxError: a broken PNG
        raise CorruptImage(f"cannot decode image {name}: {one_line(error)}; replace or convert it") from error


def _open(encoded: bytes) -> ImageFile.ImageFile:
    """Open an image with Pillow, which reads only the header."""
    try:
        with warnings.catch_warnings(action="ignore"):  # for example about odd EXIF data
            image = Image.open(io.BytesIO(encoded))
    except UnidentifiedImageError as error:  # whose text is an address in memory
        reason = "its format is not supported (TIFF needs 8 or 16 bits; HEIC needs pip install pillow-heif)"
        raise ValueError(describe_text(encoded) or reason) from error
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise ValueError("its values are signed or have 32 bits, of unknown range (8 and 16 bits are supported)")
    return image


def _warn_if_dark(encoded: bytes, image: Image.Image | np.ndarray, name: str) -> None:
    """Warn about this process's first 16-bit image that uses 14 bits or fewer: its intended range is unknown."""
    global _has_warned
    brightest = int(np.max(np.asarray(image)))
    if brightest < 64 and not _has_warned:
        header = _open(encoded)
        if ";16" in f"{header.mode} {header.tile}":  # 16-bit RGB has the mode RGB
            _has_warned = True
            remedy = "if all are dark (such as 12-bit values in 16 bits), multiply their values until they fill 16 bits"
            log.warning(f"image {name} has 16 bits, but scaled to 8 its largest value is {brightest} of 255; {remedy}")


def upright(header: ImageFile.ImageFile) -> Image.Image:
    """Decode an image that Pillow opened, apply its EXIF rotation, and scale gray of more than 8 bits to 8.

    Pillow's own conversion clips: every value above 255 would be white.
    """
    surplus_bits = 4 if "I;12" in str(header.tile) else 8
    header.load()  # first, so that a damaged file fails: the EXIF reader ignores errors
    has_surplus = header.mode.startswith("I")  # "I" has 32 bits, of which PNG and PPM use 16
    image = ImageOps.exif_transpose(header)
    if has_surplus:
        return Image.fromarray((np.asarray(image) >> surplus_bits).astype(np.uint8))
    return image


def open_upright(path: str) -> Image.Image:
    """Read an image file (see `upright`) with Pillow alone, so that its pixels equal Detectron2's."""
    encoded = read_file(path)
    with _translate_errors(path):
        image = upright(_open(encoded))
    _warn_if_dark(encoded, image, path)
    return image
