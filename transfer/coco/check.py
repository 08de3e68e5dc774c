"""Finds the bad records of a data set in COCO's format, drops them, and brings the good ones into one form."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from reprlib import repr as short
from typing import Any

from PIL import ExifTags, Image

from pretrain.common.errors import one_line
from pretrain.common.images import CorruptImage, open_upright

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
        decode: decode the images; see `upright_size`.
    """
    sizes: dict[Any, tuple[int, int]] = {}
    categories: set[Any] = set()
    of_image, of_category = _id_rule(content["images"]), _id_rule(content["categories"])
    names = [str(record.get("file_name")) for record in content["images"] if isinstance(record, dict)]
    paths = [] if images is None else [os.path.join(images, name) for name in names]
    # Threads, since a network disk takes milliseconds to open a file; warnings are of odd EXIF data.
    with warnings.catch_warnings(action="ignore"), ThreadPool(8) as pool:
        files = dict(zip(paths, pool.map(lambda path: upright_size(path, decode=decode), paths), strict=True))

    def image_problem(image: dict[str, Any]) -> str:
        width, height, name = image["width"], image["height"], image["file_name"]
        if not are_numbers([width, height]) or any(side <= 0 or side != int(side) for side in (width, height)):
            return f"width {short(width)} and height {short(height)} are not whole numbers above 0"
        if not isinstance(name, str):
            return f"file_name {short(name)} is not text"
        if images is not None:
            path = os.path.join(images, name)
            try:
                actual = files[path] or open_upright(path).size
            except CorruptImage as error:
                return str(error)
            if actual != (width, height):
                return f"{path} has {actual[0]} x {actual[1]} pixels (after any EXIF rotation), not {width} x {height}"
        sizes[image["id"]] = (int(width), int(height))
        return ""

    def category_problem(category: dict[str, Any]) -> str:
        names = category.get("keypoints") or []
        if not category["name"]:
            return "no name"
        if keypoints and len(names) not in (0, keypoints):
            return f"names {len(names)} keypoints, but MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is {keypoints}"
        categories.add(category["id"])
        return ""

    def annotation_problem(record: dict[str, Any]) -> str:
        if record["image_id"] not in sizes:
            return "unknown or bad image"
        if record["category_id"] not in categories:
            return f"unknown category {short(record['category_id'])}"
        text = _box_problem(record, *sizes[record["image_id"]], strict)
        text = text or (masks and mask_problem(record.get("segmentation"), *sizes[record["image_id"]]))
        return text or (keypoints and _keypoint_problem(record, keypoints)) or ""

    rules: dict[str, tuple[str, Callable[[Any], str]]] = {
        "images": ("image", lambda record: of_image(record["id"]) or image_problem(record)),
        "categories": ("category", lambda record: of_category(record["id"]) or category_problem(record)),
        "annotations": ("annotation", annotation_problem),
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


def upright_size(path: str, *, decode: bool = False) -> tuple[int, int] | None:
    """Read an image's width and height after its EXIF rotation; None if it looks damaged or unusual: `open_upright`
    decides about it.

    Args:
        decode: decode it. Otherwise the header and the end of a JPEG or PNG are read: 0.1 ms on a local disk.
    """
    with contextlib.suppress(Exception), open(path, "rb") as file:
        file.seek(-8, os.SEEK_END)
        is_complete = file.read().endswith((b"\xff\xd9", b"IEND\xaeB`\x82"))  # of a JPEG, a PNG
        image = Image.open(file)
        is_usual = image.width * image.height < 2**26 and image.mode not in ("F", "I")
        if is_usual and (decode or not is_complete):
            image.load()
        has_exif = image.format != "PNG" or "exif" in image.info  # Pillow would decode a PNG to look for it
        is_turned = has_exif and image.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
        return ((image.height, image.width) if is_turned else image.size) if is_usual else None


def drop_bad(content: Mapping[str, Any], problems: Sequence[Problem]) -> dict[str, Any]:
    """``content`` without the bad records."""
    bad = {(problem.section, problem.index) for problem in problems}
    return {**content, **{s: [r for i, r in enumerate(content[s]) if (s, i) not in bad] for s in SECTIONS}}


def unify(content: Mapping[str, Any], *, masks: bool, keypoints: bool) -> dict[str, Any]:
    """Reduce good records to what the detector reads, in the form that both engines read alike."""
    unread = {"ignore", *(() if masks else ["segmentation"]), *(() if keypoints else ["keypoints", "num_keypoints"])}
    records = []
    for number, record in enumerate(content["annotations"], 1):  # the file's ids may begin anew in every image
        is_crowd = bool(record.get("iscrowd") or record.get("ignore"))
        unified = {**record, "id": number, "iscrowd": int(is_crowd)}
        if isinstance(record.get("segmentation"), list):
            unified["segmentation"] = outlines(record["segmentation"])
        records.append({key: value for key, value in unified.items() if key not in unread})
    images = [{**image, "width": int(image["width"]), "height": int(image["height"])} for image in content["images"]]
    return {**content, "images": images, "annotations": records}


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


def _box_problem(record: Mapping[str, Any], width: int, height: int, strict: bool) -> str:
    box, area = record["bbox"], record.get("area", 0)
    if not are_numbers(box) or len(box) != 4:
        return f"box {short(box)} is not [x, y, width, height]"
    for name in ("iscrowd", "ignore"):
        if record.get(name, 0) not in (0, 1):
            return f"{name} {record[name]!r} is not 0 or 1"
    if not are_numbers([area]):
        return f"area {short(area)} is not a number"
    x, y, w, h = box
    if min(w, h) < 0 or (strict and min(w, h) == 0):
        return f"box {short(box)} has width {w:g} and height {h:g}"
    is_outside = strict and not (-w < x < width and -h < y < height)
    return f"box {short(box)} lies outside its image, {width} x {height}" if is_outside else ""


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
