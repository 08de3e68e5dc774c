"""The bands of TIFF and JPEG 2000 files, which may be more than color and alpha; Pillow would drop those silently."""

import io
from dataclasses import dataclass
from typing import Any

from PIL import TiffImagePlugin

_COLORS = {2: 3, 5: 4, 6: 3, 8: 3}  # bands of TIFF's PhotometricInterpretation RGB, CMYK, YCbCr and Lab; others have 1
_UNSIGNED = {1, 4}  # TIFF's SampleFormat: unsigned integers, or unspecified
_ALPHA = {1, 2}  # TIFF's ExtraSamples: alpha with which the colors are multiplied, or not
UNKNOWN_RANGE = "its values are signed, floating-point or 32-bit: their range is unknown (8 and 16 bits are supported)"
_CODESTREAM = b"\xff\x4f\xff\x51"  # JPEG 2000's markers SOC and SIZ


@dataclass(frozen=True)
class Bands:
    """The bands of an image: colors, then alpha, then others.

    Attributes:
        count: all bands.
        colors: 1 (gray or palette), 3, or 4 (CMYK).
        has_alpha: the band after the colors is alpha.
        bits: the largest number of bits per value.
        is_unsigned: values are integers from 0.
        is_planar: each band is stored by itself.
    """

    count: int
    colors: int
    has_alpha: bool
    bits: int
    is_unsigned: bool
    is_planar: bool = False

    @property
    def surplus(self) -> int:
        """Return the number of bands that are neither color nor alpha."""
        return max(0, self.count - self.colors - self.has_alpha)

    def check(self) -> None:
        """Raise ValueError, which does not name the file, if the range of values or the RGB bands are unknown."""
        if not self.is_unsigned or self.bits > 16:
            raise ValueError(UNKNOWN_RANGE)
        if (self.colors == 1 and self.surplus > 1) or self.count > TiffImagePlugin.MAX_SAMPLESPERPIXEL:
            raise ValueError(f"it has {self.count} bands, but images are RGB (write three of them to a separate file)")


def read_bands(encoded: bytes) -> Bands | None:
    """Read the bands of a TIFF or JPEG 2000 file; return None for other formats, and if the header is damaged."""
    if encoded.startswith(tuple(TiffImagePlugin.PREFIXES)):
        return _read_tiff_bands(encoded)
    start = 0 if encoded.startswith(_CODESTREAM) else encoded.find(_CODESTREAM) if encoded[4:8] == b"jP  " else -1
    return _read_jpeg2000_bands(encoded[:start], encoded[start : start + 43]) if start >= 0 else None


def _read_tiff_bands(encoded: bytes) -> Bands | None:
    file = io.BytesIO(encoded)
    try:
        tags: Any = TiffImagePlugin.ImageFileDirectory_v2(file.read(16 if encoded[2] == 43 else 8))  # 43: BigTIFF
        file.seek(tags.next)
        tags.load(file)
        if TiffImagePlugin.IMAGEWIDTH not in tags:  # of a truncated file
            return None
        colors = _COLORS.get(tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION, 0), 1)
        count = tags.get(TiffImagePlugin.SAMPLESPERPIXEL, 1)
        extra = tags.get(TiffImagePlugin.EXTRASAMPLES)  # some writers leave it out for alpha
        has_alpha = count > colors and (extra[0] in _ALPHA if extra else count == colors + 1)
        bits = max(tags.get(TiffImagePlugin.BITSPERSAMPLE, (1,)))
        is_unsigned = set(tags.get(TiffImagePlugin.SAMPLEFORMAT, (1,))) <= _UNSIGNED
        is_planar = tags.get(TiffImagePlugin.PLANAR_CONFIGURATION, 1) == 2
        return Bands(count, colors, has_alpha, bits, is_unsigned, is_planar)
    except Exception:  # a header can be damaged in many ways; opening the file then fails
        return None


def _read_jpeg2000_bands(boxes: bytes, header: bytes) -> Bands | None:
    """Read the bands from the boxes before the codestream, and the codestream's first 43 bytes."""
    if len(header) < 43:
        return None
    count = int.from_bytes(header[40:42], "big")
    colors = 3 if count > 2 else 1
    has_alpha = count > colors and b"cdef" in boxes  # a channel definition
    return Bands(count, colors, has_alpha, bits=(header[42] & 127) + 1, is_unsigned=header[42] < 128)
