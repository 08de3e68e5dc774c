"""Masks of a file in COCO's format, which are polygons or run lengths (RLE), and their check."""

import contextlib
from collections.abc import Sequence
from math import isfinite
from reprlib import repr as short
from typing import Any

from pycocotools import mask as coco_mask


def are_numbers(values: Any) -> bool:
    """Return whether this is a list of finite numbers."""
    return isinstance(values, list) and all(isinstance(value, (int, float)) and isfinite(value) for value in values)


def select_outlines(polygons: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """Select the polygons that enclose something, as Detectron2 does: [x, y, ...] of at least three points."""
    numbers = [polygon for polygon in polygons if are_numbers(polygon)]
    return [polygon for polygon in numbers if len(polygon) >= 6 and len(polygon) % 2 == 0]


def find_mask_problem(mask: Any, box: Sequence[float], width: int, height: int) -> str:
    """Describe the fault of an object's ``segmentation``, or return an empty string.

    pycocotools does not return from some invalid masks, so they are checked before it reads them. Polygons that cover
    no part of the box are a repeated point or lie elsewhere (at negative coordinates, for example): they contain
    nothing to train on or to find. If ``box`` is empty, their extent is not checked.
    """
    if isinstance(mask, dict):
        return _find_rle_problem(mask, width, height)
    if not mask:
        return "no mask (if none has one, set MODEL.MASK_ON False)"
    if not isinstance(mask, list) or not all(map(are_numbers, mask)):
        return f"segmentation {short(mask)} is neither RLE nor a list of polygons [x, y, x, y, ...]"
    outlines = select_outlines(mask)
    if not outlines:
        return f"segmentation {short(mask)} has no polygon of 3 points (6 numbers)"
    for axis, (start, length) in enumerate(zip(box[:2], box[2:], strict=True)):
        values = [value for outline in outlines for value in outline[axis::2]]
        if not max(min(values), start) < min(max(values), start + length):
            extent = f"{min(values):g} to {max(values):g} in {'xy'[axis]}"
            return f"its polygons, {extent}, have no area in its box {short(box)}"
    return ""


def _find_rle_problem(mask: dict[str, Any], width: int, height: int) -> str:
    size = mask.get("size")
    pixels = height * width
    if size != [height, width]:
        return f"RLE mask of size {short(size)}, not {[height, width]}"
    is_valid = _has_foreground(mask.get("counts"), pixels) and not _has_foreground(mask["counts"], pixels - 1)
    return "" if is_valid else f"RLE mask whose counts {short(mask.get('counts'))} do not sum to {pixels}, or are empty"


def _has_foreground(counts: Any, pixels: int) -> bool:
    """Return whether run lengths fit into ``pixels`` and mark at least one of them as foreground."""
    rle: Any = {"size": [pixels, 1], "counts": counts}
    with contextlib.suppress(ArithmeticError, TypeError, ValueError):
        return bool(coco_mask.decode(coco_mask.frPyObjects(rle, pixels, 1) if isinstance(counts, list) else rle).any())
    return False
