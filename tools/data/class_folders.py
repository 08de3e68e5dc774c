"""Train and val from images in one folder per class, as links: kNN and the linear probe need a val split."""

import os
from collections import Counter
from pathlib import Path

from tabulate import tabulate

from pretrain.common.errors import UserError
from pretrain.data.folders.images import has_splits, load_folder

from .groups import read_groups, warn_of_groups, warn_of_obvious_groups
from .stratify import stratify


def list_class_images(folder: Path) -> dict[str, str]:
    """Map the name of each image below ``folder`` to its class.

    Raises:
        UserError: the folder has no images in class folders, or is split already.
    """
    if has_splits(folder):
        raise UserError(f"{folder} has folders of splits already; use it as folder:{folder}")
    images = load_folder(folder, "train")
    if images.labels is None or len(images.classes) < 2:
        raise UserError(f"{folder} needs one folder of images per class, and two classes or more, to be split by class")
    labels = [images.classes[label] for label in images.labels.tolist()]
    return {os.path.relpath(images.image_name(number), folder): label for number, label in enumerate(labels)}


def write_class_folders(
    folder: Path, source: Path, classes: dict[str, str], val: int | float, seed: int, group_by: str | None = None
) -> None:
    """Fill ``train`` and ``val`` with a link to each image of ``source``, in one folder per class.

    Args:
        classes: the class of each image, by its name below ``source``.
        val: number of the images, or their fraction as a float; with groups, val comes as close as they allow.
        group_by: what keeps images together (see `read_groups`).

    Raises:
        UserError: no image is left for train or val, or as `read_groups`.
    """
    count = val if isinstance(val, int) else round(val * len(classes))
    if not 0 < count < len(classes):
        raise UserError(f"--val {val:g} of {len(classes)} images must leave at least one image for train and for val")
    records = [{"id": name, "file_name": name} for name in classes]
    group_of = read_groups(records, group_by) if group_by else None
    val_images = stratify({name: {label} for name, label in classes.items()}, count, seed, group_of)
    for name in classes:
        link = folder / ("val" if name in val_images else "train") / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(source.absolute() / name)
    total = Counter(classes.values())
    in_val = Counter(classes[name] for name in val_images)
    rows = [[label, total[label], total[label] - in_val[label], in_val[label]] for label in total]
    rows.append(["all images", len(classes), len(classes) - len(val_images), len(val_images)])
    print(tabulate(rows, ["images", "all", "train", "val"]))
    if group_of:
        labels = {name: {label} for name, label in classes.items()}
        warn_of_groups(labels, {label: label for label in total}, group_of, val_images, count)
    else:
        warn_of_obvious_groups(records)
