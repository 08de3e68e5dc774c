"""Finds the bad records of a data set in COCO's format, drops them, and brings the good ones into one form."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any

from pretrain.common.errors import one_line
from pretrain.common.image_io import CorruptImage, open_upright

from .image_sizes import sound_sizes
from .masks import are_numbers, mask_problem, outlines

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
    content: Mapping[str, Any], images: str | Path | None = None, *, masks: bool = False, keypoints: int = 0,
    strict: bool = True, decode: bool = False,
) -> Iterator[Problem]:  # fmt: skip
    """Every bad record of a data set, once, in the file's order; the annotations of a bad image or category, too.

    Args:
        content: what `data.read` returns.
        images: folder that the images' ``file_name`` are relative to. None: the files need not exist.
        masks: objects need a mask.
        keypoints: objects need so many; 0: none.
        strict: refuse boxes without an area in their image, which a few of COCO's own are.
        decode: decode the images; see `sound_sizes`.
    """
    sizes: dict[Any, tuple[int, int]] = {}
    categories: set[Any] = set()
    image_id, category_id = _id_rule(content["images"]), _id_rule(content["categories"])
    names = [str(record.get("file_name")) for record in content["images"] if isinstance(record, dict)]
    files = {} if images is None else sound_sizes([os.path.join(images, name) for name in names], decode)
    rules: dict[str, tuple[str, Callable[[Any], str]]] = {
        "images": ("image", lambda r: image_id(r["id"]) or _image_problem(r, sizes, images, files)),
        "categories": ("category", lambda r: category_id(r["id"]) or _category_problem(r, categories, keypoints)),
        "annotations": ("annotation", lambda r: _annotation_problem(r, sizes, categories, masks, keypoints, strict)),
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


def unify(content: Mapping[str, Any], *, masks: bool, keypoints: bool) -> tuple[dict[str, Any], Counter[str]]:
    """Reduce good records to what the detector reads, in the form that both engines read alike.

    Returns:
        The content; and what was changed, with the number of objects or polygons.
    """
    unread = {"ignore", *(() if masks else ["segmentation"]), *(() if keypoints else ["keypoints", "num_keypoints"])}
    changes: Counter[str] = Counter()
    records = []
    for number, record in enumerate(content["annotations"], 1):  # the file's ids may begin anew in every image
        unified = {key: value for key, value in record.items() if key not in unread}
        area = object_area(record)
        unified |= {"id": number, "area": area, "iscrowd": int(bool(record.get("iscrowd") or record.get("ignore")))}
        changes["objects have ignore 1, which is read as iscrowd 1"] += bool(record.get("ignore"))
        changes["objects have an area that is not in pixels; their boxes' are used"] += record.get("area", area) != area
        if isinstance(polygons := unified.get("segmentation"), list):
            unified["segmentation"] = outlines(polygons)
            removed = len(polygons) - len(unified["segmentation"])
            changes["polygons have fewer than 3 points and are left out"] += removed
        records.append(unified)
    images = [{**image, "width": int(image["width"]), "height": int(image["height"])} for image in content["images"]]
    return {**content, "images": images, "annotations": records}, +changes


def object_area(record: Mapping[str, Any]) -> float:
    """Return an object's area in pixels: that of its box where the record has none, or one that cannot be."""
    area, box = record.get("area", 0), record["bbox"][2] * record["bbox"][3]
    return area if area > 0 and area >= min(1, box / 100) else box


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


def _id_rule(records: Sequence[Any]) -> Callable[[Any], str]:
    """Return what says what is wrong with an id: its type is not that of most, or several records have it.

    All of these are bad, as nobody knows which of them a box belongs to. Ids of two types cannot be sorted.
    """
    ids = [record.get("id") for record in records if isinstance(record, dict)]
    counts = Counter(map(repr, ids))
    usual = str if sum(isinstance(value, str) for value in ids) > len(ids) / 2 else (int, float)

    def problem(value: Any) -> str:
        if not isinstance(value, usual):
            return f"id {short(value)} is not {'text' if usual is str else 'a number'} like most ids"
        return "duplicate id" if counts[repr(value)] > 1 else ""

    return problem


def _image_problem(
    image: dict[str, Any], sizes: dict[Any, tuple[int, int]], folder: str | Path | None,
    files: Mapping[str, tuple[int, int] | None],
) -> str:  # fmt: skip
    width, height = image["width"], image["height"]
    if not are_numbers([width, height]) or any(side <= 0 or side != int(side) for side in (width, height)):
        return f"width {short(width)} and height {short(height)} are not whole numbers above 0"
    if not isinstance(image["file_name"], str):
        return f"file_name {short(image['file_name'])} is not text"
    if folder is not None:
        path = os.path.join(folder, image["file_name"])
        if not files[path] and not os.path.isfile(path):
            return f"missing image {path}"
        try:
            size = files[path] or open_upright(path).size
        except CorruptImage as error:
            return str(error)
        if size != (width, height):
            return f"{path} has {size[0]} x {size[1]} pixels (after its EXIF rotation, if any), not {width} x {height}"
    sizes[image["id"]] = (int(width), int(height))
    return ""


def _category_problem(category: dict[str, Any], good: set[Any], keypoints: int) -> str:
    if not category["name"]:
        return "no name"
    names = category.get("keypoints") or []
    if keypoints and len(names) not in (0, keypoints):
        return f"names {len(names)} keypoints, but MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is {keypoints}"
    good.add(category["id"])
    return ""


def _annotation_problem(
    record: dict[str, Any], sizes: Mapping[Any, tuple[int, int]], categories: set[Any], masks: bool, keypoints: int,
    strict: bool,
) -> str:  # fmt: skip
    if record["image_id"] not in sizes:
        return "unknown or bad image"
    if record["category_id"] not in categories:
        return f"unknown category {short(record['category_id'])}"
    box, (width, height) = record["bbox"], sizes[record["image_id"]]
    if not are_numbers(box) or len(box) != 4:
        return f"box {short(box)} is not [x, y, width, height]"
    for name in ("iscrowd", "ignore"):
        if record.get(name, 0) not in (0, 1):
            return f"{name} {record[name]!r} is not 0 or 1"
    if not are_numbers([record.get("area", 0)]):
        return f"area {short(record['area'])} is not a number"
    x, y, w, h = box
    if min(w, h) < 0 or (strict and min(w, h) == 0):
        return f"box {short(box)} has width {w:g} and height {h:g}"
    if strict and not (-w < x < width and -h < y < height):
        return f"box {short(box)} lies outside its image, {width} x {height}"
    mask = mask_problem(record.get("segmentation"), width, height) if masks else ""
    return mask or (_keypoint_problem(record, keypoints) if keypoints else "")


def _keypoint_problem(record: Mapping[str, Any], count: int) -> str:
    points = record.get("keypoints")
    if points is None:
        return "no keypoints (if none has any, set MODEL.KEYPOINT_ON False)"
    if not are_numbers(points):
        return f"keypoints {short(points)} are not numbers"
    if len(points) != 3 * count:
        return f"wrong keypoint count: {len(points) / 3:g}, not {count}"
    labeled = sum(visible > 0 for visible in points[2::3])
    if record.get("num_keypoints", labeled) != labeled:
        return f"wrong keypoint count: num_keypoints is {record['num_keypoints']}, but {labeled} are labeled"
    return ""
