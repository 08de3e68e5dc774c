"""Split of a COCO file into train and val with equal proportions of the classes, and random subsets of its images."""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from pretrain.common.errors import UserError, one_line, shorten_list
from transfer.coco.checks.bad_records import Rules, drop_bad, find_box_format_problem, find_problems

from .groups import read_groups, warn_of_groups, warn_of_obvious_groups
from .stratify import stratify

log = logging.getLogger(__name__)


def write_split(
    folder: Path, content: dict[str, Any], val: int | float, seed: int, images: str, group_by: str | None = None
) -> None:
    """Write ``train.json`` and ``val.json`` with whole records and the file's other sections.

    Args:
        content: content of a file in COCO's format.
        val: number of the images, or their fraction as a float; with groups, val comes as close as they allow.
        images: folder of the images; if empty, their files are not checked.
        group_by: what keeps images together (see `read_groups`).

    Raises:
        UserError: an image or category is bad, an annotation names an unknown one, boxes have another format, no
            image is left for train or val, or as `read_groups`.
    """
    records = content["images"]
    problems = list(find_problems(content, images or None, Rules()))
    severe = [problem.text for problem in problems if problem.section != "annotations"]
    if severe:
        raise UserError(f"{shorten_list(severe)}; fix them, then split")
    wrong_format = find_box_format_problem(drop_bad(content, problems))
    if wrong_format:
        raise UserError(wrong_format)
    classes_of = _list_classes(content)
    count = val if isinstance(val, int) else round(val * len(records))
    if not 0 < count < len(records):
        raise UserError(f"--val {val:g} of {len(records)} images must leave at least one image for train and for val")
    group_of = read_groups(records, group_by) if group_by else None
    val_images = stratify(classes_of, count, seed, group_of)
    splits: dict[str, dict[str, Any]] = {}
    for name in ("train", "val"):
        images_of_split = [image for image in records if (image["id"] in val_images) == (name == "val")]
        boxes = [box for box in content["annotations"] if (box["image_id"] in val_images) == (name == "val")]
        splits[name] = {**content, "images": images_of_split, "annotations": boxes}
        (folder / f"{name}.json").write_text(json.dumps(splits[name]))
    print_counts({"all": content, **splits}, group_of)
    if group_of:
        names = {category["id"]: str(category["name"]) for category in content["categories"]}
        warn_of_groups(classes_of, names, group_of, val_images, count)
    else:
        warn_of_obvious_groups(records)


def _list_classes(content: Mapping[str, Any]) -> dict[Any, set[Any]]:
    """Map the id of each image to its classes."""
    classes_of: dict[Any, set[Any]] = {image["id"]: set() for image in content["images"]}
    categories = {category["id"] for category in content["categories"]}
    for box in content["annotations"]:
        image = box.get("image_id")
        category = box.get("category_id")
        if image not in classes_of or category not in categories:
            problem = f"annotation {box.get('id')}: unknown image {image!r} or category {category!r}"
            raise UserError(f"{problem}; correct it (ids are all numbers, or all text)")
        classes_of[image].add(category)
    return classes_of


def print_counts(contents: Mapping[str, Mapping[str, Any]], group_of: Mapping[Any, str] | None = None) -> None:
    """Print a table of the boxes of each class, all boxes, images and groups of each of these files' contents."""
    counts = [Counter(box["category_id"] for box in content["annotations"]) for content in contents.values()]
    categories: Sequence[Any] = next(iter(contents.values()))["categories"]
    rows = [[category["name"], *(counter[category["id"]] for counter in counts)] for category in categories]
    rows.append(["all boxes", *(counter.total() for counter in counts)])
    crowds = [sum(bool(box.get("iscrowd")) for box in content["annotations"]) for content in contents.values()]
    if any(crowds):
        rows.append(["of them crowds", *crowds])
    rows.append(["images", *(len(content["images"]) for content in contents.values())])
    if group_of:
        names = [{group_of[image["id"]] for image in content["images"]} for content in contents.values()]
        rows.append(["groups", *map(len, names)])
    print(tabulate(rows, ["boxes", *contents]))


def write_subsets(
    folder: Path, content: dict[str, Any], percents: Sequence[float], folds: int, seed: int, published: Path | None
) -> None:
    """Write ``<percent>pct_fold<n>.json`` for every percentage and fold, each with the annotations of its images.

    A fold is one order of all images, drawn uniformly from (seed, fold); a subset consists of its first images.
    Therefore the images of 1% are among those of 2% of the same fold. Images without annotations are drawn as well.

    Args:
        content: content of a file in COCO's format.
        percents: percentages of the images; the number of images is rounded to the nearest integer.
        published: list of positions that replaces the random draws, in the format of Unbiased Teacher's
            COCO_supervision.txt: ``{"1.0": {"0": [positions]}}``, percentage -> fold -> positions. They count the
            images with annotations other than crowds in the order of their ids, as Detectron2 loads them; the number
            of images is rounded down.

    Raises:
        UserError: a record is bad, a percentage is out of range, a subset has no image, or the list does not contain
            it or is made for other images.
    """
    problems = find_problems(content, None, Rules(strict=False))
    if problems:
        raise UserError(f"{shorten_list([problem.text for problem in problems])}; fix them, then draw subsets")
    images = sorted(content["images"], key=lambda image: image["id"])
    if published:
        annotated = {record["image_id"] for record in content["annotations"] if not record.get("iscrowd")}
        images = [image for image in images if image["id"] in annotated]
    sections = {name: value for name, value in content.items() if name not in ("images", "annotations")}
    rows = []
    for fold in range(folds):
        order = np.random.default_rng([seed, fold]).permutation(len(images)).tolist()
        for percent in percents:
            if not 0 < percent < 100:
                raise UserError(f"--percent is {percent:g}; use values between 0 and 100")
            count = round(len(images) * percent / 100)
            if not (count or published):
                raise UserError(f"{percent:g}% of {len(images)} images is zero images; use a larger percentage")
            positions = _read_positions(published, percent, fold, len(images)) if published else order[:count]
            subset = [images[position] for position in sorted(positions)]
            ids = {image["id"] for image in subset}
            # Two boxes of COCO's train2017 have no height: no detector is trained on them.
            records = [record for record in content["annotations"] if record["image_id"] in ids]
            annotations = [record for record in records if 0 not in record["bbox"][2:]]
            name = f"{percent:g}pct_fold{fold}.json"
            (folder / name).write_text(json.dumps({**sections, "images": subset, "annotations": annotations}))
            rows.append([name, len(subset), len(annotations)])
    print(tabulate(rows, ["file", "images", "annotations"]))


def _read_positions(published: Path, percent: float, fold: int, images: int) -> list[int]:
    try:
        positions = json.loads(published.read_text())[str(float(percent))][str(fold)]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{published} has no list for {percent:g}%, fold {fold} ({one_line(error)})") from error
    if len(set(positions)) != int(percent / 100 * images) or max(positions, default=0) >= images:
        what = f"{len(positions)} positions for {percent:g}% of {images} images with annotations"
        raise UserError(f"{published} does not fit: {what}; pass the list of these annotations")
    return positions
