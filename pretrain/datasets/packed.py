"""A folder of images packed into a few large files: a file server reads them fast, and every image has a checksum.

``folder/<split>/images-00000.bin``, ... hold the encoded images one after the other, in the order of the folder that
they come from, and ``index.safetensors`` where each ends, its CRC-32, its name and its label. `tools/make_data.py pack`
writes them.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from ..common.errors import UserError
from ..common.image_io import CorruptImage, Files, check_ends, decode, memory_for
from .image_data import ImageData, MissingSplit

INDEX, EVERY_SPLIT, FORMAT = "index.safetensors", "all", 1


def load_packed(folder: Path, split: str) -> ImageData:
    """A split of packed images; images that were packed without splits are every split.

    Raises:
        UserError: missing, incomplete or damaged; of another version of this program.
    """
    place = folder / (EVERY_SPLIT if os.path.isdir(folder / EVERY_SPLIT) else split)
    if not (place / INDEX).is_file():
        if any(folder.glob(f"*/{INDEX}")):
            raise MissingSplit(f"{folder} holds no {split} split; pack a folder that has one")
        raise UserError(f"no packed images at {folder}; make them: python tools/make_data.py pack FOLDER {folder}")
    try:
        with safe_open(place / INDEX, "numpy") as opened:
            about: dict[str, Any] = json.loads(opened.metadata()["packed"])
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        if about["format"] != FORMAT:
            raise UserError(
                f"{place} was packed by another version of this program; remove the folder and pack it again"
            )
        names = Files.of_arrays(str(place), arrays["names"], arrays["name_ends"])
        source = Packed(place, about["shards"], arrays["ends"], arrays["checksums"], names)
        return ImageData.of_file(source, arrays.get("labels"), about["classes"])
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{place / INDEX} cannot be read ({error}); remove the folder and pack it again") from error


class Packed:
    """Encoded images in a few files.

    Args:
        shards: bytes of each file.
        ends: (N,) int64, where each image ends, counted over all files; none lies in two.
        checksums: (N,) uint32, CRC-32 of each image's bytes.
        names: of the files that they come from.

    Raises:
        UserError: a file is missing or has another length.
    """

    def __init__(self, folder: Path, shards: list[int], ends: np.ndarray, checksums: np.ndarray, names: Files) -> None:
        self._folder, self._ends, self._checksums, self._names = folder, ends, checksums, names
        if not all(type(size) is int and 0 <= size < 2**40 for size in shards):
            raise ValueError("its lengths of files are damaged")
        self._starts = np.concatenate([[0], np.cumsum(shards, dtype=np.int64)])
        check_ends(ends, int(self._starts[-1]), "positions of images")
        if checksums.dtype != np.uint32 or checksums.shape != ends.shape or len(names) != len(ends):
            raise ValueError("its parts do not fit together")
        for number, size in enumerate(shards):
            path = shard_path(folder, number)
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                what = "is missing" if found is None else f"has {found} bytes instead of {size}"
                raise UserError(f"{path} {what}: restore it, or pack the images again")
        self._files: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def name(self, index: int) -> str:
        return self._names.name(index)

    def encoded(self, index: int) -> bytes:
        """The image's bytes as they were packed.

        Raises:
            CorruptImage: they have another checksum.
            UserError: the disk failed.
        """
        start = int(self._ends[index - 1]) if index else 0
        size = int(self._ends[index]) - start
        number = int(np.searchsorted(self._starts, start, side="right")) - 1 if size else 0
        path = shard_path(self._folder, number)
        try:
            # Not mapped into memory: of a mapped file, an error of the disk would kill the process.
            data = _read(self._file(number, path), size, start - int(self._starts[number]))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; check the disk or the file server") from error
        if zlib.crc32(data) != int(self._checksums[index]):
            raise CorruptImage(
                f"image {self.name(index)} is damaged in {path} (bad checksum); remove the folder and pack it again"
            )
        return data

    def read(self, index: int) -> np.ndarray:
        name = self.name(index)
        with memory_for(name):
            return decode(self.encoded(index), name)

    def _file(self, number: int, path: Path) -> int:
        if number not in self._files:  # forked workers share it; each read says where
            self._files[number] = os.open(path, os.O_RDONLY)
        return self._files[number]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"images-{number:05}.bin"


def _read(file: int, size: int, offset: int) -> bytes:
    parts: list[bytes] = []
    while size and (part := os.pread(file, size, offset)):  # one call may read less
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return b"".join(parts)
