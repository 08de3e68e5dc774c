"""Finds the bad records of a data set in COCO's format, drops them, and normalizes the good ones."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from reprlib import repr as short
from typing import Any

from pretrain.common.errors import one_line
from pretrain.common.images import CorruptImage, read_image

from .image_sizes import read_upright_sizes
from .masks import are_numbers, find_mask_problem, select_outlines
from .missing_files import suggest_file

SECTIONS = {"images": "image", "categories": "category", "annotations": "annotation"}  # in the order of the checks
_SAMPLE = 10_000  # boxes that are enough to recognize their format


@dataclass(frozen=True)
class Problem:
    """A bad record, ``content[section][index]``, and a description of its fault."""

    section: str
    index: int
    text: str


@dataclass(frozen=True)
class Rules:
    """Requirements on records beyond COCO's format.

    Attributes:
        masks: every object needs a mask.
        keypoints: number of keypoints that every object needs.
        strict: every box needs an area inside its image, which a few of COCO's own boxes do not have.
        decode: every image file is decoded; see `read_upright_size`.
    """

    masks: bool = False
    keypoints: int = 0
    strict: bool = True
    decode: bool = False


def resolve_paths(folder: str | Path, names: Sequence[str]) -> list[str]:
    """Return the paths of files in a folder, with one spelling for each: a.jpg, ./a.jpg and b/../a.jpg are the same.

    Symbolic links to folders are resolved. Those to files are not, because every file would have to be asked.
    """
    heads = [os.path.split(os.path.join(folder, name)) for name in names]
    folders = {head: os.path.realpath(head) for head in {head for head, _ in heads}}
    return [os.path.join(folders[head], tail) for head, tail in heads]


def find_problems(content: Mapping[str, Any], images: str | Path | None, rules: Rules) -> list[Problem]:
    """Return the bad records in the file's order, each once; annotations of a bad image or category are bad, too.

    Args:
        content: what `data.read_annotations` returns.
        images: the folder that contains the images. If None, the image files are not checked.
    """
    checker = _RecordChecker(content, images, rules)
    problems = []
    for section, kind in SECTIONS.items():
        for index, record in enumerate(content[section]):
            try:
                text = checker.find_problem(section, record)
            except KeyError as error:
                text = f"{error.args[0]} is missing"
            except (ArithmeticError, AttributeError, TypeError, ValueError) as error:  # other types than COCO's
                text = f"malformed ({one_line(error)})"
            if text:
                problems.append(Problem(section, index, f"{kind} {_describe(record)}: {text}"))
    return problems


class _RecordChecker:
    """Checks one record at a time: first images, then categories, then annotations.

    Its methods describe the fault of a bad record, and return an empty string for a good one.
    """

    def __init__(self, content: Mapping[str, Any], images: str | Path | None, rules: Rules) -> None:
        self.folder = images
        self.rules = rules
        self.ids = {section: _Ids(content[section]) for section in ("images", "categories")}
        self.good: dict[str, dict[Any, Any]] = {"images": {}, "categories": {}}  # records by id
        names = [str(record.get("file_name")) for record in content["images"] if isinstance(record, dict)]
        self.paths = dict(zip(names, resolve_paths(images or "", names), strict=True))
        self.path_counts = Counter(map(self.paths.__getitem__, names))
        paths = [] if images is None else [os.path.join(images, name) for name in names]
        self.files = read_upright_sizes(paths, rules.decode)

    def find_problem(self, section: str, record: Any) -> str:
        if section == "annotations":
            return self._find_annotation_problem(record)
        find_own_problem = self._find_image_problem if section == "images" else self._find_category_problem
        text = self.ids[section].find_problem(record["id"]) or find_own_problem(record)
        if not text:
            self.good[section][record["id"]] = record
        return text

    def _find_image_problem(self, image: dict[str, Any]) -> str:
        name = image["file_name"]
        width = image["width"]
        height = image["height"]
        if not are_numbers([width, height]) or any(side <= 0 or side != int(side) for side in (width, height)):
            return f"width {short(width)} and height {short(height)} are not whole numbers above 0"
        if not isinstance(name, str):
            return f"file_name {short(name)} is not text"
        count = self.path_counts[self.paths[name]]
        if self.rules.strict and count > 1:
            return f"{count} images are the file {name!r}; merge them, or give each its own file"
        if self.folder is None:
            return ""
        path = os.path.join(self.folder, name)
        return _find_file_problem(path, (width, height), self.files[path], self.folder, name)

    def _find_category_problem(self, category: dict[str, Any]) -> str:
        names = category.get("keypoints") or []
        if category["name"] in (None, ""):
            return "no name"
        if self.rules.keypoints and len(names) not in (0, self.rules.keypoints):
            return f"names {len(names)} keypoints, but MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is {self.rules.keypoints}"
        return ""

    def _find_annotation_problem(self, record: dict[str, Any]) -> str:
        category = record["category_id"]
        text = self.ids["images"].find_kind_problem("image_id", record["image_id"], "the ids of images")
        text = text or self.ids["categories"].find_kind_problem("category_id", category, "the ids of categories")
        if text:
            return text
        if record["image_id"] not in self.good["images"]:
            return "unknown or bad image"
        if category not in self.good["categories"]:
            fault = "bad" if repr(category) in self.ids["categories"].counts else "unknown"
            return f"{fault} category {short(category)}"
        for name in ("iscrowd", "ignore"):
            if record.get(name) not in (None, 0, 1):
                return f"{name} {short(record[name])} is not 0 or 1"
        image = self.good["images"][record["image_id"]]
        size = (int(image["width"]), int(image["height"]))
        text = _find_box_problem(record, *size, self.rules.strict)
        if self.rules.masks and not text:
            box = [] if record.get("iscrowd") else record["bbox"]  # a crowd may have no area: it is not trained on
            text = find_mask_problem(record.get("segmentation"), box, *size)
        if self.rules.keypoints and not text:
            text = _find_keypoint_problem(record, self.rules.keypoints)
        return text


def find_bad_files(records: Iterable[Mapping[str, Any]], *, decode: bool) -> list[str]:
    """Describe the image files of records in Detectron2's form that cannot be read, or are of another size."""
    sizes = {record["file_name"]: (record.get("width"), record.get("height")) for record in records}
    actual = read_upright_sizes(list(sizes), decode)
    problems = [_find_file_problem(path, size, actual[path]) for path, size in sizes.items()]
    return [problem for problem in problems if problem]


def _find_file_problem(
    path: str, size: tuple[Any, Any], actual: tuple[int, int] | None, folder: str | Path = "", name: str = ""
) -> str:
    """Describe the fault of an image file; ``actual`` is what `read_upright_size` returns for it."""
    try:
        width, height = actual or read_image(path).shape[1::-1]
    except CorruptImage as error:
        return f"{error}{suggest_file(folder, name or path)}"
    if size not in ((width, height), (None, None)):
        return f"{path} has {width} x {height} pixels (after any EXIF rotation), not {size[0]} x {size[1]}"
    return ""


class _Ids:
    """The ids of a section, which are all numbers or all text, since ids of two types cannot be sorted.

    All records that share an id are bad, because a box may belong to any of them.
    """

    def __init__(self, records: Sequence[Any]) -> None:
        ids = [record.get("id") for record in records if isinstance(record, dict)]
        self.counts = Counter(map(repr, ids))
        self.are_text = sum(isinstance(value, str) for value in ids) > len(ids) / 2

    def find_problem(self, value: Any) -> str:
        duplicate = "duplicate id" if self.counts[repr(value)] > 1 else ""
        return self.find_kind_problem("id", value, "most ids") or duplicate

    def find_kind_problem(self, name: str, value: Any, others: str) -> str:
        """Say that an id, or a reference to one, is not of the kind of the section's ids; "" if it is."""
        if isinstance(value, str if self.are_text else (int, float)):
            return ""
        return f"{name} {short(value)} is not {'text' if self.are_text else 'a number'} like {others}"


def drop_bad(content: Mapping[str, Any], problems: Sequence[Problem]) -> dict[str, Any]:
    """Return ``content`` without the bad records."""
    bad = {(problem.section, problem.index) for problem in problems}
    good = {s: [record for i, record in enumerate(content[s]) if (s, i) not in bad] for s in SECTIONS}
    return {**content, **good}


def normalize(content: Mapping[str, Any], *, masks: bool, keypoints: bool) -> dict[str, Any]:
    """Reduce good records to the fields that the detector reads, in a form that both engines read alike."""
    is_read = {"ignore": False, "segmentation": masks, "keypoints": keypoints, "num_keypoints": keypoints}
    annotations = []
    for number, record in enumerate(content["annotations"], 1):  # the file's ids may start again in every image
        is_crowd = bool(record.get("iscrowd") or record.get("ignore"))
        normalized = {**record, "id": number, "iscrowd": int(is_crowd)}
        if isinstance(record.get("segmentation"), list):
            normalized["segmentation"] = select_outlines(record["segmentation"])
        annotations.append({key: value for key, value in normalized.items() if is_read.get(key, True)})
    images = [{**image, "width": int(image["width"]), "height": int(image["height"])} for image in content["images"]]
    # Digits are categories named by the numbers 0 to 9.
    categories = [{**category, "name": str(category["name"])} for category in content["categories"]]
    return {**content, "images": images, "categories": categories, "annotations": annotations}


def find_box_format_problem(content: Mapping[str, Any]) -> str:
    """Explain why the coordinates cannot be COCO's [x, y, width, height] in pixels, or return an empty string.

    Args:
        content: without bad records.
    """
    sizes = {image["id"]: (image["width"], image["height"]) for image in content["images"]}
    stride = 1 + len(content["annotations"]) // _SAMPLE
    records = content["annotations"][::stride]  # of all parts of a merged file
    boxes = [(*record["bbox"], *sizes[record["image_id"]]) for record in records]
    outlines = [outline for record in records for outline in select_outlines(record.get("segmentation") or ())]
    keypoints = [record["keypoints"] for record in records if are_numbers(record.get("keypoints"))]
    points = [value for record in keypoints for i, value in enumerate(record) if i % 3 < 2]
    for kind, lists in (("boxes", [box[:4] for box in boxes]), ("polygons", outlines), ("keypoints", [points])):
        if 0 < max(chain(*lists), default=0) <= 1:
            remedy = "multiply them by the images' width and height"
            return f"its {kind} lie between 0 and 1, but COCO's are in pixels; {remedy}"
    small = sum(max(box[:4]) <= 1 for box in boxes)
    if small > max(1, len(boxes) / 100):
        problem = f"{small} of {len(boxes)} boxes are smaller than a pixel, with values between 0 and 1"
        return f"{problem}; they look normalized: multiply them by the images' width and height"
    corners = [x < right <= width + 1 and y < low <= height + 1 for x, y, right, low, width, height in boxes]
    outside = [x + w > width + 1 or y + h > height + 1 for x, y, w, h, width, height in boxes]
    if sum(outside) > len(boxes) / 2 and all(corners):
        problem = f"{sum(outside)} of {len(boxes)} boxes end outside their image; they look like [x0, y0, x1, y1]"
        return f"{problem}, and COCO's are [x, y, width, height]: subtract x0 and y0"
    return ""


def _find_box_problem(record: Mapping[str, Any], width: int, height: int, strict: bool) -> str:
    box = record["bbox"]
    area = record.get("area", 0)
    if not are_numbers(box) or len(box) != 4:
        return f"bbox {short(box)} is not [x, y, width, height]"
    if not are_numbers([area]):
        return f"area {short(area)} is not a number"
    x, y, w, h = box
    if min(w, h) < 0 or (strict and min(w, h) == 0):
        return f"box {short(box)} has width {w:g} and height {h:g}"
    is_outside = strict and not (-w < x < width and -h < y < height)
    return f"box {short(box)} lies outside its image, {width} x {height}" if is_outside else ""


def _find_keypoint_problem(record: Mapping[str, Any], count: int) -> str:
    points: Any = record.get("keypoints")
    if points is None:
        return "no keypoints (if no object has any, set MODEL.KEYPOINT_ON False)"
    if not are_numbers(points):
        return f"keypoints {short(points)} are not numbers"
    if len(points) != 3 * count:
        return f"wrong keypoint count: {len(points) / 3:g}, not {count}"
    labeled = sum(visible > 0 for visible in points[2::3])
    if record.get("num_keypoints", labeled) != labeled:
        return f"wrong keypoint count: num_keypoints is {record['num_keypoints']}, but {labeled} are labeled"
    return ""


def _describe(record: Any) -> str:
    if not isinstance(record, dict):
        return short(record)
    image = f" of image {short(record['image_id'])}" if "image_id" in record else ""
    return short(record.get("id", record.get("file_name"))) + image
