"""Finds the bad records of a data set in COCO's format, whatever JSON it holds, and removes them."""

from __future__ import annotations

import operator
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SECTIONS = ("images", "annotations", "categories")
_LARGEST = 2**63  # of a number: NumPy holds integers up to here
_MAX_PIXELS = 2**31  # of an image: pycocotools counts the pixels of a mask in 32 bits
# A compressed RLE: numbers of at most 8 characters (40 bits, more than any image has pixels), 5 bits per character. The
# characters P to o say that more follow; pycocotools would read past the end of a string that ends in one of them.
_COMPRESSED = re.compile(r"(?:[P-o]{0,7}[0-O])+")
# Length of an outline, in sides of its box. pycocotools allocates 80 bytes per pixel of an outline without checking
# that it gets them; a noisy mask that is traced pixel by pixel stays below 4 * (width + height) of a large image.
_MAX_OUTLINE = 10_000


@dataclass(frozen=True)
class Problem:
    """A bad record: ``content[section][index]``, and what is wrong with it."""

    section: str
    index: int
    text: str


def check(
    content: Mapping[str, Any], images: str | Path | None = None, *, masks: bool = True, keypoints: int = 0
) -> Iterator[Problem]:
    """Every bad record of a data set, once, in the file's order.

    Args:
        content: what `data.read` returns.
        images: folder that the images' ``file_name`` are relative to. None: only records that would crash a reader, or
            pycocotools behind it, are bad, and COCO's own releases pass. pycocotools checks nothing: it converts
            coordinates to 32-bit integers, allocates memory for every pixel between them, and reads past the end of
            run lengths.
        masks: with ``images``: objects without a mask are bad, too.
        keypoints: with ``images``: objects need so many; 0: objects may have as many as their category names.
    """
    sizes: dict[Any, tuple[float, float]] = {}
    bad_images: set[Any] = set()
    for index, image in enumerate(content["images"]):
        text = _record_problem(image, sizes) or _size_problem(image) or _file_problem(image, images)
        if text:
            yield Problem("images", index, f"image {_name(image)}: {text}")
            if isinstance(image, dict) and _is_id(image.get("id")):
                bad_images.add(image["id"])
        else:
            sizes[image["id"]] = (image["width"], image["height"])
    points: dict[Any, int] = {}
    for index, category in enumerate(content["categories"]):
        text = _record_problem(category, points) or _category_problem(category)
        if text:
            yield Problem("categories", index, f"category {_name(category)}: {text}")
        else:
            points[category["id"]] = keypoints or len(category.get("keypoints") or ())
    seen: dict[Any, None] = {}
    for index, record in enumerate(content["annotations"]):
        owner = record.get("image_id") if isinstance(record, dict) else None
        if _is_id(owner) and owner in bad_images and owner not in sizes:
            continue  # its image is reported already, and goes with it
        text = _record_problem(record, seen, mixed=True) or _annotation_problem(record)
        if images is not None:
            text = text or _object_problem(record, sizes, points)
        if not text and owner in sizes and record.get("segmentation"):
            text = _unsafe_mask(record["segmentation"], record["bbox"], *sizes[owner])
        if images is not None:
            text = text or _mask_problem(record, masks)
            text = text or _keypoint_problem(record, points[record["category_id"]], keypoints > 0, *sizes[owner])
            if isinstance(record, dict) and _is_id(record.get("id")):
                seen[record["id"]] = None
        if text:
            yield Problem("annotations", index, f"annotation {_name(record)} of image {_short(owner)}: {text}")


def box_format_problem(content: Mapping[str, Any]) -> str:
    """How most boxes show that they are not COCO's [x, y, width, height] in pixels, or an empty string."""
    sizes = {
        i["id"]: (i["width"], i["height"]) for i in content["images"] if isinstance(i, dict) and not _size_problem(i)
    }
    boxes = [
        (*a["bbox"], *sizes[a["image_id"]])
        for a in content["annotations"]
        if isinstance(a, dict) and _numbers(a.get("bbox")) and len(a["bbox"]) == 4 and a.get("image_id") in sizes
    ]
    if boxes and all(max(box[:4]) <= 1 for box in boxes):
        return (
            "its boxes lie between 0 and 1; COCO's boxes are in pixels: multiply them by the images' width and height"
        )
    corners = [x < right <= width + 1 and y < low <= height + 1 for x, y, right, low, width, height in boxes]
    outside = [x + w > width + 1 or y + h > height + 1 for x, y, w, h, width, height in boxes]
    if sum(outside) > len(boxes) / 2 and all(corners):
        return (
            f"{sum(outside)} of {len(boxes)} boxes end outside their image; they look like [x0, y0, x1, y1], and "
            "COCO's are [x, y, width, height]: subtract x0 and y0"
        )
    return ""


def leave_out(content: Mapping[str, Any], problems: Sequence[Problem]) -> dict[str, Any]:
    """``content`` without the bad records, and without the annotations of a removed image or category."""
    bad = {(problem.section, problem.index) for problem in problems}
    kept = {s: [r for i, r in enumerate(content[s]) if (s, i) not in bad] for s in SECTIONS}
    images, categories = ({record["id"] for record in kept[s]} for s in ("images", "categories"))
    alive = [r for r in kept["annotations"] if r["image_id"] in images and r["category_id"] in categories]
    return {**content, **kept, "annotations": alive}


def _short(value: Any, form: Callable[[Any], str] = str) -> str:
    try:
        text = form(value)
    except RecursionError:
        return "(nested too deeply)"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _name(record: Any) -> str:
    return _short(record.get("id")) if isinstance(record, dict) else _short(record)


def _is_id(value: Any) -> bool:
    return isinstance(value, str) or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and -_LARGEST < value < _LARGEST  # neither is true of NaN


def _numbers(values: Any) -> bool:
    return isinstance(values, list) and all(_is_number(v) for v in values)


def _record_problem(record: Any, seen: Mapping[Any, Any], *, mixed: bool = False) -> str:
    """What is wrong with a record's id. Images and categories are sorted by id: all are numbers, or all are strings."""
    if not isinstance(record, dict):
        return "not a record {...}"
    if "id" not in record:
        return f"no id (file_name {_short(record['file_name'])})" if "file_name" in record else "no id"
    if not _is_id(record["id"]):
        return "the id is neither a number nor a string"
    if record["id"] in seen:
        return "duplicate id"
    first = next(iter(seen), record["id"])
    if not mixed and isinstance(first, str) != isinstance(record["id"], str):
        return f"the id is a {type(record['id']).__name__}, unlike the first one, {_short(first, repr)}"
    return ""


def _size_problem(image: Mapping[str, Any]) -> str:
    width: Any = image.get("width")
    height: Any = image.get("height")
    if not all(isinstance(side, int) and side > 0 for side in (width, height)):
        return f"width {_short(width)} and height {_short(height)} are not whole numbers above 0"
    return f"{width} x {height} has 2^31 pixels or more" if width * height >= _MAX_PIXELS else ""


def _file_problem(image: Mapping[str, Any], folder: str | Path | None) -> str:
    name = image.get("file_name")
    if not isinstance(name, str) or not name:
        return f"file_name {_short(name)} is not a string"
    path = os.path.join(folder or "", name)
    return "" if folder is None or os.path.isfile(path) else f"missing image {path}"


def _category_problem(category: Mapping[str, Any]) -> str:
    if not isinstance(category.get("name"), str) or not category["name"]:
        return "no name"
    points = category.get("keypoints")  # null means none
    if points is not None and not (isinstance(points, list) and all(isinstance(name, str) for name in points)):
        return f"keypoints {_short(points)} is not a list of names"
    bones = category.get("skeleton")
    if bones is not None and not (isinstance(bones, list) and all(map(_is_bone, bones))):
        return f"skeleton {_short(bones)} is not a list of pairs of keypoints, counted from 1"
    if any(unicodedata.category(c) == "Cc" for c in "".join([category["name"], *(points or ())])):
        return "control characters in a name, which a terminal would obey"
    return ""


def _is_bone(bone: Any) -> bool:
    return isinstance(bone, list) and len(bone) == 2 and all(isinstance(end, int) and end >= 1 for end in bone)


def _annotation_problem(record: Mapping[str, Any]) -> str:
    for key in ("image_id", "category_id"):
        if not _is_id(record.get(key)):
            return f"{key} {_short(record.get(key))} is neither a number nor a string"
    box: Any = record.get("bbox")
    return "" if _numbers(box) and len(box) == 4 else f"box {_short(box)} is not [x, y, width, height]"


def _object_problem(
    record: Mapping[str, Any], sizes: Mapping[Any, tuple[float, float]], points: Mapping[Any, int]
) -> str:
    if record["image_id"] not in sizes:
        return "unknown image"
    if record["category_id"] not in points:
        return f"unknown category {_short(record['category_id'])}"
    if record.get("iscrowd", 0) not in (0, 1):
        return f"iscrowd {_short(record['iscrowd'], repr)} is not 0 or 1"
    return "" if _is_number(record.get("area", 0)) else f"area {_short(record['area'], repr)} is not a number"


def _unsafe_mask(mask: Any, box: Sequence[float], width: float, height: float) -> str:
    """What is wrong with a mask that pycocotools must not see; see `check`."""
    if isinstance(mask, dict):
        size: Any = mask.get("size")
        if size != [height, width] or not all(isinstance(side, int) for side in size) or "counts" not in mask:
            return f"RLE mask of size {_short(size)}, not {[height, width]}"
        covered = _rle_pixels(mask["counts"])
        if covered is None:
            return f"RLE counts {_short(mask['counts'], repr)} cannot be decoded"
        return "" if covered == height * width else f"RLE counts of {covered} pixels, not {height * width}"
    if not isinstance(mask, list):
        return f"segmentation {_short(mask)} is neither polygons nor RLE"
    if mask and isinstance(mask[0], list) and len(mask[0]) == 4:  # which makes boxes of the list to pycocotools
        return "empty polygon (it has 4 numbers, at least 6 needed)"
    return next(filter(None, (_unsafe_polygon(polygon, box, width, height) for polygon in mask)), "")


def _unsafe_polygon(polygon: Any, box: Sequence[float], width: float, height: float) -> str:
    if not _numbers(polygon):
        return f"polygon {_short(polygon)} is not a list of numbers"
    if len(polygon) < 4:  # pycocotools raises, or reads a number that is not there
        return f"empty polygon (it has {len(polygon)} numbers, at least 6 needed)"
    length = 0.0
    for values, size, start, side in ((polygon[0::2], width, box[0], box[2]), (polygon[1::2], height, box[1], box[3])):
        if text := _far_outside(values, size):
            return f"polygon {text}"
        inside = min(start + side, size) - max(start, 0)  # both engines clip the box and scale the outline to it
        length += sum(map(abs, map(operator.sub, values, values[1:] + values[:1]))) / max(inside, 0.1)
    return f"polygon winds {length:.0f} times across its box, more than {_MAX_OUTLINE}" if length > _MAX_OUTLINE else ""


def _far_outside(values: Sequence[float], size: float) -> str:
    """A mask may overhang its image, by the image's own size at most."""
    if values and not (-size <= min(values) and max(values) <= 2 * size):
        return f"reaches from {min(values):g} to {max(values):g} where the image has 0 to {size:g}"
    return ""


def _mask_problem(record: Mapping[str, Any], needed: bool) -> str:
    mask = record.get("segmentation")
    short = next((p for p in mask if len(p) < 6 or len(p) % 2), None) if isinstance(mask, list) else None
    if short is not None:
        return f"empty polygon (it has {len(short)} numbers, at least 6 needed)"
    return "empty polygon or no mask" if needed and not mask else ""


def _rle_pixels(counts: Any) -> int | None:
    """The number of pixels that run lengths cover; None if they are none.

    pycocotools shows no run lengths, and fills a mask with random memory where they are too short.
    """
    if isinstance(counts, list):
        return sum(counts) if all(isinstance(n, int) and n >= 0 for n in counts) else None
    if not isinstance(counts, str) or not _COMPRESSED.fullmatch(counts):
        return None
    code = np.frombuffer(counts.encode(), np.uint8).astype(np.int64) - 48  # 5 bits, lowest first; 32: more to come
    ends = np.flatnonzero(code < 32)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    shift = 5 * (np.arange(len(code)) - np.repeat(starts, lengths))
    runs = np.add.reduceat((code & 31) << shift, starts)
    runs -= np.where(code[ends] & 16, np.int64(1) << 5 * lengths, 0)  # the last one's highest bit is the sign
    runs[1::2] = np.cumsum(runs[1::2])  # from the fourth on, a run is stored as the difference to the last but one
    runs[2::2] = np.cumsum(runs[2::2])
    return int(runs.sum()) if runs.min() >= 0 else None


def _keypoint_problem(record: Mapping[str, Any], wanted: int, needed: bool, width: float, height: float) -> str:
    keypoints = record.get("keypoints")
    if keypoints is None:
        return "no keypoints" if needed else ""
    if not _numbers(keypoints):
        return f"keypoints {_short(keypoints, repr)} is not a list of numbers"
    if len(keypoints) != 3 * wanted:
        return f"wrong keypoint count: {len(keypoints) / 3:g}, not {wanted}"
    for values, size in ((keypoints[0::3], width), (keypoints[1::3], height)):
        if text := _far_outside(values, size):
            return f"a keypoint {text}"
    labeled = sum(visible > 0 for visible in keypoints[2::3])
    if record.get("num_keypoints", labeled) != labeled:
        return f"wrong keypoint count: num_keypoints is {record['num_keypoints']}, but {labeled} are labeled"
    return ""
