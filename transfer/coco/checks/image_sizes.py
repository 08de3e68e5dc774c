"""Reads the sizes of image files, as they are shown, where possible without decoding them."""

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from PIL import Image

from pretrain.common.files import open_regular
from pretrain.common.images import read_image, read_orientation

_LOG_PERIOD_S = 60.0
T = TypeVar("T")
log = logging.getLogger(__name__)


def read_upright_sizes(paths: Sequence[str], decode: bool) -> dict[str, tuple[int, int] | None]:
    """Call `read_upright_size` in threads, because a network disk takes milliseconds to open a file."""
    with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor(8) as pool:  # Pillow warns of odd EXIF data
        sizes = pool.map(lambda path: read_upright_size(path, decode=decode), paths)
        return dict(zip(paths, _log_progress(sizes, len(paths)) if decode else sizes, strict=True))


def _log_progress(sizes: Iterable[T], total: int) -> Iterator[T]:
    """Yield ``sizes``; log once per minute how many of ``total`` images are decoded."""
    last_line = time.monotonic()
    for number, size in enumerate(sizes, 1):
        if time.monotonic() - last_line > _LOG_PERIOD_S:
            last_line = time.monotonic()
            log.info(f"checking images before the run: {number:,} of {total:,} decoded")
        yield size


def read_upright_size(path: str, *, decode: bool = False) -> tuple[int, int] | None:
    """Read an image's width and height after its EXIF rotation.

    Returns None if the file cannot be read or is very large: `read_image` then says why, or reads it.

    Args:
        decode: decode the image. Otherwise only the header and the end of a JPEG or PNG are read, which takes 0.1 ms
            on a local disk; other formats are always decoded.
    """
    with contextlib.suppress(Exception), open_regular(path) as file:
        file.seek(-8, os.SEEK_END)
        is_complete = file.read().endswith((b"\xff\xd9", b"IEND\xaeB`\x82"))  # a JPEG's end, a PNG's
        header = Image.open(file)
        if header.width * header.height >= 2**26:  # in one of several threads
            return None
        if decode or not is_complete or header.format not in ("JPEG", "MPO", "PNG"):
            height, width = read_image(path).shape[:2]
            return width, height
        has_metadata = header.format != "PNG" or "exif" in header.info or "xmp" in header.info
        is_turned = has_metadata and read_orientation(header) in (5, 6, 7, 8)  # for which Pillow would decode a PNG
        return (header.height, header.width) if is_turned else header.size
