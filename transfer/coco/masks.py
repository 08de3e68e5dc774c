"""Checks masks in COCO's format before pycocotools reads them, which does not end on some that are invalid."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from math import isfinite
from reprlib import repr as short
from typing import Any

from pycocotools import mask as coco_mask


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
    size, pixels = mask.get("size"), height * width
    if size != [height, width]:
        return f"RLE mask of size {short(size)}, not {[height, width]}"
    is_valid = _has_pixels(mask.get("counts"), pixels) and not _has_pixels(mask["counts"], pixels - 1)
    return "" if is_valid else f"RLE mask whose counts {short(mask.get('counts'))} do not sum to {pixels}, or are empty"


def _has_pixels(counts: Any, pixels: int) -> bool:
    """Whether run lengths fit into so many pixels, and not all of these are background; pycocotools refuses others."""
    rle: Any = {"size": [pixels, 1], "counts": counts}
    with contextlib.suppress(ArithmeticError, TypeError, ValueError):
        return bool(coco_mask.decode(coco_mask.frPyObjects(rle, pixels, 1) if isinstance(counts, list) else rle).any())
    return False
