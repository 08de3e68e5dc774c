"""Test images that are training images, or nearly so: a list, a table and a picture of the worst."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from pretrain.common.errors import UserError, count_noun
from pretrain.common.image_checks.equal_files import digest_files, find_equal_files, read_sizes
from pretrain.data import datasets, view_grid
from pretrain.data.image_data import ImageData
from pretrain.data.sources import Files
from pretrain.data.views import make_center_view
from transfer.coco.names import is_catalog_name, locate_data_set
from transfer.coco.reading import read_annotations

from . import DUPLICATES_FILE
from .features import find_nearest_images

# docs/tutorials/own_images.md has the recall and the false alarms at these values.
THRESHOLD = 0.9
OVERLAP_THRESHOLD = 0.85
_WORST = 12  # pairs in the table and in the picture
_SIDE = 128  # pixels per side of an image in the picture


def find_duplicates(train_name: str, test_name: str, weights: str) -> dict[str, Any]:
    """Compare each test image with all training images.

    Args:
        train_name: a data set as in DATASETS.TRAIN or, as ``folder:DIR``, in DATA.TRAIN.
        test_name: another one; of a folder with splits, its val split is used.
        weights: run folder or checkpoint whose features are compared, or ``random``.

    Returns:
        The content of duplicates.json: ``pairs`` has the test images whose similarity to a training image is at least
        ``threshold``, or of which a part agrees with one by at least ``overlap_threshold``, the most similar first. A
        report finds the runs on these data sets by the digests.

    Raises:
        UserError: a data set or the weights are missing, or an image cannot be decoded.
    """
    train = open_data_set(train_name, "train")
    test = open_data_set(test_name, "val")
    train_paths, test_paths = ([data.image_name(n) for n in range(len(data))] for data in (train, test))
    train_sizes = read_sizes(train_paths)
    test_sizes = read_sizes(test_paths)
    equal = find_equal_files(train_sizes, test_sizes)
    nearest = find_nearest_images(train, test, weights)
    pairs = []
    for path, *found in zip(test_paths, *(values.tolist() for values in nearest), strict=True):
        similarity, position, overlap, overlap_position = found
        is_equal = path in equal
        is_similar = similarity >= THRESHOLD
        partner = equal[path] if is_equal else train_paths[position if is_similar else overlap_position]
        values = {"similarity": round(similarity, 4), "overlap": round(overlap, 4)}
        if is_equal or is_similar or overlap >= OVERLAP_THRESHOLD:
            pairs.append({"test": path, "train": partner, **values, "equal": is_equal})
    pairs.sort(key=lambda pair: (not pair["equal"], -max(pair["similarity"], pair["overlap"])))
    counts = {"train_images": len(train), "test_images": len(test)}
    digests = {"train_digest": digest_files(train_sizes), "test_digest": digest_files(test_sizes)}
    names = {"train": train_name, "test": test_name, "weights": weights}
    return {
        **names,
        **counts,
        **digests,
        "threshold": THRESHOLD,
        "overlap_threshold": OVERLAP_THRESHOLD,
        "pairs": pairs,
    }


def open_data_set(name: str, split: str) -> ImageData:
    """Open the images of a data set in COCO's format, or a split of one that pretraining reads."""
    if not is_catalog_name(name):
        source = locate_data_set(name)
        if source.annotations is None:
            raise UserError(f"{name} has no files in COCO's format; use coco:ANNOTATIONS.json:IMAGE_FOLDER")
        records = read_annotations(source.annotations, needs_objects=False)["images"]
        return ImageData(Files(source.images, [record["file_name"] for record in records]), None, [], name)
    return datasets.load(name, split)


def write_duplicates(folder: Path, content: dict[str, Any]) -> None:
    """Write ``duplicates.json`` and, if there are pairs, ``duplicates.png``; print the numbers and the worst pairs."""
    (folder / DUPLICATES_FILE).write_text(json.dumps(content, indent=1))
    pairs = content["pairs"]
    if pairs:
        data = {name: open_data_set(content[name], split) for name, split in (("train", "train"), ("test", "val"))}
        view_grid.write(folder / "duplicates.png", _draw(pairs[:_WORST], data))
        columns = ("test", "train", "similarity", "overlap", "equal")
        rows = [[pair[column] for column in columns] for pair in pairs[:_WORST]]
        print(tabulate(rows, ["test image", "training image", "similarity", "overlap", "equal files"]))
    equal = sum(pair["equal"] for pair in pairs)
    what = f"{len(pairs):,} of {count_noun(content['test_images'], 'test image')}"
    limits = f"similarity {THRESHOLD} or overlap {OVERLAP_THRESHOLD} or more"
    print(f"{what} are near-duplicates of training images ({limits}), {equal:,} of them equal files")


def _draw(pairs: Sequence[dict[str, Any]], data: dict[str, ImageData]) -> np.ndarray:
    """Draw the pairs, three in a row, the test image on the left of its partner."""
    position_of = {name: {part.image_name(n): n for n in range(len(part))} for name, part in data.items()}
    cells = []
    for pair in pairs:
        images = [data[name].read(position_of[name][pair[name]]) for name in ("test", "train")]
        sides = [make_center_view(image, _SIDE, 0) for image in images]
        cells.append(np.pad(np.concatenate(sides, axis=1), ((4, 4), (4, 4), (0, 0)), constant_values=255))
    empty = np.full_like(cells[0], 255)
    cells += [empty] * (-len(cells) % 3)
    return np.concatenate([np.concatenate(cells[n : n + 3], axis=1) for n in range(0, len(cells), 3)])
