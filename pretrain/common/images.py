"""Decodes image files to upright 8-bit RGB for both stages, with the same pixels as Pillow and thus Detectron2.

Pillow reads the header. OpenCV, which is faster, decodes the formats for which it returns the same pixels.
"""

import contextlib
import errno
import io
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import cv2
import numpy as np
from PIL import ExifTags, Image, ImageFile, TiffImagePlugin, UnidentifiedImageError

from .errors import UserError, count_noun, one_line
from .files import explain_content, open_regular
from .image_checks.bands import UNKNOWN_RANGE, Bands, read_bands

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp", ".gif")
SUFFIXES += (".avif", ".jp2", ".j2k", ".mpo", ".pbm", ".pnm")
with contextlib.suppress(ImportError):
    import pillow_heif  # pyright: ignore[reportMissingImports]

    pillow_heif.register_heif_opener()
    SUFFIXES += (".heic", ".heif", ".hif")
_logging: Any = cv2 if hasattr(cv2, "setLogLevel") else cv2.utils.logging  # before OpenCV 5, and from it on
_logging.setLogLevel(0)  # silent: CorruptImage names the file instead
ReductionChooser = Callable[[int, int], int]  # (height, width) of a JPEG -> 1, 2, 4 or 8
log = logging.getLogger(__name__)
_planes_lock = threading.Lock()
# Errors of a file; other ones are the disk's.
_ABOUT_THE_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENXIO}
# Where a PNG may state its orientation, and the color profile, about which libpng prints warnings of its own:
_PNG_METADATA = (b"eXIf", b"XML:com.adobe.xmp", b"Raw profile type exif", b"iCCP")
_REDUCED_2 = cv2.IMREAD_REDUCED_GRAYSCALE_2  # the bit of the size alone, to which the flags add RGB
_REDUCED_4 = cv2.IMREAD_REDUCED_GRAYSCALE_4
_REDUCED_8 = cv2.IMREAD_REDUCED_GRAYSCALE_8
_TURNS: dict[int, Callable[[np.ndarray], np.ndarray]] = {  # EXIF orientation -> how to make an image upright
    2: lambda pixels: cv2.flip(pixels, 1),
    3: lambda pixels: cv2.flip(pixels, -1),
    4: lambda pixels: cv2.flip(pixels, 0),
    5: cv2.transpose,
    6: lambda pixels: cv2.rotate(pixels, cv2.ROTATE_90_CLOCKWISE),
    7: lambda pixels: cv2.flip(cv2.transpose(pixels), -1),
    8: lambda pixels: cv2.rotate(pixels, cv2.ROTATE_90_COUNTERCLOCKWISE),
}


class CorruptImage(UserError):
    """An image that cannot be decoded; the message names the file."""


def read_file(path: str, retry_after_s: float = 1.0) -> bytes:
    """Read a file; after an error of the disk or the file server, such as EIO or ESTALE, retry once.

    Raises:
        CorruptImage: missing, not permitted, or not a file.
        UserError: reading failed twice for a reason outside the file.
    """

    def read() -> bytes:
        with open_regular(path) as file:
            return file.read()

    return retry(read, path, retry_after_s)


def retry(read: Callable[[], bytes], name: str, retry_after_s: float = 1.0, attempts: int = 2) -> bytes:
    """Call ``read``, which reads the image ``name``, again after an error of the disk (see `read_file`)."""
    try:
        return read()
    except OSError as error:
        reason = f"cannot read image {name}: {error.strerror or error}"
        if error.errno in _ABOUT_THE_FILE:
            raise CorruptImage(f"{reason}; replace it") from error
        if attempts == 1:
            raise UserError(f"{reason} (tried twice); check the disk or the file server") from error
    time.sleep(retry_after_s)
    return retry(read, name, retry_after_s, attempts - 1)


class DecodedImage(str):
    """The name of an image that is already decoded; `read_image` returns its pixels.

    A mapper of records calls `read_image` with a record's file name, and so takes images from memory, too.
    """

    pixels: np.ndarray  # (H, W, 3) uint8, RGB


def name_pixels(name: str, pixels: np.ndarray) -> DecodedImage:
    """Return the name of an image with its pixels (H, W, 3) uint8, RGB."""
    image = DecodedImage(name)
    image.pixels = pixels
    return image


def read_image(path: str, choose_reduction: ReductionChooser | None = None) -> np.ndarray:
    """Read an image file and decode it (see `decode`)."""
    if isinstance(path, DecodedImage):
        return path.pixels
    return decode(read_file(path), path, choose_reduction)


def decode(encoded: bytes, name: str, choose_reduction: ReductionChooser | None = None) -> np.ndarray:
    """Decode a file in one of the formats of SUFFIXES.

    Gray, palette, CMYK, YCbCr and Lab become RGB, 16 bits become 8, and the EXIF rotation is applied. Alpha is dropped:
    colors are not multiplied by it. A TIFF whose tag says that its colors are multiplied is divided by its alpha. A
    warning names the first file whose other bands are dropped, and the first one that is dark.

    Args:
        encoded: the file's bytes.
        name: its name, for errors.
        choose_reduction: returns by how much to divide the sides of a JPEG (rounded up) while it is decoded, which is
            faster. Other formats, and JPEGs of CMYK, are decoded at full size.

    Returns:
        (H, W, 3) uint8, RGB.

    Raises:
        CorruptImage: it is truncated, damaged, not an image, has 32-bit values or bands that are not RGB, or is larger
            than Pillow and torchvision allow (twice Image.MAX_IMAGE_PIXELS).
    """
    with _translate_errors(name), warnings.catch_warnings(action="ignore"):  # for example about odd EXIF data
        bands = read_bands(encoded)
        header = _open(encoded, bands, name)
        has_16_bits = ";16" in f"{header.mode} {header.tile}"  # 16-bit RGB has the mode RGB
        pixels = _decode_by_opencv(header, encoded, bands, choose_reduction)
        if pixels is None:
            pixels = _decode_by_pillow(header)
    if bands and bands.surplus:
        _warn_of_bands(bands, name)
    if has_16_bits:
        _warn_if_dark(pixels, name)
    return pixels


def convert_pil(image: Image.Image, name: str) -> np.ndarray:
    """Return the pixels of a PIL image as `decode` returns those of its file."""
    with _translate_errors(name):
        _check_range(image)
        try:
            image.load()
        except AssertionError as error:  # Pillow's own
            raise ValueError("its file is closed; call its load() before the file is closed") from error
        return _decode_by_pillow(image)


@contextlib.contextmanager
def _translate_errors(name: str) -> Iterator[None]:
    """Convert Pillow's errors to CorruptImage, with the image's name."""
    try:
        yield
    except CorruptImage:
        raise
    except Image.DecompressionBombError as error:
        excess = one_line(error).partition(",")[0]  # the rest of the text warns of an attack
        raise CorruptImage(f"cannot decode image {name}: {excess}; cut it into tiles, or shrink it") from error
    except (
        OSError,
        ValueError,
        SyntaxError,
        RuntimeError,
    ) as error:  # the last two: PNG, AVIF
        raise CorruptImage(f"cannot decode image {name}: {one_line(error)}; replace or convert it") from error


def _open(encoded: bytes, bands: Bands | None, name: str) -> ImageFile.ImageFile:
    """Open an image with Pillow, which reads only the header."""
    if bands:
        bands.check()  # first, because Pillow prints lines of its own about many bands
    try:
        with _read_planes() if bands and bands.is_planar else contextlib.nullcontext():
            image = Image.open(io.BytesIO(encoded))
    except UnidentifiedImageError as error:  # whose text is an address in memory
        reason = "it is damaged, or its format is not supported (HEIC needs pip install pillow-heif)"
        if bands:
            reason = f"{count_noun(bands.count, 'band')} of {bands.bits} bits are not supported in this format"
        explanation = explain_content(encoded)
        if explanation:
            raise CorruptImage(f"cannot decode image {name}: {explanation}") from error
        raise ValueError(reason) from error
    _check_range(image)
    return image


def _check_range(image: Image.Image) -> None:
    """Raise ValueError for 32-bit values, whose range is unknown."""
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise ValueError(UNKNOWN_RANGE)


@contextlib.contextmanager
def _read_planes() -> Iterator[None]:
    """Let libtiff read the uncompressed planes of an image that is opened: Pillow would read 16 bits as 8."""
    with _planes_lock:
        TiffImagePlugin.READ_LIBTIFF = True
        try:
            yield
        finally:
            TiffImagePlugin.READ_LIBTIFF = False


def read_orientation(header: Image.Image) -> int:
    """Read the EXIF orientation, from 1 (upright) to 8; like Detectron2, treat damaged EXIF data as upright."""
    try:
        return header.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # one of many kinds
        return 1


def _turn(pixels: np.ndarray, orientation: int) -> np.ndarray:
    return _TURNS[orientation](pixels) if orientation in _TURNS else pixels


def _decode_by_opencv(
    header: ImageFile.ImageFile, encoded: bytes, bands: Bands | None, choose_reduction: ReductionChooser | None
) -> np.ndarray | None:
    """Decode an image if OpenCV returns Pillow's pixels for its format; return None if not, or if OpenCV cannot."""
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    orientation = 1
    if header.format in ("JPEG", "MPO"):
        is_equal = header.mode in ("L", "RGB")  # CMYK is rounded differently
        orientation = read_orientation(header)
        reduction = choose_reduction(header.height, header.width) if choose_reduction else 1
        flags |= {1: 0, 2: _REDUCED_2, 4: _REDUCED_4, 8: _REDUCED_8}[reduction]
    elif header.format == "PNG":  # which Pillow would decode to look for an orientation after the pixels
        is_equal = not any(word in encoded for word in _PNG_METADATA)
    elif header.format == "WEBP":
        is_equal = not getattr(header, "is_animated", False)
        orientation = read_orientation(header)
    else:  # of more than 8 bits, Pillow's white overflows to black
        is_equal = header.format == "JPEG2000" and bands is not None and bands.colors == 3 and bands.bits > 8
    if not is_equal:
        return None
    pixels = None
    with contextlib.suppress(cv2.error):  # a header that OpenCV cannot parse
        pixels = cv2.imdecode(np.frombuffer(encoded, np.uint8), flags)
    return None if pixels is None else _turn(pixels, orientation)


def _decode_by_pillow(header: Image.Image) -> np.ndarray:
    """Decode an image; scale gray of more than 8 bits to 8, which Pillow clips: values above 255 would be white."""
    surplus_bits = 4 if "I;12" in str(getattr(header, "tile", "")) else 8
    is_inverted = isinstance(header, TiffImagePlugin.TiffImageFile) and header.tag_v2.get(262) == 0
    header.load()  # first, so that a damaged file fails: the EXIF reader ignores errors; it turns TIFF upright
    if header.mode.startswith("I"):  # "I" has 32 bits, of which PNG and PPM use 16
        gray = (np.asarray(header) >> surplus_bits).astype(np.uint8)
        pixels = cv2.cvtColor(255 - gray if is_inverted else gray, cv2.COLOR_GRAY2RGB)
    else:
        image = header.convert("LA") if header.mode == "La" else header  # which has no direct way to RGB
        pixels = np.array(image.convert("RGB"))
    return _turn(pixels, read_orientation(header))


def _warn_of_bands(bands: Bands, name: str) -> None:
    """Warn about a run's first image that has bands other than color and alpha."""
    verb = "is" if bands.colors == 1 else "are"
    text = f"image {name} has {bands.count} bands, of which only the first {bands.colors} {verb} read: images are RGB"
    log.warning(text, extra={"once": "bands"})


def _warn_if_dark(pixels: np.ndarray, name: str) -> None:
    """Warn about a run's first 16-bit image that uses 14 bits or fewer: its intended range is unknown."""
    brightest = int(pixels.max())
    if brightest < 64:
        remedy = "if all are dark (such as 12-bit values in 16 bits), multiply their values until they fill 16 bits"
        text = f"image {name} has 16 bits, but scaled to 8 its largest value is {brightest} of 255; {remedy}"
        log.warning(text, extra={"once": "dark"})
