"""Random subsets of a COCO annotation file, for detectors that are trained with few labels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from pretrain.common.errors import UserError, one_line, shorten_list
from transfer.coco.check import Rules, find_problems


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
        raise UserError(
            f"{published} does not fit: {len(positions)} positions for {percent:g}% of {images} images with "
            "annotations; pass the list of these annotations"
        )
    return positions
