"""Boxes of VOC's XML files and YOLO's text files as one file in COCO's format; images stay where they are.

An image and its file of boxes have the same name and lie in the same subfolder, of their own folders or of one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml
from PIL import ExifTags, Image

from pretrain.common.config_io import load_yaml
from pretrain.common.errors import UserError, one_line, shortlist
from pretrain.data.folders import images_below

_Object = tuple[Any, list[float], dict[str, Any]]  # class (VOC: its name, YOLO: its number), [x, y, w, h], other fields


def read_boxes(labels: Path, images: Path, names: Path | None) -> dict[str, Any]:
    """The content of a file in COCO's format.

    Args:
        labels: of ``.xml`` files, or with ``names`` of ``.txt`` files.
        names: YOLO's ``data.yaml`` with ``names``, or a text file of one name per line. YOLO's images without a file of
            boxes are images without objects; VOC's are not annotated, and left out.

    Raises:
        UserError: a file of boxes without its image or with two, or one that cannot be read.
    """
    classes = dict(enumerate(_names(names))) if names else {}
    suffix = ".txt" if names else ".xml"
    paths = [path for path in labels.rglob(f"*{suffix}") if not (names and path.samefile(names))]
    paths = [path for path in paths if path.name != "classes.txt"]  # LabelImg's, next to YOLO's boxes
    files = {str(path.relative_to(labels).with_suffix("")): path for path in sorted(paths)}
    photos: dict[str, str] = {}
    for name in images_below(images):
        if name != (other := photos.setdefault(os.path.splitext(name)[0], name)):
            raise UserError(f"{other} and {name} in {images} have one name; leave one of them")
    if lost := [str(path) for name, path in files.items() if name not in photos]:
        raise UserError(f"no image in {images} is named as {shortlist(lost)}; --images is the folder of their images")
    if not files:
        raise UserError(f"no {suffix} files in {labels}")
    records: list[dict[str, Any]] = []
    objects: list[tuple[int, _Object]] = []
    for name in sorted(photos if names else files):
        width, height = _size(images / photos[name])
        records.append({"id": len(records) + 1, "file_name": photos[name], "width": width, "height": height})
        if name in files:
            read = _yolo(files[name], width, height, len(classes)) if names else _voc(files[name], width, height)
            objects += [(len(records), item) for item in read]
    classes = classes or {name: name for name in sorted({item[0] for _, item in objects})}
    ids = {key: number for number, key in enumerate(classes, 1)}
    annotations = [
        {"id": number, "image_id": image, "category_id": ids[key], "bbox": box, "area": box[2] * box[3], **more}
        for number, (image, (key, box, more)) in enumerate(objects, 1)
    ]
    categories = [{"id": ids[key], "name": name} for key, name in classes.items()]
    return {"images": records, "annotations": annotations, "categories": categories}


def _voc(path: Path, width: int, height: int) -> Iterable[_Object]:
    """VOC counts pixels from 1, the last one included. A difficult object is a crowd, which COCO does not score."""
    try:
        root = ElementTree.parse(path).getroot()
        for side, value in (("width", width), ("height", height)):
            if int(root.findtext(f"size/{side}") or 0) not in (0, value):
                raise ValueError(f"its {side} is not that of its image, {value}")
        for node in root.iter("object"):
            x0, y0, x1, y1 = (float(node.findtext(f"bndbox/{key}") or "") for key in ("xmin", "ymin", "xmax", "ymax"))
            spans = (x0, x1, width), (y0, y1, height)  # a pixel beyond each edge is a habit of some tools
            if not all(0 <= low <= min(high, side) and 1 <= high <= side + 1 for low, high, side in spans):
                raise ValueError(f"box {x0:g} {y0:g} {x1:g} {y1:g} is not inside its image, {width} x {height}")
            crowd = {"iscrowd": int(node.findtext("difficult") or 0)}
            yield str(node.findtext("name")).strip(), [x0 - 1, y0 - 1, x1 - x0 + 1, y1 - y0 + 1], crowd
    except (ElementTree.ParseError, ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)}); correct it or remove it") from error


def _yolo(path: Path, width: int, height: int, classes: int) -> Iterable[_Object]:
    """A line is a class and a box (center, size) or an outline (x y x y x y ...), as shares of the image's sides."""
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            label, *values = map(float, line.split())
            is_box_or_outline = len(values) == 4 or (len(values) >= 6 and len(values) % 2 == 0)
            if label not in range(classes) or not is_box_or_outline or not all(-0.001 < v < 1.001 for v in values):
                raise ValueError
        except ValueError:
            raise UserError(
                f"{path}, line {number}: {line.strip()[:60]!r} is not a class below {classes} and a box or an outline "
                "in shares of the image (x y width height, or x y x y x y ...)"
            ) from None
        xs, ys = [x * width for x in values[::2]], [y * height for y in values[1::2]]
        if len(values) == 4:
            yield int(label), [xs[0] - xs[1] / 2, ys[0] - ys[1] / 2, xs[1], ys[1]], {"iscrowd": 0}
            continue
        outline = [value for point in zip(xs, ys, strict=True) for value in point]
        box = [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]
        yield int(label), box, {"iscrowd": 0, "segmentation": [outline]}


def _names(path: Path) -> list[str]:
    text = path.read_text(errors="replace")
    if path.suffix not in (".yaml", ".yml"):
        return [line.strip() for line in text.splitlines() if line.strip()]
    try:
        names = load_yaml(text)["names"]
        return [str(names[index]) for index in range(len(names))]
    except (yaml.YAMLError, LookupError, TypeError, UserError) as error:
        raise UserError(f"{path} has no list of names, or one with gaps ({one_line(error)})") from error


def _size(path: Path) -> tuple[int, int]:
    """Width and height of an image as detectors read it: turned as its EXIF data say."""
    try:
        with Image.open(path) as image:
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
            return (image.height, image.width) if turned else (image.width, image.height)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"image {path} cannot be read ({one_line(error)}); restore it or remove it") from error
