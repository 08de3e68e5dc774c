"""Finds the bad records of a data set in COCO's format, and drops them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from reprlib import repr as short
from typing import Any

from pretrain.common.errors import one_line

SECTIONS = ("images", "annotations", "categories")
SMALL = 4  # pixels; a detector with FPN sees features of 4 x 4 pixels at best
_BOXES = 10_000  # enough of them to tell their format


@dataclass(frozen=True)
class Problem:
    """A bad record: ``content[section][index]``, and what is wrong with it."""

    section: str
    index: int
    text: str


def check(
    content: Mapping[str, Any], images: str | Path | None = None, *, masks: bool = False, keypoints: int = 0
) -> Iterator[Problem]:
    """Every bad record of a data set, once, in the file's order; the annotations of a bad image or category, too.

    Args:
        content: what `data.read` returns.
        images: folder that the images' ``file_name`` are relative to. None: the files need not exist.
        masks: objects need a mask.
        keypoints: objects need so many; 0: none.
    """
    sizes: dict[Any, tuple[int, int]] = {}
    categories: set[Any] = set()
    seen: set[Any] = set()
    rules: dict[str, tuple[str, Callable[[Any], str]]] = {
        "images": ("image", lambda record: _image_problem(record, sizes, images)),
        "categories": ("category", lambda record: _category_problem(record, categories)),
        "annotations": ("annotation", lambda r: _annotation_problem(r, sizes, categories, seen, masks, keypoints)),
    }
    for section, (kind, rule) in rules.items():
        for index, record in enumerate(content[section]):
            try:
                text = rule(record)
            except KeyError as error:
                text = f"no {error.args[0]}"
            except (ArithmeticError, AttributeError, TypeError, ValueError) as error:  # other types than COCO's
                text = f"malformed ({one_line(error)})"
            if text:
                yield Problem(section, index, f"{kind} {_name(record)}: {text}")


def drop_bad(content: Mapping[str, Any], problems: Sequence[Problem]) -> dict[str, Any]:
    """``content`` without the bad records."""
    bad = {(problem.section, problem.index) for problem in problems}
    return {**content, **{s: [r for i, r in enumerate(content[s]) if (s, i) not in bad] for s in SECTIONS}}


def box_format_problem(content: Mapping[str, Any]) -> str:
    """How most boxes show that they are not COCO's [x, y, width, height] in pixels, or an empty string.

    Args:
        content: without bad records.
    """
    sizes = {image["id"]: (image["width"], image["height"]) for image in content["images"]}
    boxes = [(*record["bbox"], *sizes[record["image_id"]]) for record in content["annotations"][:_BOXES]]
    if boxes and all(max(box[:4]) <= 1 for box in boxes):
        return "its boxes lie between 0 and 1, but COCO's are in pixels; multiply them by the images' width and height"
    corners = [x < right <= width + 1 and y < low <= height + 1 for x, y, right, low, width, height in boxes]
    outside = [x + w > width + 1 or y + h > height + 1 for x, y, w, h, width, height in boxes]
    if sum(outside) > len(boxes) / 2 and all(corners):
        return (
            f"{sum(outside)} of {len(boxes)} boxes end outside their image; they look like [x0, y0, x1, y1], and "
            "COCO's are [x, y, width, height]: subtract x0 and y0"
        )
    return ""


def share_of_small_boxes(content: Mapping[str, Any], min_size: int, max_size: int) -> float:
    """The share, from 0 to 1, of boxes with a side below `SMALL` pixels in images as the detector sees them.

    Args:
        content: without bad records.
        min_size: pixels that an image's shorter side is resized to; 0: none is.
        max_size: pixels that its longer side is resized to at most.
    """
    scale = {}
    for image in content["images"]:
        sides = image["width"], image["height"]
        scale[image["id"]] = min(min_size / min(sides), max_size / max(sides)) if min_size else 1.0
    objects = [record for record in content["annotations"] if not record.get("iscrowd")]
    sides = [min(record["bbox"][2:]) * scale[record["image_id"]] for record in objects]
    return sum(side < SMALL for side in sides) / max(len(sides), 1)


def _name(record: Any) -> str:
    if not isinstance(record, dict):
        return short(record)
    image = f" of image {short(record['image_id'])}" if "image_id" in record else ""
    return short(record.get("id", record.get("file_name"))) + image


def _image_problem(image: dict[str, Any], sizes: dict[Any, tuple[int, int]], folder: str | Path | None) -> str:
    if image["id"] in sizes:
        return "duplicate id"
    width, height = image["width"], image["height"]
    if not all(isinstance(side, int) and side > 0 for side in (width, height)):
        return f"width {short(width)} and height {short(height)} are not whole numbers above 0"
    path = os.path.join(folder or "", image["file_name"])
    if folder is not None and not os.path.isfile(path):
        return f"missing image {path}"
    sizes[image["id"]] = (width, height)
    return ""


def _category_problem(category: dict[str, Any], seen: set[Any]) -> str:
    if category["id"] in seen:
        return "duplicate id"
    if not category["name"]:
        return "no name"
    seen.add(category["id"])
    return ""


def _annotation_problem(
    record: dict[str, Any], sizes: Mapping[Any, tuple[int, int]], categories: set[Any], seen: set[Any], masks: bool,
    keypoints: int,
) -> str:  # fmt: skip
    if record["image_id"] not in sizes:
        return "unknown or bad image"
    if record["id"] in seen:
        return "duplicate id"
    seen.add(record["id"])
    if record["category_id"] not in categories:
        return f"unknown category {short(record['category_id'])}"
    box = record["bbox"]
    if len(box) != 4 or not isfinite(sum(box)):
        return f"box {short(box)} is not [x, y, width, height]"
    if record.get("iscrowd", 0) not in (0, 1):
        return f"iscrowd {record['iscrowd']!r} is not 0 or 1"
    if not isfinite(record.get("area", 0)):
        return f"area {record['area']} is not finite"
    width, height = sizes[record["image_id"]]
    return _mask_problem(record.get("segmentation"), width, height, masks) or _keypoint_problem(record, keypoints)


def _mask_problem(mask: Any, width: int, height: int, needed: bool) -> str:
    if isinstance(mask, dict):
        is_valid = mask.get("size") == [height, width] and "counts" in mask
        return "" if is_valid else f"RLE mask of size {short(mask.get('size'))}, not {[height, width]}"
    if not mask:
        return "no mask (if none has one, set MODEL.MASK_ON False)" if needed else ""
    for polygon in mask:
        if not isfinite(sum(polygon)):
            return f"polygon {short(polygon)} is not finite"
        if needed and (len(polygon) < 6 or len(polygon) % 2):
            return f"polygon of {len(polygon)} numbers; it needs an even number, at least 6"
    return ""


def _keypoint_problem(record: Mapping[str, Any], count: int) -> str:
    points = record.get("keypoints")
    if points is None:
        return "no keypoints (if none has any, set MODEL.KEYPOINT_ON False)" if count else ""
    if not isfinite(sum(points)):
        return f"keypoints {short(points)} are not finite"
    if len(points) % 3 or (count and len(points) != 3 * count):
        return f"wrong keypoint count: {len(points) / 3:g}, not {count or 'whole'}"
    labeled = sum(visible > 0 for visible in points[2::3])
    if count and record.get("num_keypoints", labeled) != labeled:
        return f"wrong keypoint count: num_keypoints is {record['num_keypoints']}, but {labeled} are labeled"
    return ""
