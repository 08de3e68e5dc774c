"""Reads the sizes of image files, as they are shown, without decoding them."""

import contextlib
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from PIL import ExifTags, Image


def read_upright_sizes(paths: Sequence[str], decode: bool) -> dict[str, tuple[int, int] | None]:
    """Call `read_upright_size` in threads, because a network disk takes milliseconds to open a file."""
    with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor(8) as pool:  # Pillow warns of odd EXIF data
        return dict(zip(paths, pool.map(lambda path: read_upright_size(path, decode=decode), paths), strict=True))


def read_upright_size(path: str, *, decode: bool = False) -> tuple[int, int] | None:
    """Read an image's width and height after its EXIF rotation.

    Returns None if the file looks damaged or has an unusual format: `open_upright` then decides whether it is good.

    Args:
        decode: decode the image. Otherwise only the header and the end of a JPEG or PNG are read, which takes 0.1 ms
            on a local disk.
    """
    with contextlib.suppress(Exception), open(path, "rb") as file:
        file.seek(-8, os.SEEK_END)
        is_complete = file.read().endswith((b"\xff\xd9", b"IEND\xaeB`\x82"))  # a JPEG's end, a PNG's
        image = Image.open(file)
        is_usual = image.width * image.height < 2**26 and image.mode not in ("F", "I")
        if is_usual and (decode or not is_complete):
            image.load()
        has_exif = image.format != "PNG" or "exif" in image.info  # Pillow would decode a PNG to look for it
        is_turned = has_exif and image.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
        size = (image.height, image.width) if is_turned else image.size
        return size if is_usual else None
