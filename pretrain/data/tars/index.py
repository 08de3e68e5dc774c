"""Index of the images in a tar: names, offsets, sizes and labels, which the first reader builds and saves in a file.

The file is next to the tar or, where that is not possible, in a cache folder. It is built again if the tar's size or
time has changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
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

from ...common.errors import UserError
from ...common.files import atomic_write
from ...common.images import SUFFIXES
from ..folders import COMPANION, NO_DATA, warn_of_unread

log = logging.getLogger(__name__)
INDEX_SUFFIX = ".index.npz"
_FORMAT = 1  # version of the index files; an index of another version is rebuilt
_LOG_PERIOD_S = 60.0  # where there is no terminal
_MAX_PADDING = 1 << 20  # bytes after the end mark
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


@dataclasses.dataclass(frozen=True)
class Entries:
    """Image members of one or more tars, M in total.

    Attributes:
        names: the concatenated member names, as the tar's own bytes; uint8.
        ends: (M,) int64, the end of each name in ``names``.
        offsets: (M,) int64, the byte offset of each member's content in the tar.
        sizes: (M,) int64, the size of each member in bytes.
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

    def list_names(self) -> list[str]:
        """Return the names of all members."""
        text = self.names.tobytes()
        ends = self.ends.tolist()
        return [os.fsdecode(text[start:end]) for start, end in zip([0, *ends], ends, strict=False)]

    def take(self, positions: np.ndarray) -> Entries:
        """Return the entries at ``positions``, in that order."""
        names = list(map(os.fsencode, self.list_names()))
        names = [names[index] for index in positions.tolist()]
        return _build_entries(names, self.offsets[positions], self.sizes[positions], self.labels[positions])


def open_index(tar: str) -> Entries:
    """Read the index of a tar; if it is missing or outdated, build and write it.

    Raises:
        UserError: the tar cannot be read, or is compressed, damaged or truncated.
    """
    size, time = read_version(tar)
    version = np.array((_FORMAT, len(SUFFIXES), size, time), np.int64)
    places = [Path(f"{tar}{INDEX_SUFFIX}"), _cache_file(tar)]
    entries = _find_index(places, version)
    if entries is not None:
        return entries
    with _hold_lock(places[1].with_suffix(".lock")):
        entries = _find_index(places, version)  # another process of this machine may have built it meanwhile
        return _write_index(tar, size, version, places) if entries is None else entries


def read_version(tar: str | int) -> tuple[int, int]:
    """Return the size of a tar (a path or a file descriptor) and the time of its last change, in ns."""
    try:
        status = os.stat(tar)
    except OSError as error:
        raise UserError(f"cannot read {tar}: {error.strerror}") from error
    return status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    """Run the block in one process at a time, or without a lock on file systems that do not support locks."""
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
    log.warning(f"{tar}: the index cannot be written to {places[0]} or {places[1]}, so the next run rebuilds it")
    return entries


def _cache_file(tar: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    digest = hashlib.sha256(os.fsencode(os.path.abspath(tar))).hexdigest()[:16]
    return Path(cache, "pretrain-to-transfer", "tars", f"{Path(tar).name}.{digest}.npz")


def _find_index(places: Sequence[Path], version: np.ndarray) -> Entries | None:
    for place in places:
        entries = _read_index(place, version)
        if entries is not None:
            return entries
    return None


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
                labels[_get_sample_key(name)] = _read_label(file, member, f"{tar}/{name}")
            elif suffix in SUFFIXES:
                positions[name] = (member.offset_data, member.size)
            elif not COMPANION.fullmatch(suffix):
                unread.append(suffix or "without a suffix")
    warn_of_unread(unread, Path(tar))
    images = [(name, *position) for name, position in positions.items()]
    images.sort(key=lambda image: sort_key(image[0]))
    return _build_entries(
        [os.fsencode(name) for name, _, _ in images],
        np.array([offset for _, offset, _ in images], np.int64),
        np.array([size for _, _, size in images], np.int64),
        np.array([labels.get(_get_sample_key(name), -1) for name, _, _ in images], np.int64),
    )


def _list_members(file: BinaryIO, tar: str, end: int, start: int = 0) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """Yield the members of the tar from ``start`` to ``end``, and of tars in it, with their names.

    Raises:
        UserError: it is not a tar, or is compressed, damaged or truncated.
    """
    file.seek(start)
    signature = file.read(6)
    kind = next((name for magic, name in _COMPRESSED.items() if signature.startswith(magic)), "")
    if kind:
        raise UserError(f"{tar} is compressed ({kind}), so its images cannot be read in place; decompress it first")
    file.seek(start)
    try:
        with tarfile.TarFile(fileobj=file, mode="r") as archive:
            while True:
                member = archive.next()
                if member is None:
                    break
                archive.members.clear()  # type: ignore[attr-defined]  # or it keeps every header in memory
                name = member.name.removeprefix("./").lstrip("/")
                if (
                    not member.sparse and member.offset_data + member.size > end
                ):  # a sparse one states its expanded size
                    raise UserError(f"{tar} is truncated in {name}; copy it again")
                if member.isreg() and name.lower().endswith(".tar"):
                    inner_end = member.offset_data + member.size
                    inner = _list_members(file, f"{tar}/{name}", inner_end, member.offset_data)
                    yield from ((f"{name[:-4]}/{image}", entry) for image, entry in inner)
                else:
                    yield name, member
            _check_end(file, tar, archive.offset, end)
    except tarfile.TarError as error:
        raise UserError(f"{tar} is not a tar, or is damaged or truncated ({error}); copy it again") from error
    except OSError as error:
        raise UserError(f"cannot read {tar}: {error.strerror or error}") from error


def _check_end(file: BinaryIO, tar: str, start: int, end: int) -> None:
    """Raise UserError unless the end mark of the tar is at ``start``, with nothing but padding up to ``end``."""
    file.seek(start)
    tail = file.read(min(end - start, _MAX_PADDING + 1))
    if tail[: tarfile.BLOCKSIZE] != tarfile.NUL * tarfile.BLOCKSIZE:
        raise UserError(f"{tar} is damaged or truncated at byte {start}: its end mark is missing; copy it again")
    if len(tail) > _MAX_PADDING or tail.strip(tarfile.NUL):
        remedy = "copy it again, or, if it is several tars in one file, write each to its own file"
        raise UserError(f"{tar} has data after its end mark at byte {start}; {remedy}")


def _get_sample_key(name: str) -> str:
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


def _build_entries(names: Sequence[bytes], offsets: np.ndarray, sizes: np.ndarray, labels: np.ndarray) -> Entries:
    ends = np.cumsum([len(name) for name in names], dtype=np.int64)
    return Entries(np.frombuffer(b"".join(names), np.uint8), ends, offsets, sizes, labels)


def sort_key(name: str) -> str:
    """Return a key that sorts names by their components, as folders are listed one after the other."""
    return name.replace("/", "\0")
