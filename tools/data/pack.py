"""Packs an image folder into a few large files (see `pretrain.datasets.packed`), as they are or scaled down."""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save
from tqdm import tqdm

from pretrain import datasets
from pretrain.common.errors import UserError
from pretrain.common.image_io import Files, decode, read_file
from pretrain.common.run_folder import atomic_write, remove, replacing
from pretrain.datasets import ImageData, MissingSplit, folders
from pretrain.datasets.packed import EVERY_SPLIT, FORMAT, INDEX, load_packed, shard_path

_IMAGES = 20_000  # of a file; 2 GB of ImageNet
_AT_ONCE, _THREADS = 256, 8  # images in memory, and those that are read or scaled at the same time


def splits_of(source: Path) -> dict[str, ImageData]:
    """The splits of an image folder that there are, or all its images as one.

    Raises:
        UserError: there are no images.
    """
    if folders.split_folder(source, "train")[0] == source:
        return {EVERY_SPLIT: datasets.load(f"folder:{source}", "train")}
    found: dict[str, ImageData] = {}
    for split in ("train", "val"):
        with contextlib.suppress(MissingSplit):
            found[split] = datasets.load(f"folder:{source}", split)
    return found


def digest(data: ImageData) -> str:
    """Changes with any name, its order and its label."""
    files, labels = data.source, b"" if data.labels is None else data.labels.tobytes()
    assert isinstance(files, Files)
    return hashlib.sha256(files.text.tobytes() + files.ends.tobytes() + labels).hexdigest()


def write_packed(folder: Path, splits: Mapping[str, ImageData], longest_side: int, quality: int) -> None:
    """Fills ``folder``, or what an earlier call with the same arguments has left to do.

    Args:
        splits: of image folders.
        longest_side: in pixels; larger images are scaled down to it and become JPEGs. 0: every file is kept as it is.
        quality: of these JPEGs, from 1 to 100.

    Raises:
        UserError: an image that cannot be read or, where it is scaled, decoded; the disk is full.
    """
    for path in folder.rglob(".*.tmp*"):  # left by a killed run
        remove(path)
    for split, data in splits.items():
        if not (folder / split / INDEX).is_file():
            _pack_split(data, folder / split, longest_side, quality, split)
        packed = load_packed(folder, split).source
        for index in tqdm(range(len(data)), desc=f"verifying {split}", unit="image", disable=None):
            packed.encoded(index)  # pyright: ignore[reportAttributeAccessIssue]
        for part in (folder / split).glob("images-*.safetensors"):
            remove(part)


def _pack_split(data: ImageData, folder: Path, longest_side: int, quality: int, split: str) -> None:
    files = data.source
    assert isinstance(files, Files)
    shards, ends, checksums = [], [np.zeros(1, np.int64)], [np.zeros(0, np.uint32)]
    with (
        tqdm(total=len(data), desc=f"packing {split}", unit="image", disable=None) as bar,
        ThreadPoolExecutor(_THREADS) as pool,
    ):
        for number, first in enumerate(range(0, len(data), _IMAGES)):
            indices = range(first, min(first + _IMAGES, len(data)))
            part = shard_path(folder, number).with_suffix(".safetensors")
            if not part.is_file():
                sizes, sums = [], []
                with replacing(shard_path(folder, number)) as file:
                    for encoded in _encoded(files, indices, longest_side, quality, pool):
                        file.write(encoded)
                        sizes.append(len(encoded))
                        sums.append(zlib.crc32(encoded))
                        bar.update()
                arrays = {"ends": np.cumsum(sizes, dtype=np.int64), "checksums": np.array(sums, np.uint32)}
                atomic_write(part, save(arrays))
            else:
                bar.update(len(indices))
            with safe_open(part, "numpy") as opened:
                ends.append(opened.get_tensor("ends") + ends[-1][-1])
                checksums.append(opened.get_tensor("checksums"))
            shards.append(int(ends[-1][-1] - ends[-2][-1]))
    arrays = {"ends": np.concatenate(ends[1:]), "checksums": np.concatenate(checksums), "names": files.text,
              "name_ends": files.ends}  # fmt: skip
    if data.labels is not None:
        arrays["labels"] = data.labels
    about: dict[str, Any] = {"format": FORMAT, "shards": shards, "classes": data.classes}
    atomic_write(folder / INDEX, save(arrays, {"packed": json.dumps(about)}))


def _encoded(
    files: Files, indices: range, longest_side: int, quality: int, pool: ThreadPoolExecutor
) -> Iterator[bytes]:
    """The bytes of each image, in order, a few in memory at a time."""
    for start in range(0, len(indices), _AT_ONCE):
        names = map(files.name, indices[start : start + _AT_ONCE])
        yield from pool.map(lambda name: _shrunk(read_file(name), name, longest_side, quality), names)


def _shrunk(encoded: bytes, name: str, longest_side: int, quality: int) -> bytes:
    """The same bytes, or a JPEG of the upright image whose longer side has ``longest_side`` pixels."""
    if not longest_side:
        return encoded
    image = decode(encoded, name)
    scale = longest_side / max(image.shape[:2])
    if scale >= 1:
        return encoded
    height, width = (max(1, round(scale * side)) for side in image.shape[:2])
    image = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)
    done, jpeg = cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, quality])
    if not done:
        raise UserError(f"image {name} cannot be encoded as a JPEG")
    return jpeg.tobytes()
