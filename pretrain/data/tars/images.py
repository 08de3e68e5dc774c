"""Images in uncompressed tar files, such as shards in WebDataset's layout, read in place.

Each image is one read at its offset; nothing is unpacked.
"""

import functools
import io
import os
import re
from collections.abc import Sequence
from glob import glob
from pathlib import Path

import numpy as np

from ...common.errors import UserError, shorten_list
from ...common.files import expand
from ...common.images import SUFFIXES, CorruptImage, ReductionChooser, decode, retry
from ..folders.layout import find_masks, find_mixed_splits
from ..image_data import ImageData
from ..names import TAR, suggest_form
from ..sources import PackedNames
from .index import INDEX_SUFFIX, Entries, open_index, read_version, sort_key


class TarImages:
    """A `sources.Source` of images in tars; forked workers share its arrays."""

    can_reduce = True

    def __init__(self, tars: Sequence[str], tar_N: np.ndarray, entries: Entries) -> None:
        self.tars = list(tars)
        self.versions = [read_version(tar) for tar in tars]
        self.tar_N = tar_N  # int32, position in ``tars``
        self.entries = entries

    def __len__(self) -> int:
        return len(self.tar_N)

    def name(self, index: int) -> str:
        return os.path.join(self.tars[self.tar_N[index]], self.entries.names[index])

    def read(self, index: int, choose_reduction: ReductionChooser | None = None) -> np.ndarray:
        name = self.name(index)
        number = self.tar_N[index]
        offset, size, _ = self.entries.members[index].item()
        encoded = retry(lambda: _read_bytes(self.tars[number], self.versions[number], offset, size), name)
        if len(encoded) < size:
            raise CorruptImage(f"cannot read image {name}: the tar ends before it; copy the tar again")
        return decode(encoded, name, choose_reduction)


def find_tars(pattern: str) -> list[str]:
    """List the tars that match a pattern such as ``/data/*.tar`` or ``/{disk1,disk2}/data-{000..146}.tar``.

    Raises:
        UserError: no tar matches, or a tar that the braces name is missing.
    """
    paths = expand_braces(expand(pattern))
    # glob also lists links whose target is missing.
    matches = {path: [path] if os.path.isfile(path) else list(filter(os.path.isfile, glob(path))) for path in paths}
    tars = [tar for names in matches.values() for tar in sorted(names) if not tar.endswith(INDEX_SUFFIX)]
    missing = [path for path, names in matches.items() if not names]
    if missing and len(paths) > 1:
        problem = f"{len(missing)} of {len(paths)} tars are missing: {shorten_list(missing)}"
        raise UserError(f"{TAR}{pattern}: {problem}; copy them there, or correct the pattern")
    if not tars:
        form = suggest_form(pattern) or "write tar:/data/*.tar or tar:/data/{000..146}.tar"
        raise UserError(f"no file matches {TAR}{pattern}; {form}")
    return list(dict.fromkeys(tars))


def expand_braces(pattern: str) -> list[str]:
    """Return the patterns that a shell would make of ``{first..last}`` and ``{one,other}``."""
    braces = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", pattern)
    if not braces:
        return [pattern]
    first, last, words = braces.groups()
    parts = words.split(",") if words else [f"{i:0{len(first)}}" for i in range(int(first), int(last) + 1)]
    start, end = braces.span()
    return [path for part in parts for path in expand_braces(pattern[:start] + part + pattern[end:])]


def load_tars(pattern: str) -> ImageData:
    """Load all images of the tars that ``pattern`` names.

    Classes are the numbers in .cls members, in their order, or else the first folder in the names, as in a folder of
    class folders.

    Raises:
        UserError: no tar matches, a tar is compressed or damaged, no tar contains images, or images lie next to masks.
    """
    tars = find_tars(pattern)
    tar_N, entries = _join([open_index(tar) for tar in tars])
    names = list(entries.names)
    if not names:
        raise UserError(f"{TAR}{pattern}: no images; expected members ending in {' '.join(SUFFIXES)}")
    name_folders = {os.path.dirname(name) for name in names}
    stems = [Path(tar).stem for tar in tars]
    for paths in (stems, name_folders):
        mixed = find_mixed_splits(paths)
        if mixed:
            remedy = "keep each split in its own tars, and list the tars of one split only"
            splits = " and ".join(sorted(mixed[1]))
            raise UserError(f"{TAR}{pattern} contains {splits}: splits, not classes; {remedy}")
    tar_names = [re.sub("[-_.]?[0-9]+$", "", stem) for stem in stems]  # images-000 and masks-000
    paths = names
    if len(set(tar_names)) > 1:
        paths = [f"{tar_names[tar]}/{name}" for tar, name in zip(tar_N.tolist(), names, strict=True)]
    masks = find_masks(paths)
    if masks:
        remedy = "write only the images to tars; if the others are not masks, give them other names"
        raise UserError(f"{TAR}{pattern}: {masks.images} {masks.describe()}; {remedy}")
    common = os.path.commonpath(name_folders)
    labels: np.ndarray | None = None
    classes: list[str] = []
    has_label = entries.members["labels"] >= 0
    if has_label.any():
        numbers, positions = np.unique(entries.members["labels"][has_label], return_inverse=True)
        classes = [str(number) for number in numbers]
        labels = np.full(len(names), -1, np.int64)
        labels[has_label] = positions
    elif common not in name_folders:
        prefix_length = len(common) + 1 if common else 0
        name_classes = [name[prefix_length : name.index("/", prefix_length)] for name in names]
        classes = sorted(set(name_classes))
        labels = number_names(name_classes, classes)
    order = np.array(sorted(range(len(names)), key=[sort_key(name) for name in names].__getitem__))
    source = TarImages(tars, tar_N[order], entries.take(order))
    return ImageData(source, None if labels is None else labels[order], classes)


def number_names(names: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """Return the position of each of ``names`` in ``classes``, as labels."""
    numbers = {name: number for number, name in enumerate(classes)}
    return np.array([numbers[name] for name in names], np.int64)


def _join(parts: Sequence[Entries]) -> tuple[np.ndarray, Entries]:
    """Concatenate the entries of several tars; also return the number of each entry's tar."""
    tar_N = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part.members) for part in parts])
    names = PackedNames.pack(name for part in parts for name in part.names)
    return tar_N, Entries(names, np.concatenate([part.members for part in parts]))


def _read_bytes(tar: str, version: tuple[int, int], offset: int, size: int) -> bytes:
    file = _open_tar(tar, version)
    try:
        return os.pread(file.fileno(), size, offset)
    except OSError:
        _open_tar.cache_clear()  # a stale handle; the next attempt opens it again
        raise


@functools.lru_cache(maxsize=64)
def _open_tar(tar: str, version: tuple[int, int]) -> io.FileIO:
    """Open a tar, which this process keeps open until it has read from 64 others.

    Raises:
        UserError: the tar has another `read_version` than ``version``, for which its index was read.
    """
    file = io.FileIO(tar)
    if read_version(file.fileno()) != version:
        file.close()
        raise UserError(f"{tar} has changed since this run read its index; run the command again")
    return file
