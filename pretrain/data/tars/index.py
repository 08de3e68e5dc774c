"""Index of the images in a tar: names, offsets, sizes and labels, which the first reader builds and saves in a file.

The file is next to the tar or, where that is not possible, in a cache folder. It is built again if the tar's size or
time has changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import logging
import os
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from ...common.errors import UserError, count_noun, shorten_list
from ...common.files import atomic_write, build_read_error, explain_content, hold_lock
from ...common.images import SUFFIXES
from ..folders.images import COMPANION, NO_DATA, warn_of_unread
from ..sources import PackedNames

log = logging.getLogger(__name__)
INDEX_SUFFIX = ".index.npz"
# Byte offset of an image in its tar, its size in bytes, and the number in the sample's .cls member (-1: there is none).
_FIELDS = ("offsets", "sizes", "labels")
_MEMBER = np.dtype([(field, np.int64) for field in _FIELDS])
_FORMAT = 2  # version of the index files; an index of another version is rebuilt
_LOG_PERIOD_S = 60.0  # where there is no terminal
_MAX_LABEL = (1 << 63) - 1
_MAX_PADDING = 1 << 20  # bytes after the end mark


@dataclasses.dataclass(frozen=True)
class Entries:
    """Image members of one or more tars, M in total.

    Attributes:
        names: their names; members of a tar in the tar are named ``INNER/MEMBER``.
        members: (M,) their places and labels, with the fields ``offsets``, ``sizes`` and ``labels``.
    """

    names: PackedNames
    members: np.ndarray

    def take(self, positions: np.ndarray) -> Entries:
        """Return the entries at ``positions``, in that order."""
        names = list(self.names)
        return Entries(PackedNames.pack(names[index] for index in positions.tolist()), self.members[positions])


def open_index(tar: str) -> Entries:
    """Read the index of a tar; if it is missing or outdated, build and write it.

    Raises:
        UserError: the tar cannot be read, or is compressed, damaged or truncated.
    """
    size, time = read_version(tar)
    version = np.array((_FORMAT, len(SUFFIXES), size, time), np.int64)
    paths = [Path(f"{tar}{INDEX_SUFFIX}"), _cache_file(tar)]
    entries = _find_index(paths, version)
    if entries:
        return entries
    with hold_lock(paths[1].with_suffix(".lock")):  # another process of this machine may be building it
        return _find_index(paths, version) or _write_index(tar, size, version, paths)


def read_version(tar: str | int) -> tuple[int, int]:
    """Return the size of a tar (a path or a file descriptor) and the time of its last change, in ns."""
    try:
        status = os.stat(tar)
    except OSError as error:
        raise build_read_error(str(tar), error) from error
    return status.st_size, status.st_mtime_ns


def _write_index(tar: str, size: int, version: np.ndarray, paths: Sequence[Path]) -> Entries:
    entries = _build_index(tar, size)
    file = io.BytesIO()
    fields: dict = {name: entries.members[name] for name in _FIELDS}
    np.savez(file, version=version, names=entries.names.text, ends=entries.names.ends, **fields)
    for path in paths:
        with contextlib.suppress(UserError):
            atomic_write(path, file.getvalue())
            log.info(f"{tar}: {count_noun(len(entries.members), 'image')}; index in {path}")
            return entries
    log.warning(f"{tar}: the index cannot be written to {paths[0]} or {paths[1]}, so the next run rebuilds it")
    return entries


def _cache_file(tar: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    digest = hashlib.sha256(os.fsencode(os.path.abspath(tar))).hexdigest()[:16]
    return Path(cache, "pretrain-to-transfer", "tars", f"{Path(tar).name}.{digest}.npz")


def _find_index(paths: Sequence[Path], version: np.ndarray) -> Entries | None:
    return next(filter(None, (_read_index(path, version) for path in paths)), None)


def _read_index(path: Path, version: np.ndarray) -> Entries | None:
    """Read an index file; return None if it is missing, damaged, or of another version of the tar."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if not np.array_equal(file["version"], version):
                return None
            members = np.rec.fromarrays([file[name] for name in _FIELDS], _MEMBER)
            return Entries(PackedNames(file["names"], file["ends"]), members)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _build_index(tar: str, size: int) -> Entries:
    """Read all headers of a tar; if a name occurs twice, the last member counts, as when the tar is extracted."""
    log.info(f"{tar}: building the index of its images, which later runs reuse")
    positions: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    unread: list[str] = []
    period = 0.1 if sys.stderr.isatty() else _LOG_PERIOD_S
    with (
        open(tar, "rb") as file,
        tqdm(total=size, unit="B", unit_scale=True, desc=Path(tar).name, mininterval=period) as bar,
    ):
        for name, member in _list_members(file, tar, size):
            bar.update(member.offset_data - bar.n)
            suffix = os.path.splitext(name)[1].lower()
            folders_of_name = name.lower().split("/")
            if member.isdir() or os.path.basename(name).startswith(".") or not NO_DATA.isdisjoint(folders_of_name):
                continue
            if not member.isreg() or member.sparse:
                unread.append("links or sparse files")
            elif suffix == ".cls":
                labels[name] = _read_label(file, member, f"{tar}/{name}")
            elif suffix in SUFFIXES:
                positions[name] = (member.offset_data, member.size)
            elif not COMPANION.fullmatch(suffix):
                unread.append(suffix or "without a suffix")
    warn_of_unread(unread, Path(tar))
    names = sorted(positions, key=sort_key)
    sample_labels = _find_sample_labels(names, labels, tar)
    members = [(*positions[name], sample_labels.get(_get_sample_key(name), -1)) for name in names]
    return Entries(PackedNames.pack(names), np.array(members, _MEMBER))


def _list_members(file: BinaryIO, tar: str, end: int, start: int = 0) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """Yield the members of the tar from ``start`` to ``end``, and of tars in it, with their names.

    Raises:
        UserError: it is not a tar, or is compressed, damaged or truncated.
    """
    file.seek(start)
    beginning = file.read(512)
    file.seek(start)
    try:
        with tarfile.TarFile(fileobj=file, mode="r") as archive:
            while True:
                member = archive.next()
                if member is None:
                    break
                archive.members.clear()  # type: ignore[attr-defined]  # or it keeps every header in memory
                name = member.name.removeprefix("./").lstrip("/")
                member_end = member.offset_data + member.size
                if member_end > end and not member.sparse:  # a sparse one states its expanded size
                    raise UserError(f"{tar} is truncated in {name}; copy it again")
                if member.isreg() and name.lower().endswith(".tar"):
                    inner = _list_members(file, f"{tar}/{name}", member_end, member.offset_data)
                    yield from ((f"{name[:-4]}/{image}", entry) for image, entry in inner)
                else:
                    yield name, member
            _check_end(file, tar, archive.offset, end)
    except tarfile.TarError as error:
        explanation = explain_content(beginning)
        if explanation:
            raise UserError(f"{tar} cannot be read: {explanation}") from error
        raise UserError(f"{tar} is not a tar, or is damaged or truncated ({error}); copy it again") from error
    except OSError as error:
        raise UserError(f"cannot read {tar}: {error.strerror or error}; check the disk or the file server") from error


def _check_end(file: BinaryIO, tar: str, start: int, end: int) -> None:
    """Raise UserError unless the end mark of the tar is at ``start``, with nothing but padding up to ``end``."""
    file.seek(start)
    tail = file.read(min(end - start, _MAX_PADDING + 1))
    if tail[: tarfile.BLOCKSIZE] != tarfile.NUL * tarfile.BLOCKSIZE:
        raise UserError(f"{tar} is damaged or truncated at byte {start}: its end mark is missing; copy it again")
    if len(tail) > _MAX_PADDING or tail.strip(tarfile.NUL):
        remedy = "copy it again, or, if it is several tars in one file, write each to its own file"
        raise UserError(f"{tar} has data after its end mark at byte {start}; {remedy}")


def _find_sample_labels(images: list[str], labels: dict[str, int], tar: str) -> dict[str, int]:
    """Return the label of each sample that has one, by its key.

    Several images of a sample share its label, such as KEY.left.jpg and KEY.right.jpg with KEY.cls.

    Raises:
        UserError: a sample has several labels, several images of one name, or the label of one of its images, as if
            names had dots before the suffix.
    """
    names_of_labels: dict[str, list[str]] = {}
    for name in labels:
        names_of_labels.setdefault(_get_sample_key(name), []).append(name)
    for key, names in names_of_labels.items():
        if len(names) > 1:
            raise _build_sample_error(tar, key, f"{len(names)} labels", names)
    images_of_stem: dict[str, str] = {}
    labeled_images: dict[str, list[str]] = {}
    for name in images:
        stem = os.path.splitext(name)[0]
        key = _get_sample_key(name)
        if stem in images_of_stem:
            raise _build_sample_error(tar, key, "several images of one name", [images_of_stem[stem], name])
        images_of_stem[stem] = name
        if key in names_of_labels:
            labeled_images.setdefault(key, []).append(name)
    for key, names in labeled_images.items():
        (label,) = names_of_labels[key]
        stem = os.path.splitext(label)[0]
        if len(names) > 1 and "." in os.path.basename(stem) and stem in images_of_stem:
            raise _build_sample_error(tar, key, "several images, but the label of one", [label, *names])
    return {key: labels[name] for key, (name,) in names_of_labels.items()}


def _build_sample_error(tar: str, key: str, problem: str, names: list[str]) -> UserError:
    rule = "the name of a sample ends at the first dot, and it has one image and one .cls"
    remedy = "replace other dots with _, and move other images to other tars"
    return UserError(f"{tar}: sample {key.lstrip('/')} has {problem}: {shorten_list(names)}; {rule}; {remedy}")


def _get_sample_key(name: str) -> str:
    """Return the key of a member's sample: its name up to the first dot of the file name (WebDataset's rule)."""
    folder, _, file = name.rpartition("/")
    return f"{folder}/{file.partition('.')[0]}"


def _read_label(file: BinaryIO, member: tarfile.TarInfo, name: str) -> int:
    position = file.tell()
    file.seek(member.offset_data)
    text = file.read(min(member.size, 64)).decode("utf-8-sig", errors="replace").strip()
    file.seek(position)
    if text == "-1":  # no label
        return -1
    if not text.isdecimal():
        remedy = "a .cls member must contain the number of a class, from 0 (or -1 for none)"
        raise UserError(f"{name} contains {text!r}; {remedy}")
    if int(text) > _MAX_LABEL:
        raise UserError(f"{name} contains {text}; a .cls member may contain at most {_MAX_LABEL}; number the classes")
    return int(text)


def sort_key(name: str) -> str:
    """Return a key that sorts names by their components, as folders are listed one after the other."""
    return name.replace("/", "\0")
