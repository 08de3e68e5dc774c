"""Images in uncompressed tar files, read in place: ImageNet as it is downloaded, and shards in WebDataset's layout.

The first reader of a tar writes an index (names, offsets, sizes, labels), next to the tar or, where that is not
possible, in a cache folder. Each image is then one read at its offset; nothing is unpacked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import logging
import os
import re
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from glob import glob
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from ..common.errors import UserError, shorten_list
from ..common.files import atomic_write
from ..common.images import SUFFIXES, CorruptImage, decode, read_part
from . import folders
from .image_data import ImageData, MissingSplit

log = logging.getLogger(__name__)
PREFIX = "tar:"
_FORMAT = 1  # of index files; another one is built again
_MAX_OPEN = 64  # tars that a process keeps open
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_descriptors: dict[str, int] = {}  # of this process's open tars, the one opened last at the end


@dataclasses.dataclass(frozen=True)
class Entries:
    """Members of one tar or several, M in all.

    Attributes:
        names: their names in UTF-8 (or the tar's own bytes), one after the other; uint8.
        ends: (M,) int64, where each name ends.
        offsets: (M,) int64, where their bytes begin in the tar.
        sizes: (M,) int64, the number of their bytes.
        labels: (M,) int64, the class in the sample's .cls member, -1 if there is none.
    """

    names: np.ndarray
    ends: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    def name(self, index: int) -> str:
        """Return a member's name in its tar; members of a tar in the tar are named ``INNER/MEMBER``."""
        start = int(self.ends[index - 1]) if index else 0
        return os.fsdecode(self.names[start : int(self.ends[index])].tobytes())


class TarImages:
    """A `sources.Source` of images in tars; forked workers share its arrays."""

    def __init__(self, tars: Sequence[str], tar_N: np.ndarray, entries: Entries) -> None:
        self.tars = list(tars)
        self.tar_N = tar_N  # int32, position in ``tars``
        self.entries = entries

    def __len__(self) -> int:
        return len(self.entries)

    def name(self, index: int) -> str:
        return os.path.join(self.tars[self.tar_N[index]], self.entries.name(index))

    def read(self, index: int) -> np.ndarray:
        size = int(self.entries.sizes[index])
        descriptor = _open_tar(self.tars[self.tar_N[index]])
        encoded = read_part(descriptor, size, int(self.entries.offsets[index]), self.name(index))
        if len(encoded) < size:
            raise CorruptImage(
                f"cannot read image {self.name(index)}: the tar is shorter than its index says; copy it again"
            )
        return decode(encoded, self.name(index))


def find_tars(pattern: str) -> list[str]:
    """List the tars that ``/data/*.tar`` or ``/data/{000..146}.tar`` stands for, sorted.

    Raises:
        UserError: there is none, or one of a range is missing.
    """
    pattern = os.path.expanduser(pattern.strip())
    number = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if number:
        width = len(number[1])
        names = [f"{i:0{width}}" for i in range(int(number[1]), int(number[2]) + 1)]
        tars = [pattern[: number.start()] + name + pattern[number.end() :] for name in names]
        missing = [tar for tar in tars if not os.path.isfile(tar)]
        if missing or not tars:
            raise UserError(
                f"{PREFIX}{pattern}: {len(missing)} of {len(tars)} tars are missing: {shorten_list(missing)}"
            )
        return tars
    tars = sorted(path for path in glob(pattern) if os.path.isfile(path))
    if not tars:
        raise UserError(
            f"no file matches {PREFIX}{pattern}; write {PREFIX}/data/*.tar or {PREFIX}/data/{{000..146}}.tar"
        )
    return tars


def load_tars(pattern: str) -> ImageData:
    """Load all images of the tars that ``pattern`` names.

    Labels are those of .cls members, or else the first folder in the names, as in a folder of class folders.

    Raises:
        UserError: no tar, a compressed or damaged one, or none with images.
    """
    tars = find_tars(pattern)
    tar_N, entries = _join([open_index(tar) for tar in tars])
    names = [entries.name(index) for index in range(len(entries))]
    if not names:
        raise UserError(f"{PREFIX}{pattern}: no images; expected members ending in {' '.join(SUFFIXES)}")
    folders.check_no_splits(Path(f"{PREFIX}{pattern}"), names)
    common = os.path.commonpath([os.path.dirname(name) for name in names])
    paths = [name[len(common) :].lstrip("/").split("/") for name in names]
    labels: np.ndarray | None = None
    classes: list[str] = []
    if (entries.labels >= 0).any():
        labels = entries.labels
        classes = [str(label) for label in range(int(labels.max()) + 1)]
    elif all(len(path) > 1 for path in paths):
        classes = sorted({path[0] for path in paths})
        labels = _number([path[0] for path in paths], classes)
    order = np.array(sorted(range(len(paths)), key=paths.__getitem__))  # as in a folder with the same files
    source = TarImages(tars, tar_N[order], _take(entries, order))
    return ImageData(source, None if labels is None else labels[order], classes)


def imagenet_tar(split: str, root: Path) -> str:
    """Return the path of ImageNet's tar of a split in one of the usual folders in ``root``; empty if there is none."""
    for place in folders.IMAGENET_PLACES:
        tar = root / place / f"ILSVRC2012_img_{split}.tar"
        if tar.is_file():
            return str(tar)
    return ""


def load_imagenet(name: str, split: str, root: Path) -> ImageData:
    """Load ImageNet-1K, or the classes of ImageNet-100, from the tars as they are downloaded.

    Raises:
        UserError: the tar of the split, the devkit's tar (val's labels are in it) or one of the classes is missing.
    """
    tar = imagenet_tar(split, root)
    if not tar:
        raise MissingSplit(f"{name}: no ILSVRC2012_img_{split}.tar next to {imagenet_tar('train', root)}")
    entries = open_index(tar)
    names = [entries.name(index) for index in range(len(entries))]
    if split == "train":
        image_classes = [name.partition("/")[0] for name in names]
    else:
        by_number = _read_val_classes(Path(tar).with_name("ILSVRC2012_devkit_t12.tar.gz"))
        image_classes = [by_number[int(name.rpartition("_")[2].partition(".")[0]) - 1] for name in names]
    classes = folders.list_imagenet100() if name == "imagenet100" else sorted(set(image_classes))
    missing = sorted(set(classes) - set(image_classes))
    if missing:
        raise UserError(f"{name}: {tar} lacks {len(missing)} of {len(classes)} classes: {shorten_list(missing)}")
    included = set(classes)
    chosen = [index for index, class_name in enumerate(image_classes) if class_name in included]
    order = np.array(sorted(chosen, key=lambda index: (image_classes[index], names[index])))
    labels = _number([image_classes[index] for index in order], classes)
    return ImageData(TarImages([tar], np.zeros(len(order), np.int32), _take(entries, order)), labels, list(classes))


def _read_val_classes(devkit: Path) -> list[str]:
    """Return the class of each validation image, in the order of their numbers, by torchvision's parser."""
    from torchvision.datasets import imagenet  # slow to import

    try:
        with tempfile.TemporaryDirectory() as folder:
            imagenet.parse_devkit_archive(folder, str(devkit.absolute()))
            return imagenet.load_meta_file(folder)[1]
    except (RuntimeError, OSError, ValueError, LookupError, tarfile.TarError) as error:
        reason = "damaged" if devkit.exists() else "missing"
        raise UserError(
            f"{devkit} is {reason}; it has the labels of ImageNet's val split: download it from image-net.org, "
            "or do without kNN and probes on ImageNet (PROBE.KNN_PERIOD 0)"
        ) from error


def _number(names: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    numbers = {name: number for number, name in enumerate(classes)}
    return np.array([numbers[name] for name in names], np.int64)


def open_index(tar: str) -> Entries:
    """Read the index of a tar, or build and write it if there is none for the tar as it is now.

    Raises:
        UserError: the tar cannot be read, is compressed, damaged or cut.
    """
    try:
        status = os.stat(tar)
    except OSError as error:
        raise UserError(f"cannot read {tar}: {error.strerror}") from error
    version = np.array((_FORMAT, status.st_size, status.st_mtime_ns), np.int64)
    places = [Path(f"{tar}.index.npz"), _cache_file(tar)]
    entries = _find_index(places, version)
    if entries:
        return entries
    with _hold_lock(places[1].with_suffix(".lock")):  # another process of this machine may have built it meanwhile
        return _find_index(places, version) or _write_index(tar, status.st_size, version, places)


@contextlib.contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    """Let one process at a time run the block; where files cannot be locked, let all of them."""
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(open(path, "w")), fcntl.LOCK_EX)
        except OSError as error:
            log.debug(f"{path} cannot be locked: {error}")
        yield


def _write_index(tar: str, size: int, version: np.ndarray, places: Sequence[Path]) -> Entries:
    entries = _build_index(tar, size)
    file = io.BytesIO()
    np.savez(file, version=version, **vars(entries))
    for place in places:
        try:
            atomic_write(place, file.getvalue())
        except UserError as error:
            log.debug(f"{error}; trying the next place")
            continue
        log.info(f"{tar}: {len(entries)} images; index in {place}")
        return entries
    log.warning(
        f"{tar}: the index cannot be written, neither to {places[0]} nor to {places[1]}; it will be built again"
    )
    return entries


def _cache_file(tar: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    digest = hashlib.sha256(os.fsencode(os.path.abspath(tar))).hexdigest()[:16]
    return Path(cache, "pretrain-to-transfer", "tars", f"{Path(tar).name}.{digest}.npz")


def _find_index(places: Sequence[Path], version: np.ndarray) -> Entries | None:
    return next(filter(None, (_read_index(place, version) for place in places)), None)


def _read_index(place: Path, version: np.ndarray) -> Entries | None:
    """Read an index file; return None if it is missing, damaged, or of another version of the tar."""
    try:
        with np.load(place, allow_pickle=False) as file:
            if not np.array_equal(file["version"], version):
                return None
            return Entries(**{field.name: file[field.name] for field in dataclasses.fields(Entries)})
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _build_index(tar: str, size: int) -> Entries:
    """Read all headers of a tar."""
    log.info(f"{tar}: reading the names of its members (once)")
    images: list[tuple[str, int, int]] = []
    labels: dict[str, int] = {}
    unread: list[str] = []
    with open(tar, "rb") as file, tqdm(total=size, unit="B", unit_scale=True, desc=Path(tar).name, disable=None) as bar:
        for name, member in _list_members(file, tar, size):
            bar.update(member.offset_data - bar.n)
            suffix = os.path.splitext(name)[1].lower()
            if member.issym() or member.islnk() or member.sparse:
                unread.append("links or sparse files")
            elif suffix == ".cls":
                labels[_sample(name)] = _read_label(file, member, f"{tar}/{name}")
            elif suffix in SUFFIXES and member.isreg() and not os.path.basename(name).startswith("."):
                images.append((name, member.offset_data, member.size))
    if unread:
        log.warning(
            f"{tar}: {len(unread)} members are not read: links or sparse files; unpack it and pack its files anew"
        )
    names = [os.fsencode(name) for name, _, _ in images]
    return Entries(
        np.frombuffer(b"".join(names), np.uint8),
        np.cumsum([len(name) for name in names], dtype=np.int64),
        np.array([offset for _, offset, _ in images], np.int64),
        np.array([size for _, _, size in images], np.int64),
        np.array([labels.get(_sample(name), -1) for name, _, _ in images], np.int64),
    )


def _list_members(file: BinaryIO, tar: str, size: int, start: int = 0) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """Yield the members of the tar from ``start`` to ``size``, and of tars in it, with their names.

    Raises:
        UserError: it is no tar, compressed, damaged, or cut.
    """
    file.seek(start)
    begin = file.read(6)
    kind = next((name for magic, name in _COMPRESSED.items() if begin.startswith(magic)), "")
    if kind:
        raise UserError(f"{tar} is compressed ({kind}), so its images cannot be read in place; decompress it first")
    file.seek(start)
    try:
        with tarfile.TarFile(fileobj=file, mode="r") as archive:
            while True:
                member = archive.next()
                if member is None:
                    break
                archive.members = []  # which would keep every header in memory
                name = member.name.removeprefix("./").lstrip("/")
                if member.offset_data + member.size > size:
                    raise UserError(f"{tar} is cut in {name}; copy it again")
                if member.isreg() and name.lower().endswith(".tar"):
                    end = member.offset_data + member.size
                    inner = _list_members(file, f"{tar}/{name}", end, member.offset_data)
                    yield from ((f"{name[:-4]}/{image}", entry) for image, entry in inner)
                else:
                    yield name, member
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
                raise UserError(
                    f"{tar} is damaged or cut at byte {archive.offset}: its end mark is missing; copy it again"
                )
    except tarfile.TarError as error:
        raise UserError(f"{tar} is no tar, or is damaged or cut ({error}); copy it again") from error
    except OSError as error:
        raise UserError(f"cannot read {tar}: {error.strerror or error}") from error


def _sample(name: str) -> str:
    """Return the key of a member's sample: its name up to the first dot of the file name (WebDataset's rule)."""
    folder, _, file = name.rpartition("/")
    return f"{folder}/{file.partition('.')[0]}"


def _read_label(file: BinaryIO, member: tarfile.TarInfo, name: str) -> int:
    position = file.tell()
    file.seek(member.offset_data)
    text = file.read(min(member.size, 32)).decode(errors="replace").strip()
    file.seek(position)
    if not text.isdecimal():
        raise UserError(f"{name} contains {text!r}; a .cls member must contain the number of a class, from 0")
    return int(text)


def _join(parts: Sequence[Entries]) -> tuple[np.ndarray, Entries]:
    """Concatenate the entries of several tars; also return the number of each entry's tar."""
    tar_N = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])
    shifts = np.cumsum([0, *(len(part.names) for part in parts)])
    columns = {field.name: [getattr(part, field.name) for part in parts] for field in dataclasses.fields(Entries)}
    columns["ends"] = [ends + shift for ends, shift in zip(columns["ends"], shifts, strict=False)]
    return tar_N, Entries(**{name: np.concatenate(arrays) for name, arrays in columns.items()})


def _take(entries: Entries, positions: np.ndarray) -> Entries:
    """Return the entries at ``positions``, in that order."""
    starts = np.concatenate(([0], entries.ends[:-1]))
    lengths = entries.ends - starts
    names = b"".join(entries.names[starts[i] : entries.ends[i]].tobytes() for i in positions)
    return Entries(
        np.frombuffer(names, np.uint8),
        np.cumsum(lengths[positions]),
        entries.offsets[positions],
        entries.sizes[positions],
        entries.labels[positions],
    )


def _open_tar(tar: str) -> int:
    """Return a file descriptor of the tar, which this process keeps open."""
    descriptor = _descriptors.pop(tar, None)
    if descriptor is None:
        try:
            descriptor = os.open(tar, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"cannot read {tar}: {error.strerror}") from error
    _descriptors[tar] = descriptor
    if len(_descriptors) > _MAX_OPEN:
        oldest = next(iter(_descriptors))
        os.close(_descriptors.pop(oldest))
    return descriptor
