"""Subsets of a data set in COCO's format, for detectors that see few labels: fixed, seeded, counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from pretrain.common.errors import UserError


def write_subsets(folder: Path, content: dict[str, Any], percents: Sequence[float], folds: int, seed: int) -> None:
    """Writes ``<percent>pct_fold<n>.json`` for every share and fold, each with its images' annotations.

    A fold is one order of all images, drawn uniformly from (seed, fold); a share is its beginning. So the images of 1%
    are among those of 2% of the same fold. Images without annotations are drawn like the others.

    Args:
        content: of a file in COCO's format.
        percents: of the images, rounded to whole ones.

    Raises:
        UserError: a share without a single image.
    """
    images = sorted(content["images"], key=lambda image: image["id"])
    rest = {name: value for name, value in content.items() if name not in ("images", "annotations")}
    rows = []
    for fold in range(folds):
        order = np.random.default_rng([seed, fold]).permutation(len(images))
        for percent in percents:
            count = round(len(images) * percent / 100)
            if not count:
                raise UserError(f"{percent:g}% of {len(images)} images is none; give a larger share")
            chosen = [images[position] for position in sorted(order[:count].tolist())]
            ids = {image["id"] for image in chosen}
            annotations = [one for one in content["annotations"] if one["image_id"] in ids]
            name = f"{percent:g}pct_fold{fold}.json"
            (folder / name).write_text(json.dumps({**rest, "images": chosen, "annotations": annotations}))
            rows.append([name, len(chosen), len(annotations)])
    print(tabulate(rows, ["file", "images", "annotations"]))
