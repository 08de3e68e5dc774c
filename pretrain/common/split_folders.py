"""Folders of splits: their names say which images are for training."""

import re
from collections.abc import Iterable

SPLIT_FOLDERS = {"train": ("train", "training"), "val": ("val", "valid", "validation", "test")}  # in any case


def find_splits(folders: Iterable[str]) -> dict[str, list[str]]:
    """Return the folders of each split among the names ``folders``."""
    names = list(folders)
    return {split: [f for f in names if remove_year(f) in words] for split, words in SPLIT_FOLDERS.items()}


def remove_year(folder: str) -> str:
    """Return a folder's name in lower case, without a year: COCO's train2017 is train."""
    return re.sub(r"(19|20)\d\d$", "", folder.lower())
