"""Conversion of boxes in VOC's XML files and YOLO's text files to one file in COCO's format; images are not copied.

An image and its label file have the same name and the same subfolder, below one folder or below a folder each.
"""

import logging
import math
import os
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml

from pretrain.common.config.yaml_io import load_yaml
from pretrain.common.errors import UserError, one_line, shorten_list
from pretrain.common.images import read_image
from pretrain.data.folders.images import NO_DATA, list_images
from pretrain.data.folders.layout import find_mixed_splits
from transfer.coco.checks.image_sizes import read_upright_size

log = logging.getLogger(__name__)
# Name of the class, box (x, y, width, height in pixels) and further fields of the record.
_Object = tuple[str, list[float], dict[str, Any]]


def read_boxes(labels: Path, images: Path, names: Path | None, *, from_zero: bool = False) -> dict[str, Any]:
    """Return the content of a file in COCO's format.

    Args:
        labels: folder of ``.xml`` files, or of ``.txt`` files if ``names`` is given.
        names: YOLO's ``data.yaml`` with ``names``, or a text file with one name per line. An image without a YOLO label
            file has no objects; an image without a VOC label file is not annotated, and is skipped.
        from_zero: VOC's files have the edges of boxes, in pixels from 0, instead of the first and last pixel from 1.

    Raises:
        UserError: a label file has no image or two, or cannot be read.
    """
    class_names, keypoint_numbers = _read_names(names) if names else ([], 0)
    if len(set(class_names)) < len(class_names):
        raise UserError(f"{names}: two classes have the same name in {class_names}; rename one")
    files = _find_label_files(labels, names)
    photos = _find_images(images, files)
    _, splits = find_mixed_splits(map(os.path.dirname, files)) or ("", [])
    if splits:
        log.warning(f"{' and '.join(splits)} are mixed in one file; to keep them apart, convert each folder by itself")
    records: list[dict[str, Any]] = []
    objects: list[tuple[int, _Object]] = []
    errors: list[str] = []
    for name in sorted(photos if names else files):
        path = str(images / photos[name])
        width, height = read_upright_size(path) or read_image(path).shape[1::-1]
        records.append({"id": len(records) + 1, "file_name": photos[name], "width": width, "height": height})
        if name not in files:
            continue
        try:
            if names:
                image_objects = _read_yolo(files[name], width, height, class_names, keypoint_numbers)
            else:
                image_objects = _read_voc(files[name], width, height, from_zero)
            objects += [(len(records), item) for item in image_objects]
        except UserError as error:
            errors.append(str(error))
    if errors:
        raise UserError(f"{shorten_list(errors)}; correct or remove these files")
    if not names and not objects:
        raise UserError(f"no label file in {labels} has an object, so there are no classes; annotate the images first")
    classes = class_names if names else sorted({label for _, (label, _, _) in objects})
    ids = {label: number for number, label in enumerate(classes, 1)}
    annotations = [
        {"id": number, "image_id": image, "category_id": ids[label], "bbox": box, "area": box[2] * box[3], **more}
        for number, (image, (label, box, more)) in enumerate(objects, 1)
    ]
    categories = [{"id": number, "name": label} for label, number in ids.items()]
    return {"images": records, "annotations": annotations, "categories": categories}


def _find_label_files(labels: Path, names: Path | None) -> dict[str, Path]:
    """Map relative paths without suffix to label files."""
    suffix = ".txt" if names else ".xml"
    files: dict[str, Path] = {}
    for path in sorted(labels.rglob("*")):
        name = path.relative_to(labels)
        is_hidden = any(part[0] == "." or part.lower() in NO_DATA for part in name.parts)
        # LabelImg writes classes.txt next to YOLO's label files.
        is_list = path.name == "classes.txt" or (names and path.samefile(names))
        if path.suffix.lower() == suffix and not (is_hidden or is_list):
            first = files.setdefault(_normalize(str(name.with_suffix(""))), path)
            if first != path:
                raise UserError(f"{first} and {path} are labels of one image; remove one of them")
    if not files:
        raise UserError(f"no {suffix} files in {labels}")
    return files


def _find_images(images: Path, files: dict[str, Path]) -> dict[str, str]:
    """Map relative paths without suffix to the relative paths of images."""
    photos: dict[str, str] = {}
    for name in list_images(images):
        first = photos.setdefault(_normalize(os.path.splitext(name)[0]), name)
        if first != name:
            raise UserError(f"{first} and {name} in {images} share a base name; remove one of them")
    unmatched = [str(path) for name, path in files.items() if name not in photos]
    if unmatched:
        remedy = "pass the images' folder as --images"
        if len(unmatched) < len(files):
            remedy = "add their images, or remove these files"
        raise UserError(f"no image in {images} matches {shorten_list(unmatched)}; {remedy}")
    return photos


def _normalize(name: str) -> str:
    """Return a name in one Unicode form: macOS decomposes letters such as ü."""
    return unicodedata.normalize("NFC", name)


def _read_voc(path: Path, width: int, height: int, from_zero: bool) -> Iterable[_Object]:
    """Yield the boxes of a VOC file; a difficult object is a crowd, which COCO does not score."""
    try:
        root = _parse_voc(path)
        for side, pixels in (("width", width), ("height", height)):
            if float(root.findtext(f"size/{side}") or 0) not in (0, pixels):
                raise ValueError(f"its {side} is not that of its image, {pixels}")
        for node in root.iter("object"):
            name = (node.findtext("name") or "").strip()
            if not name:
                raise ValueError("an object has no name")
            corners = [node.findtext(f"bndbox/{key}") for key in ("xmin", "ymin", "xmax", "ymax")]
            if not all(corners):
                raise ValueError(f"object {name!r} has no bndbox with xmin, ymin, xmax and ymax")
            x0, y0, x1, y1 = map(float, filter(None, corners))
            box = f"box {x0:g} {y0:g} {x1:g} {y1:g}"
            for low, high, side in ((x0, x1, width), (y0, y1, height)):  # some tools write boxes one pixel outside
                if not (0 <= low <= min(high, side) and high <= side + (not from_zero)):
                    raise ValueError(f"{box} is not inside its image, {width} x {height}")
            if min(x0, y0) < 1 and not from_zero:
                raise ValueError(f"{box} begins at 0, but VOC counts pixels from 1; add --from-zero if all files do so")
            if from_zero and not (x0 < x1 and y0 < y1):
                raise ValueError(f"{box} is empty")
            is_difficult = node.findtext("difficult", "").strip().lower() in ("1", "true")  # also 0 and Unspecified
            first = 0 if from_zero else 1  # VOC counts pixels from 1 and includes the last one
            yield name, [x0 - first, y0 - first, x1 - x0 + first, y1 - y0 + first], {"iscrowd": int(is_difficult)}
    except (ElementTree.ParseError, ValueError, LookupError, OSError) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)})") from error


def _parse_voc(path: Path) -> ElementTree.Element:
    """Return the root of a VOC file, with tags in lower case and without namespaces.

    Raises:
        ValueError: it is another kind of XML, or has boxes that are not in objects.
    """
    content = path.read_bytes()
    encoding = re.match(rb"<\?xml[^>]*encoding=[\"']([\w-]+)", content)  # the parser knows few encodings
    root = ElementTree.fromstring(content.decode(encoding[1].decode()) if encoding else content)
    for node in root.iter():
        node.tag = node.tag.rpartition("}")[2].lower()
    if root.tag != "annotation":
        raise ValueError(f"its root is <{root.tag}>, not VOC's <annotation>")
    if root.find(".//bndbox") is not None and root.find(".//object") is None:
        raise ValueError("its boxes are not in an <object>")
    return root


def _read_yolo(path: Path, width: int, height: int, classes: list[str], keypoint_numbers: int) -> Iterable[_Object]:
    """Yield the boxes and outlines of a YOLO file.

    A line is a class and a box (x y width height) or an outline (x y x y x y ...), relative to the image's width and
    height. ``keypoint_numbers`` numbers may follow a box; they are skipped.
    """
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            label, *values = map(float, line.split())
            if keypoint_numbers and len(values) == 4 + keypoint_numbers:
                del values[4:]
            is_outline = not keypoint_numbers and len(values) >= 6 and len(values) % 2 == 0
            is_outline = is_outline and all(min(values[axis::2]) < max(values[axis::2]) for axis in (0, 1))
            is_box = len(values) == 4 and min(values[2:]) > 0
            is_inside = all(-0.001 < value < 1.001 for value in values)
            if label not in range(len(classes)) or not (is_box or is_outline) or not is_inside:
                raise ValueError
        except ValueError:
            form = "a box or an outline relative to the image (x y width height, or x y x y x y ...)"
            what = f"{path}, line {number}: {line.strip()[:60]!r} is not a class below {len(classes)} and {form}"
            raise UserError(f"{what}; {_advise(line, len(classes), keypoint_numbers)}") from None
        xs = [x * width for x in values[::2]]
        ys = [y * height for y in values[1::2]]
        if is_box:
            box = [xs[0] - xs[1] / 2, ys[0] - ys[1] / 2, xs[1], ys[1]]
            yield classes[int(label)], box, {"iscrowd": 0}
        else:
            outline = [value for point in zip(xs, ys, strict=True) for value in point]
            box = [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]
            yield classes[int(label)], box, {"iscrowd": 0, "segmentation": [outline]}


def _advise(line: str, classes: int, keypoint_numbers: int) -> str:
    """Say what to do about a line that is none of YOLO's."""
    if "," in line:
        return "separate its numbers by blanks, with a point before decimals"
    try:
        label, *values = map(float, line.split())
    except ValueError:
        return "write a line of numbers for each object"
    if label not in range(classes):
        return f"number the classes from 0 to {classes - 1}, as --names does"
    if len(values) == 5 and not keypoint_numbers:
        return "if the sixth number is a confidence, these are predictions; remove it to use them as labels"
    if len(values) != 4 and (len(values) < 6 or len(values) % 2 or keypoint_numbers):
        return "pose needs kpt_shape in --names"
    if max(values) >= 2:
        return "divide pixels by the width and height of the image"
    return "correct its numbers, which are from 0 to 1, or remove an object without an area"


def _read_names(path: Path) -> tuple[list[str], int]:
    """Return the names of the classes, and how many numbers of keypoints follow each box."""
    text = _read_text(path)
    suffix = path.suffix.lower()
    if suffix not in (".yaml", ".yml", ".json", ".txt", ".names", ""):
        raise UserError(f"{path} is no list of names: pass data.yaml, or a .txt file with one name per line")
    if suffix not in (".yaml", ".yml", ".json"):  # JSON is YAML
        lines = [line.strip() for line in text.strip().splitlines()]
        if "" in lines:
            raise UserError(f"{path}: line {lines.index('') + 1} is empty, but class {lines.index('')} needs a name")
        return lines, 0
    try:
        content = load_yaml(text)
        names = content["names"]
        if isinstance(names, dict) and set(names) != set(range(len(names))):
            raise TypeError(f"its numbers of classes are {shorten_list([*map(repr, names)])}; number them 0, 1, ...")
        if isinstance(names, str) or any(isinstance(names[index], bool) for index in range(len(names))):
            raise TypeError(f"names is {names}; write a list, and yes, no, on and off in quotes")
        class_names = [str(names[index]).strip() for index in range(len(names))]
        without_name = [
            index
            for index, name in enumerate(class_names)
            if not name or not isinstance(names[index], str | int | float)
        ]
        if without_name:
            raise TypeError(f"class {without_name[0]} has no name")
        number = content.get("nc")
        if number is not None and str(number) != str(len(class_names)):
            raise TypeError(f"nc is {number}, but names has {len(class_names)}: {shorten_list(class_names)}")
        return class_names, math.prod(content.get("kpt_shape", [0]))
    except (yaml.YAMLError, LookupError, TypeError, UserError) as error:
        raise UserError(f"{path} has no list of one name per class ({one_line(error)})") from error


def _read_text(path: Path) -> str:
    """Read text in UTF-8, with or without the byte-order mark that Windows writes."""
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8 ({one_line(error)}); save it as UTF-8") from error
