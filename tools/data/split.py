"""Split of one COCO file into train and val by image, with equal proportions of the classes."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from pretrain.common.errors import UserError, shorten_list
from transfer.coco.check import Rules, drop_bad, find_box_format_problem, find_problems


def write_split(folder: Path, content: dict[str, Any], val: int | float, seed: int, images: str) -> None:
    """Write ``train.json`` and ``val.json`` with whole records and the file's other sections.

    Args:
        content: content of a file in COCO's format.
        val: number of the images, or their fraction as a float.
        images: folder of the images; if empty, their files are not checked.

    Raises:
        UserError: an image or category is bad, an annotation names an unknown one, boxes have another format, or no
            image is left for train or val.
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
    val_images = stratify(classes_of, count, seed)
    splits: dict[str, dict[str, Any]] = {}
    for name in ("train", "val"):
        images_of_split = [image for image in records if (image["id"] in val_images) == (name == "val")]
        boxes = [box for box in content["annotations"] if (box["image_id"] in val_images) == (name == "val")]
        splits[name] = {**content, "images": images_of_split, "annotations": boxes}
        (folder / f"{name}.json").write_text(json.dumps(splits[name]))
    print_counts({"all": content, **splits})


def _list_classes(content: Mapping[str, Any]) -> dict[Any, set[Any]]:
    """Map the id of each image to its classes."""
    classes_of: dict[Any, set[Any]] = {image["id"]: set() for image in content["images"]}
    categories = {category["id"] for category in content["categories"]}
    for box in content["annotations"]:
        image = box.get("image_id")
        category = box.get("category_id")
        if image not in classes_of or category not in categories:
            raise UserError(f"annotation {box.get('id')}: unknown image {image!r} or category {category!r}")
        classes_of[image].add(category)
    return classes_of


def stratify(classes_of: Mapping[Hashable, set[Any]], count: int, seed: int) -> set[Any]:
    """Choose ``count`` images for val by iterative stratification (Sechidis et al., ECML PKDD 2011, Algorithm 1).

    The class with the fewest remaining images comes next. Each of these, in an order drawn from ``seed``, goes to the
    split that lacks most images of this class, among equals to the split that lacks most images, and never to a full
    split. A split lacks its fraction of the class's images minus those that it has. Images without a class come last.
    """
    images = list(classes_of)
    order = [images[position] for position in np.random.default_rng(seed).permutation(len(images))]
    images_of: dict[Any, list[Any]] = defaultdict(list)
    for image in order:
        for label in classes_of[image]:
            images_of[label].append(image)
    remaining = {label: len(images_of[label]) for label in sorted(images_of)}
    room = [len(order) - count, count]  # images that train and val can still take
    lacking = {label: [total * size / len(order) for size in room] for label, total in remaining.items()}
    split_of: dict[Any, int] = {}
    while remaining:
        rarest = min(remaining, key=lambda label: remaining[label])
        for image in images_of[rarest]:
            if image not in split_of:
                split = max((0, 1), key=lambda split: (room[split] > 0, lacking[rarest][split], room[split]))
                split_of[image] = split
                room[split] -= 1
                for label in classes_of[image] & remaining.keys():
                    lacking[label][split] -= 1
                    remaining[label] -= 1
        del remaining[rarest]
    without_class = [image for image in order if image not in split_of]
    return {image for image, split in split_of.items() if split} | set(without_class[: room[1]])


def print_counts(contents: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a table of the boxes of each class, all boxes and the images of each of these files' contents."""
    counts = [Counter(box["category_id"] for box in content["annotations"]) for content in contents.values()]
    categories: Sequence[Any] = next(iter(contents.values()))["categories"]
    rows = [[category["name"], *(counter[category["id"]] for counter in counts)] for category in categories]
    rows.append(["all boxes", *(counter.total() for counter in counts)])
    crowds = [sum(bool(box.get("iscrowd")) for box in content["annotations"]) for content in contents.values()]
    if any(crowds):
        rows.append(["of them crowds", *crowds])
    rows.append(["images", *(len(content["images"]) for content in contents.values())])
    print(tabulate(rows, ["boxes", *contents]))
