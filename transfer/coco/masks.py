"""Checks masks in COCO's format before pycocotools reads them, which does not end on some that are invalid."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from reprlib import repr as short
from typing import Any


def are_numbers(values: Any) -> bool:
    """Whether this is a list of finite numbers."""
    return isinstance(values, list) and all(isinstance(value, (int, float)) and isfinite(value) for value in values)


def outlines(polygons: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """Select the polygons that enclose something, as Detectron2 does: [x, y, ...] of at least three points."""
    return [polygon for polygon in polygons if len(polygon) >= 6 and len(polygon) % 2 == 0]


def mask_problem(mask: Any, width: int, height: int) -> str:
    """Say what is wrong with the ``segmentation`` of an object in an image of this size; empty: nothing."""
    if isinstance(mask, dict):
        return _rle_problem(mask, width, height)
    if not mask:
        return "no mask (if none has one, set MODEL.MASK_ON False)"
    if not isinstance(mask, list) or not all(map(are_numbers, mask)):
        return f"segmentation {short(mask)} is neither RLE nor a list of polygons [x, y, x, y, ...]"
    return "" if outlines(mask) else f"segmentation {short(mask)} has no polygon of 3 points (6 numbers)"


def _rle_problem(mask: dict[str, Any], width: int, height: int) -> str:
    if mask.get("size") != [height, width]:
        return f"RLE mask of size {short(mask.get('size'))}, not {[height, width]}"
    counts = mask.get("counts")
    runs: Any = _decompressed(counts) if isinstance(counts, str) else counts
    if not are_numbers(runs) or any(run < 0 or run != int(run) for run in runs):
        return f"RLE mask with counts {short(counts)}, which are not run lengths"
    if sum(runs) != height * width:
        return f"RLE mask whose counts {short(counts)} sum to {sum(runs):g}, not {height * width} (height x width)"
    return "" if any(runs[1::2]) else "RLE mask without a pixel"


def _decompressed(counts: str) -> list[int]:
    """Decode COCO's compressed run lengths; empty: this is no such string.

    A number is written in groups of 5 bits, the lowest first, each as a character from "0" on; bit 5 says that another
    group follows. The last group's bit 4 is the sign. From the fourth on, numbers are added to the run two before.
    """
    runs: list[int] = []
    value = shift = 0
    for character in counts:
        code = ord(character) - ord("0")
        if not 0 <= code < 64:
            return []
        value |= (code & 31) << shift
        shift += 5
        if code < 32:
            value -= (code >> 4) << shift
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    return [] if shift else runs
