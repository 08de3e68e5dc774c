"""Counts the images of a small data set before a run, without reading or indexing large ones."""

import itertools
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from ..common.files import expand
from ..common.images import SUFFIXES
from . import datasets
from .names import FOLDER, TAR, find_path, list_names
from .tars import images as tars


def count_images(name: str, root: str | Path, enough: int, many_files: int = 20_000) -> int | None:
    """Count the training images of folders or tars; return None for data sets that are large or of other kinds.

    Args:
        enough: a tar with this many images is large, since its headers have to be read one after the other.
        many_files: a folder with more files is large; the names of fewer are listed in less than a second.

    Raises:
        UserError: as `datasets.load`.
    """
    names = list_names(name)
    if len(names) > 1:
        counts = [count_images(member, root, enough, many_files) for member in names]
        return None if None in counts else sum(filter(None, counts))
    (name,) = names
    if name.startswith(TAR):
        files = tars.find_tars(find_path(name))
        count = sum(1 for _ in itertools.islice(_list_tar_images(files), enough))
        return None if count == enough else count
    if name.startswith(FOLDER):
        files = _list_files(expand(find_path(name)))
        is_small = sum(1 for _ in itertools.islice(files, many_files + 1)) <= many_files
        return len(datasets.load(name, "train", root)) if is_small else None
    return None


def _list_files(folder: str) -> Iterator[str]:
    for _, _, files in os.walk(folder):
        yield from files


def _list_tar_images(files: list[str]) -> Iterator[str]:
    """Yield the names of the images in tars, up to one that cannot be read: opening the data set will name it."""
    for file in files:
        try:
            with tarfile.open(file, "r:") as archive:
                yield from (member.name for member in archive if member.name.lower().endswith((*SUFFIXES, ".tar")))
        except (tarfile.TarError, OSError):
            return
