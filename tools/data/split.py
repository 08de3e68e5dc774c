"""One COCO file divided into train and val by image, with the classes in proportion."""

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
    """Writes ``train.json`` and ``val.json``; whole records, with all their fields and the file's other sections.

    Args:
        content: of a file in COCO's format.
        val: number of the images, or their share as a float.
        images: folder of the images; empty: their files are not looked for.

    Raises:
        UserError: a bad image or category, an annotation of an unknown one, boxes in another format, or no image left
            in train or val.
    """
    records = content["images"]
    problems = find_problems(content, images or None, Rules())
    if bad := [problem.text for problem in problems if problem.section != "annotations"]:
        raise UserError(f"{shorten_list(bad)}; fix them, then split")
    if reason := find_box_format_problem(drop_bad(content, problems)):
        raise UserError(reason)
    classes_of: dict[Any, set[Any]] = {image["id"]: set() for image in records}
    categories = {category["id"] for category in content["categories"]}
    for box in content["annotations"]:
        image, category = box.get("image_id"), box.get("category_id")
        if image not in classes_of or category not in categories:
            raise UserError(f"annotation {box.get('id')}: unknown image {image!r} or category {category!r}")
        classes_of[image].add(category)
    count = val if isinstance(val, int) else round(val * len(records))
    if not 0 < count < len(records):
        raise UserError(f"--val {val:g} of {len(records)} images is not a share or a number that leaves both some")
    chosen = stratified(classes_of, count, seed)
    parts: dict[str, dict[str, Any]] = {}
    for name in ("train", "val"):
        images_of_part = [image for image in records if (image["id"] in chosen) == (name == "val")]
        boxes = [box for box in content["annotations"] if (box["image_id"] in chosen) == (name == "val")]
        parts[name] = {**content, "images": images_of_part, "annotations": boxes}
        (folder / f"{name}.json").write_text(json.dumps(parts[name]))
    print_counts({"all": content, **parts})


def stratified(classes_of: Mapping[Hashable, set[Any]], count: int, seed: int) -> set[Any]:
    """``count`` images for val by iterative stratification (Sechidis et al., ECML PKDD 2011, Algorithm 1).

    The class with the fewest images left comes next. Each of these, in an order drawn from ``seed``, goes to the part
    that lacks most images of this class, among equals to the part that lacks most images, and never to a full part.
    What a part lacks is its share of the class's images minus those that it has. Images without a class come last.
    """
    images = list(classes_of)
    order = [images[position] for position in np.random.default_rng(seed).permutation(len(images))]
    images_of: dict[Any, list[Any]] = defaultdict(list)
    for image in order:
        for label in classes_of[image]:
            images_of[label].append(image)
    left = {label: len(images_of[label]) for label in sorted(images_of)}
    room = [len(order) - count, count]  # of train and val
    lacking = {label: [total * part / len(order) for part in room] for label, total in left.items()}
    part_of: dict[Any, int] = {}
    while left:
        rarest = min(left, key=lambda label: left[label])
        for image in images_of[rarest]:
            if image not in part_of:
                part = max((0, 1), key=lambda part: (room[part] > 0, lacking[rarest][part], room[part]))
                part_of[image] = part
                room[part] -= 1
                for label in classes_of[image] & left.keys():
                    lacking[label][part] -= 1
                    left[label] -= 1
        del left[rarest]
    rest = [image for image in order if image not in part_of]
    return {image for image, part in part_of.items() if part} | set(rest[: room[1]])


def print_counts(contents: Mapping[str, Mapping[str, Any]]) -> None:
    """A table of the boxes of each class, and of all boxes and images, in each of these files' contents."""
    counts = [Counter(box["category_id"] for box in content["annotations"]) for content in contents.values()]
    categories: Sequence[Any] = next(iter(contents.values()))["categories"]
    rows = [[category["name"], *(counter[category["id"]] for counter in counts)] for category in categories]
    rows += [["all boxes", *(counter.total() for counter in counts)]]
    crowds = [sum(bool(box.get("iscrowd")) for box in content["annotations"]) for content in contents.values()]
    rows += [["of them crowds", *crowds]] if any(crowds) else []
    rows += [["images", *(len(content["images"]) for content in contents.values())]]
    print(tabulate(rows, ["boxes", *contents]))
