"""Subsets of a data set in COCO's format, for detectors that see few labels: fixed, seeded, counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from pretrain.common.errors import UserError, one_line


def write_subsets(
    folder: Path, content: dict[str, Any], percents: Sequence[float], folds: int, seed: int, published: Path | None
) -> None:
    """Writes ``<percent>pct_fold<n>.json`` for every share and fold, each with its images' annotations.

    A fold is one order of all images, drawn uniformly from (seed, fold); a share is its beginning. So the images of 1%
    are among those of 2% of the same fold. Images without annotations are drawn like the others.

    Args:
        content: of a file in COCO's format.
        percents: of the images, rounded to whole ones.
        published: a list as Unbiased Teacher's COCO_supervision.txt instead: ``{"1.0": {"0": [positions]}}``, by
            percent and fold, among the images with annotations other than crowds, in the order of their ids, as
            Detectron2 loads them; whole images, rounded down.

    Raises:
        UserError: a share without a single image, or one that the list does not have, or has for other images.
    """
    images = sorted(content["images"], key=lambda image: image["id"])
    if published:
        counted = {one["image_id"] for one in content["annotations"] if not one.get("iscrowd")}
        images = [image for image in images if image["id"] in counted]
    rest = {name: value for name, value in content.items() if name not in ("images", "annotations")}
    rows = []
    for fold in range(folds):
        order = np.random.default_rng([seed, fold]).permutation(len(images)).tolist()
        for percent in percents:
            count = round(len(images) * percent / 100)
            if not (count or published):
                raise UserError(f"{percent:g}% of {len(images)} images is none; give a larger share")
            positions = _listed(published, percent, fold, len(images)) if published else order[:count]
            chosen = [images[position] for position in sorted(positions)]
            ids = {image["id"] for image in chosen}
            # Two boxes of COCO's train2017 have no height: no detector is trained on them.
            annotations = [one for one in content["annotations"] if one["image_id"] in ids and 0 not in one["bbox"][2:]]
            name = f"{percent:g}pct_fold{fold}.json"
            (folder / name).write_text(json.dumps({**rest, "images": chosen, "annotations": annotations}))
            rows.append([name, len(chosen), len(annotations)])
    print(tabulate(rows, ["file", "images", "annotations"]))


def _listed(published: Path, percent: float, fold: int, images: int) -> list[int]:
    try:
        positions = json.loads(published.read_text())[str(float(percent))][str(fold)]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{published} has no list for {percent:g}%, fold {fold} ({one_line(error)})") from error
    if len(set(positions)) != int(percent / 100 * images) or max(positions, default=0) >= images:
        raise UserError(
            f"{published} does not fit: {len(positions)} positions for {percent:g}% of {images} images with annotations"
        )
    return positions
