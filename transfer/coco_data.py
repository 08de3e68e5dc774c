"""Data sets in COCO's format: standard names, or any other by two paths; a checker that names bad records.

A name in DATASETS.TRAIN or DATASETS.TEST is one of COCO's (`coco_2017_train`, ..., under ``$DETECTRON2_DATASETS`` or
``datasets``), or `coco:ANNOTATIONS.json:IMAGE_FOLDER`. Bad records of the latter end the run before it starts;
`coco:ANNOTATIONS.json:IMAGE_FOLDER:skip_bad` leaves them out and says how many.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from pretrain.common.errors import UserError, nearest
from pretrain.common.run_folder import atomic_write

_SECTIONS = ("images", "annotations", "categories")
_SPLITS = {  # name: (image folder, annotations), under the root's coco/; Detectron2's names
    f"{prefix}coco_{year}_{split}": (f"{split}{year}", f"annotations/{kind}_{split}{year}.json")
    for prefix, kind in (("", "instances"), ("keypoints_", "person_keypoints"))
    for year in ("2014", "2017")
    for split in ("train", "val")
}


@dataclass(frozen=True)
class CocoSet:
    """Where a data set stands, and what to do with its bad records (COCO's own releases are not checked)."""

    annotations: Path
    images: Path
    standard: bool
    skip_bad: bool = False


@dataclass(frozen=True)
class Problem:
    """A bad record: ``content[section][index]``, and what is wrong with it."""

    section: str
    index: int
    text: str


def find(name: str) -> CocoSet:
    """The data set of a name in DATASETS.TRAIN or DATASETS.TEST.

    Raises:
        UserError: unknown name, or files that are not where they are expected.
    """
    if name.startswith("coco:"):
        words = name.split(":")
        if len(words) not in (3, 4) or not all(words) or words[3:] not in ([], ["skip_bad"]):
            raise UserError(f"data set {name!r} is not coco:ANNOTATIONS.json:IMAGE_FOLDER or ...:skip_bad")
        found = CocoSet(Path(words[1]), Path(words[2]), standard=False, skip_bad=len(words) == 4)
        hint = ""
    elif name in _SPLITS:
        root = Path(os.environ.get("DETECTRON2_DATASETS", "datasets"))
        images, annotations = _SPLITS[name]
        found = CocoSet(root / "coco" / annotations, root / "coco" / images, standard=True)
        hint = f" of {name}; COCO's annotations/ and {images}/ belong into {root / 'coco'}; or set DETECTRON2_DATASETS"
    else:
        known = ", ".join(_SPLITS)
        raise UserError(
            f"data set {name!r} is not coco:ANNOTATIONS.json:IMAGE_FOLDER nor {known}{nearest(name, _SPLITS)}"
        )
    if not found.annotations.is_file():
        raise UserError(f"no annotation file at {found.annotations}{hint}")
    if not found.images.is_dir():
        raise UserError(f"no image folder at {found.images}{hint}")
    return found


def resolve(name: str) -> tuple[Path, Path]:
    """The annotation file and the image folder of a name in DATASETS.TRAIN or DATASETS.TEST (see `find`)."""
    found = find(name)
    return found.annotations, found.images


def folder_name(name: str) -> str:
    """A short name for files about a data set."""
    return find(name).annotations.stem if name.startswith("coco:") else name


def prepare(cfg: CfgNode, log: Callable[[str], None] = print) -> CfgNode:
    """Finds and checks every data set of a config before the first iteration.

    Returns:
        ``cfg``; where records were left out, the data set's name leads to a copy without them in OUTPUT_DIR/datasets.

    Raises:
        UserError: no such data set, bad records (unless they may be left out), another number of categories.
    """
    cfg = cfg.clone()
    cfg.defrost()
    done: dict[str, str] = {}
    for name in dict.fromkeys((*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)):
        done[name] = _prepare_one(name, cfg, log)
    cfg.DATASETS.TRAIN = tuple(done[name] for name in cfg.DATASETS.TRAIN)
    cfg.DATASETS.TEST = tuple(done[name] for name in cfg.DATASETS.TEST)
    cfg.freeze()
    return cfg


def _prepare_one(name: str, cfg: CfgNode, log: Callable[[str], None]) -> str:
    found = find(name)
    classes = cfg.MODEL.ROI_HEADS.NUM_CLASSES
    if found.standard:
        _check_count(1 if name.startswith("keypoints_") else 80, classes, name)
        return name
    content = read(found.annotations)
    keypoints = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS if cfg.MODEL.KEYPOINT_ON else 0
    problems = list(check(content, found.images, masks=cfg.MODEL.MASK_ON, keypoints=keypoints))
    if problems and not found.skip_bad:
        shown = "; ".join(problem.text for problem in problems[:5])
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError(f"{found.annotations}: {shown}{more}; mend them, or add :skip_bad to leave these records out")
    if problems:
        content = leave_out(content, problems)
        target = Path(cfg.OUTPUT_DIR) / "datasets" / f"{found.annotations.stem}_checked.json"
        atomic_write(target, json.dumps(content))
        counts = Counter(problem.section for problem in problems)
        log(
            f"{found.annotations}: left out bad records: "
            + ", ".join(f"{n} {section}" for section, n in counts.items())
        )
        for problem in problems[:20]:
            log(f"  {problem.text}")
        name = f"coco:{target}:{found.images}"
    _check_count(len(content["categories"]), classes, str(found.annotations))
    return name


def read(annotations: str | Path) -> dict[str, Any]:
    """The content of a COCO annotation file.

    Raises:
        UserError: missing, not JSON, or without images, annotations and categories.
    """
    try:
        content = json.loads(Path(annotations).read_text())
    except OSError as error:
        raise UserError(f"cannot read {annotations}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{annotations} is not JSON: {error}") from error
    for section in _SECTIONS:
        if not isinstance(content, dict) or not isinstance(content.get(section), list):
            raise UserError(f"{annotations} has no list of {section}; COCO's format has {', '.join(_SECTIONS)}")
    return content


def check(
    content: Mapping[str, Any], images: str | Path, *, masks: bool = True, keypoints: int = 0
) -> Iterator[Problem]:
    """Every bad record of a data set, once, in the file's order.

    Args:
        content: what `read` returns.
        images: folder that the images' ``file_name`` are relative to.
        masks: objects without a mask are bad, too.
        keypoints: objects need so many; 0: objects may have as many as their category names.
    """
    sizes: dict[Any, tuple[float, float]] = {}
    for index, image in enumerate(content["images"]):
        text = _image_problem(image, Path(images), sizes)
        if text:
            yield Problem("images", index, f"image {image.get('id')}: {text}")
        else:
            sizes[image["id"]] = (image["width"], image["height"])
    points: dict[Any, int] = {}
    for index, category in enumerate(content["categories"]):
        if category.get("id") in points or "id" not in category or not category.get("name"):
            what = "duplicate id" if category.get("id") in points else "no id or no name"
            yield Problem("categories", index, f"category {category.get('id')}: {what}")
        else:
            points[category["id"]] = keypoints or len(category.get("keypoints", ()))
    image_ids = {image.get("id") for image in content["images"]}
    seen: set[Any] = set()
    for index, record in enumerate(content["annotations"]):
        if record.get("image_id") in image_ids and record.get("image_id") not in sizes:
            continue  # its image is named already, and goes with it
        text = _annotation_problem(record, seen, sizes, points, masks, keypoints > 0)
        seen.add(record.get("id"))
        if text:
            yield Problem(
                "annotations", index, f"annotation {record.get('id')} of image {record.get('image_id')}: {text}"
            )


def leave_out(content: Mapping[str, Any], problems: Sequence[Problem]) -> dict[str, Any]:
    """``content`` without the bad records, and without the annotations of an image or category that is gone."""
    bad = {(problem.section, problem.index) for problem in problems}
    kept = {s: [r for i, r in enumerate(content[s]) if (s, i) not in bad] for s in _SECTIONS}
    images, categories = ({record["id"] for record in kept[s]} for s in ("images", "categories"))
    alive = [r for r in kept["annotations"] if r["image_id"] in images and r["category_id"] in categories]
    return {**content, **kept, "annotations": alive}


def _image_problem(image: Mapping[str, Any], folder: Path, seen: Mapping[Any, Any]) -> str:
    if "id" not in image:
        return f"no id (file_name {image.get('file_name')!r})"
    if image["id"] in seen:
        return "duplicate id"
    if not all(isinstance(image.get(side), (int, float)) and image[side] > 0 for side in ("width", "height")):
        return f"width {image.get('width')} and height {image.get('height')}"
    if not image.get("file_name") or not (folder / image["file_name"]).is_file():
        return f"missing image {folder / str(image.get('file_name'))}"
    return ""


def _annotation_problem(
    record: Mapping[str, Any],
    seen: set[Any],
    sizes: Mapping[Any, tuple[float, float]],
    points: Mapping[Any, int],
    masks: bool,
    needs_keypoints: bool,
) -> str:
    if record.get("id") in seen or "id" not in record:
        return "duplicate id" if "id" in record else "no id"
    if record.get("image_id") not in sizes:
        return "unknown image"
    if record.get("category_id") not in points:
        return f"unknown category {record.get('category_id')}"
    width, height = sizes[record["image_id"]]
    box: Any = record.get("bbox")
    if not _numbers(box) or len(box) != 4:
        return f"box {box} is not [x, y, width, height]"
    x, y, w, h = box
    if w <= 0 or h <= 0:
        return f"box {box} has no area"
    if x < -1 or y < -1 or x + w > width + 1 or y + h > height + 1:  # COCO's own boxes overhang by less than a pixel
        return f"box {box} is outside the image of {width} x {height}"
    text = _mask_problem(record.get("segmentation"), width, height, masks)
    return text or _keypoint_problem(record, points[record["category_id"]], needs_keypoints)


def _mask_problem(mask: Any, width: float, height: float, needed: bool) -> str:
    if not mask:
        return "empty polygon or no mask" if needed else ""
    if isinstance(mask, dict):
        size = mask.get("size")
        return "" if size == [height, width] and "counts" in mask else f"RLE mask of size {size}, not {[height, width]}"
    for polygon in mask:
        if not _numbers(polygon) or len(polygon) < 6 or len(polygon) % 2:
            return (
                f"empty polygon (it has {len(polygon) if isinstance(polygon, list) else 0} numbers, at least 6 needed)"
            )
    return ""


def _keypoint_problem(record: Mapping[str, Any], wanted: int, needed: bool) -> str:
    keypoints = record.get("keypoints")
    if keypoints is None:
        return "no keypoints" if needed else ""
    if not _numbers(keypoints) or len(keypoints) != 3 * wanted:
        return f"wrong keypoint count: {len(keypoints) / 3:g}, not {wanted}"
    labelled = sum(visible > 0 for visible in keypoints[2::3])
    if record.get("num_keypoints", labelled) != labelled:
        return f"wrong keypoint count: num_keypoints is {record['num_keypoints']}, but {labelled} are labelled"
    return ""


def _numbers(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(v, (int, float)) and math.isfinite(v) for v in values)


def _check_count(categories: int, num_classes: int, where: str) -> None:
    if categories != num_classes:
        raise UserError(
            f"{where} has {categories} categories; set MODEL.ROI_HEADS.NUM_CLASSES {categories}, not {num_classes}"
        )
