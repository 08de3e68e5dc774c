"""Images in uncompressed tar files, read in place: ImageNet as it is downloaded, and shards in WebDataset's layout.

Each image is one read at its offset; nothing is unpacked.
"""

import functools
import io
import os
import re
import tarfile
import tempfile
from collections.abc import Sequence
from glob import glob
from pathlib import Path

import numpy as np

from ...common.errors import UserError, shorten_list
from ...common.files import expand
from ...common.images import SUFFIXES, CorruptImage, decode, retry
from .. import folders
from ..image_data import ImageData, MissingSplit
from ..sources import PackedNames
from .index import INDEX_SUFFIX, Entries, open_index, read_version, sort_key

PREFIX = "tar:"


class TarImages:
    """A `sources.Source` of images in tars; forked workers share its arrays."""

    def __init__(self, tars: Sequence[str], tar_N: np.ndarray, entries: Entries) -> None:
        self.tars = list(tars)
        self.versions = [read_version(tar) for tar in tars]
        self.tar_N = tar_N  # int32, position in ``tars``
        self.entries = entries

    def __len__(self) -> int:
        return len(self.tar_N)

    def name(self, index: int) -> str:
        return os.path.join(self.tars[self.tar_N[index]], self.entries.names[index])

    def read(self, index: int) -> np.ndarray:
        name = self.name(index)
        number = self.tar_N[index]
        offset, size, _ = self.entries.members[index].item()
        encoded = retry(lambda: _read_bytes(self.tars[number], self.versions[number], offset, size), name)
        if len(encoded) < size:
            raise CorruptImage(f"cannot read image {name}: the tar ends before it; copy the tar again")
        return decode(encoded, name)


def find_tars(pattern: str) -> list[str]:
    """List the tars that match a pattern such as ``/data/*.tar`` or ``/{disk1,disk2}/data-{000..146}.tar``.

    Raises:
        UserError: no tar matches, or a tar that the braces name is missing.
    """
    paths = _expand_braces(expand(pattern.strip()))
    # glob also lists links whose target is missing.
    matches = {path: [path] if os.path.isfile(path) else list(filter(os.path.isfile, glob(path))) for path in paths}
    tars = [tar for names in matches.values() for tar in sorted(names) if not tar.endswith(INDEX_SUFFIX)]
    missing = [path for path, names in matches.items() if not names]
    if missing and len(paths) > 1:
        problem = f"{len(missing)} of {len(paths)} tars are missing: {shorten_list(missing)}"
        raise UserError(f"{PREFIX}{pattern}: {problem}; copy them there, or correct the pattern")
    if not tars:
        raise UserError(f"no file matches {PREFIX}{pattern}; write tar:/data/*.tar or tar:/data/{{000..146}}.tar")
    return list(dict.fromkeys(tars))


def _expand_braces(pattern: str) -> list[str]:
    """Return the patterns that a shell would make of ``{first..last}`` and ``{one,other}``."""
    braces = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", pattern)
    if not braces:
        return [pattern]
    first, last, words = braces.groups()
    parts = words.split(",") if words else [f"{i:0{len(first)}}" for i in range(int(first), int(last) + 1)]
    start, end = braces.span()
    return [path for part in parts for path in _expand_braces(pattern[:start] + part + pattern[end:])]


def load_tars(pattern: str) -> ImageData:
    """Load all images of the tars that ``pattern`` names.

    Labels are those of .cls members, or else the first folder in the names, as in a folder of class folders.

    Raises:
        UserError: no tar matches, a tar is compressed or damaged, or no tar contains images.
    """
    tars = find_tars(pattern)
    tar_N, entries = _join([open_index(tar) for tar in tars])
    names = list(entries.names)
    if not names:
        raise UserError(f"{PREFIX}{pattern}: no images; expected members ending in {' '.join(SUFFIXES)}")
    name_folders = {os.path.dirname(name) for name in names}
    for paths in ({Path(tar).stem for tar in tars}, name_folders):
        mixed = folders.find_mixed_splits(paths)
        if mixed:
            remedy = "keep each split in its own tars, and list the tars of one split only"
            splits = " and ".join(sorted(mixed[1]))
            raise UserError(f"{PREFIX}{pattern} contains {splits}: splits, not classes; {remedy}")
    common = os.path.commonpath(name_folders)
    labels: np.ndarray | None = None
    classes: list[str] = []
    if (entries.members["labels"] >= 0).any():
        labels = entries.members["labels"]
        classes = [str(label) for label in range(int(labels.max()) + 1)]
    elif common not in name_folders:
        prefix_length = len(common) + 1 if common else 0
        name_classes = [name[prefix_length : name.index("/", prefix_length)] for name in names]
        classes = sorted(set(name_classes))
        labels = _number(name_classes, classes)
    order = np.array(sorted(range(len(names)), key=[sort_key(name) for name in names].__getitem__))
    source = TarImages(tars, tar_N[order], entries.take(order))
    return ImageData(source, None if labels is None else labels[order], classes)


def find_imagenet_tar(split: str, root: Path) -> str:
    """Return the path of ImageNet's tar of a split in one of the usual folders in ``root``; empty if there is none."""
    for subfolder in folders.IMAGENET_FOLDERS:
        tar = root / subfolder / f"ILSVRC2012_img_{split}.tar"
        if tar.is_file():
            return str(tar)
    return ""


def load_imagenet_tars(name: str, split: str, root: Path) -> ImageData:
    """Load ImageNet-1K, or the classes of ImageNet-100, from the tars as they are downloaded.

    Raises:
        UserError: the tar of the split, the devkit's tar (val's labels are in it) or one of the classes is missing.
    """
    tar = find_imagenet_tar(split, root)
    if not tar:
        raise MissingSplit(f"{name}: no ILSVRC2012_img_{split}.tar next to {find_imagenet_tar('train', root)}")
    entries = open_index(tar)
    names = list(entries.names)
    if split == "train":
        image_classes = [os.path.basename(os.path.dirname(name)) for name in names]
        is_known = all(re.fullmatch(r"n\d{8}", class_name) for class_name in set(image_classes))
    else:
        numbers = [re.fullmatch(r"(?:.*/)?ILSVRC2012_val_(\d{8})\.JPEG", name) for name in names]
        val_classes = _read_val_classes(Path(tar).with_name("ILSVRC2012_devkit_t12.tar.gz"))
        is_known = all(number and 0 < int(number[1]) <= len(val_classes) for number in numbers)
        image_classes = [val_classes[int(number[1]) - 1] for number in numbers if number] if is_known else []
    if not names or not is_known:
        raise UserError(f"{tar} is not ImageNet's {split} tar, or was modified; get it again from image-net.org")
    classes = folders.list_imagenet100() if name == "imagenet100" else sorted(set(image_classes))
    missing = sorted(set(classes) - set(image_classes))
    if missing:
        raise UserError(f"{name}: {tar} lacks the classes {shorten_list(missing)}; get it again from image-net.org")
    included = set(classes)
    positions = [index for index, class_name in enumerate(image_classes) if class_name in included]
    order = np.array(sorted(positions, key=lambda index: (image_classes[index], names[index])))
    labels = _number([image_classes[index] for index in order], classes)
    return ImageData(TarImages([tar], np.zeros(len(order), np.int32), entries.take(order)), labels, list(classes))


def _read_val_classes(devkit: Path) -> list[str]:
    """Return the class of each validation image in the order of image numbers, as torchvision parses the devkit."""
    from torchvision.datasets import imagenet  # slow to import

    if not devkit.is_file():
        raise MissingSplit(f"{devkit}, which has the labels of val, is missing; download it from image-net.org")
    try:
        with tempfile.TemporaryDirectory() as folder:
            imagenet.parse_devkit_archive(folder, str(devkit.absolute()))
            return imagenet.load_meta_file(folder)[1]
    except (RuntimeError, OSError, ValueError, LookupError, tarfile.TarError) as error:
        raise UserError(f"{devkit} is damaged; download it again from image-net.org") from error


def _number(names: Sequence[str], classes: Sequence[str]) -> np.ndarray:
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
