"""Boxes of VOC's XML files and YOLO's text files as one file in COCO's format; images stay where they are.

An image and its file of boxes have the same name and lie in the same subfolder, of their own folders or of one.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml

from pretrain.common.config.yaml_io import load_yaml
from pretrain.common.errors import UserError, one_line, shorten_list
from pretrain.common.images import open_upright
from pretrain.data.folders import images_below
from transfer.coco.check import read_upright_size

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
    listed, points = _names(names) if names else ([], 0)
    classes = dict(enumerate(listed))
    if len({*listed}) < len(listed):
        raise UserError(f"{names}: two classes have one name in {listed}; rename one")
    suffix = ".txt" if names else ".xml"
    paths = [path for path in labels.rglob(f"*{suffix}") if not (names and path.samefile(names))]
    paths = [path for path in paths if path.name != "classes.txt"]  # LabelImg's, next to YOLO's boxes
    files = {str(path.relative_to(labels).with_suffix("")): path for path in sorted(paths)}
    photos: dict[str, str] = {}
    for name in images_below(images):
        if name != (other := photos.setdefault(os.path.splitext(name)[0], name)):
            raise UserError(f"{other} and {name} in {images} have one name; leave one of them")
    if lost := [str(path) for name, path in files.items() if name not in photos]:
        raise UserError(
            f"no image in {images} is named as {shorten_list(lost)}; --images is the folder of their images"
        )
    if not files:
        raise UserError(f"no {suffix} files in {labels}")
    records: list[dict[str, Any]] = []
    objects: list[tuple[int, _Object]] = []
    bad: list[str] = []
    for name in sorted(photos if names else files):
        path = str(images / photos[name])
        width, height = read_upright_size(path) or open_upright(path).size
        records.append({"id": len(records) + 1, "file_name": photos[name], "width": width, "height": height})
        if name not in files:
            continue
        place = files[name], width, height
        try:
            read = _yolo(*place, len(classes), points) if names else _voc(*place)
            objects += [(len(records), item) for item in read]
        except UserError as error:
            bad.append(str(error))
    if bad:
        raise UserError(f"{shorten_list(bad)}; correct or remove what is named")
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
        content = path.read_bytes()
        declared = re.match(rb"<\?xml[^>]*encoding=[\"']([\w-]+)", content)  # the parser knows few encodings
        root = ElementTree.fromstring(content.decode(declared[1].decode()) if declared else content)
        for side, value in (("width", width), ("height", height)):
            if float(root.findtext(f"size/{side}") or 0) not in (0, value):
                raise ValueError(f"its {side} is not that of its image, {value}")
        for node in root.iter("object"):
            x0, y0, x1, y1 = (float(node.findtext(f"bndbox/{key}") or "") for key in ("xmin", "ymin", "xmax", "ymax"))
            spans = (x0, x1, width), (y0, y1, height)  # a pixel beyond each edge is a habit of some tools
            if not all(0 <= low <= min(high, side) and 1 <= high <= side + 1 for low, high, side in spans):
                raise ValueError(f"box {x0:g} {y0:g} {x1:g} {y1:g} is not inside its image, {width} x {height}")
            if not (name := (node.findtext("name") or "").strip()):
                raise ValueError("an object has no name")
            is_difficult = node.findtext("difficult", "").strip().lower() in ("1", "true")  # or 0, Unspecified
            yield name, [x0 - 1, y0 - 1, x1 - x0 + 1, y1 - y0 + 1], {"iscrowd": int(is_difficult)}
    except (ElementTree.ParseError, ValueError, LookupError, OSError) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)})") from error


def _yolo(path: Path, width: int, height: int, classes: int, points: int) -> Iterable[_Object]:
    """A line is a class and a box (center, size) or an outline (x y x y x y ...), as shares of the image's sides.

    In pose labels, ``points`` numbers follow the box, and are left out.
    """
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            label, *values = map(float, line.split())
            if points and len(values) == 4 + points:
                del values[4:]
            is_outline = not points and len(values) >= 6 and len(values) % 2 == 0
            is_box = len(values) == 4 and min(values[2:]) > 0
            if label not in range(classes) or not (is_box or is_outline) or not all(-0.001 < v < 1.001 for v in values):
                raise ValueError
        except ValueError:
            raise UserError(
                f"{path}, line {number}: {line.strip()[:60]!r} is not a class below {classes} and a box or an outline "
                "in shares of the image (x y width height, or x y x y x y ...); pose needs kpt_shape in --names"
            ) from None
        xs, ys = [x * width for x in values[::2]], [y * height for y in values[1::2]]
        if len(values) == 4:
            yield int(label), [xs[0] - xs[1] / 2, ys[0] - ys[1] / 2, xs[1], ys[1]], {"iscrowd": 0}
            continue
        outline = [value for point in zip(xs, ys, strict=True) for value in point]
        box = [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]
        yield int(label), box, {"iscrowd": 0, "segmentation": [outline]}


def _names(path: Path) -> tuple[list[str], int]:
    """The classes' names, and how many numbers of keypoints follow each box."""
    text = path.read_text(errors="replace")
    if path.suffix not in (".yaml", ".yml"):
        return [line.strip() for line in text.splitlines() if line.strip()], 0
    try:
        content = load_yaml(text)
        names = content["names"]
        return [str(names[index]) for index in range(len(names))], math.prod(content.get("kpt_shape", [0]))
    except (yaml.YAMLError, LookupError, TypeError, UserError) as error:
        raise UserError(f"{path} has no list of names, or one with gaps ({one_line(error)})") from error
