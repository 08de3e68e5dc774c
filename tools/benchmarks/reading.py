"""Images from a folder of small files and from packed ones, in an epoch's order, with a cold and a warm page cache."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_image
from tabulate import tabulate

from pretrain import datasets
from pretrain.common.image_io import read_file
from pretrain.common.run_folder import write_json
from pretrain.datasets import ImageData
from pretrain.datasets.packed import Packed
from tools import make_data
from tools.benchmarks.machine import about

_KINDS = 200  # different images, each written many times: the disk does not know
_CACHES = Path("/proc/sys/vm/drop_caches")


def reading(args: argparse.Namespace) -> None:
    """Prints images per second of both, of their bytes alone and decoded, medians over rounds in turn, in one process.

    The cold rows need root, to drop the page cache; each reads images that no earlier one has read.
    """
    folder = Path(tempfile.mkdtemp(prefix="reading-", dir=args.folder))
    try:
        _write(folder / "images", args.images, args.side)
        make_data.main(["pack", str(folder / "images"), str(folder / "packed")])
        data = {name: datasets.load(f"{name}:{folder / place}", "train", "", False)
                for name, place in (("folder", "images"), ("packed", "packed"))}  # fmt: skip
        size = sum(path.stat().st_size for path in (folder / "packed").rglob("*.bin"))
        rates = _measure(data, args.rounds, min(2000, args.images // (4 * args.rounds)))
    finally:
        shutil.rmtree(folder)
    rows = [[what, one["folder"], one["packed"], one["packed"] / one["folder"]] for what, one in rates.items()]
    print(f"{args.images} JPEGs of {args.side} pixels, {size / args.images / 1000:.1f} kB each, one process; images/s")
    print(tabulate(rows, ["", "folder", "packed", "ratio"], floatfmt=("", ".0f", ".0f", ".2f")))
    if args.json:
        write_json(args.json, {**about([], 1), "images": args.images, "side": args.side, "bytes": size, "rates": rates})


def _write(folder: Path, count: int, side: int) -> None:
    rng, photo = np.random.default_rng(0), Image.fromarray(load_sample_image("china.jpg"))
    encoded = []
    for _ in range(min(_KINDS, count)):
        left, top = rng.integers(photo.width // 2).item(), rng.integers(photo.height // 2).item()
        buffer = io.BytesIO()
        photo.resize((side, side), box=(left, top, left + photo.width // 2, top + photo.height // 2)).save(
            buffer, "JPEG"
        )
        encoded.append(buffer.getvalue())
    for number in range(count):
        path = folder / f"{number // 1000:04}" / f"{number:07}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded[number % len(encoded)])


def _measure(data: dict[str, ImageData], rounds: int, at_once: int) -> dict[str, dict[str, float]]:
    """Median images per second: what is read -> where from -> rate."""
    order, next_one = np.random.default_rng(1).permutation(len(data["folder"])), 0
    cold = ["cold cache, bytes", "cold cache, decoded"] if _drop_caches() else []
    rates: dict[str, dict[str, float]] = {}
    for what in [*cold, "warm cache, bytes", "warm cache, decoded"]:
        found: dict[str, list[float]] = {name: [] for name in data}
        for number in range(rounds):
            positions = order[next_one : next_one + at_once]
            next_one += at_once
            for name in list(data) if number % 2 else list(data)[::-1]:
                read = data[name].read if what.endswith("decoded") else _bytes_of(data[name])
                if what in cold:
                    _drop_caches()
                else:
                    _seconds(read, positions)
                found[name].append(at_once / _seconds(read, positions))
        rates[what] = {name: statistics.median(values) for name, values in found.items()}
    return rates


def _bytes_of(data: ImageData) -> Callable[[int], bytes]:
    source = data.source
    return source.encoded if isinstance(source, Packed) else lambda index: read_file(source.name(index))


def _seconds(read: Callable[[int], object], positions: np.ndarray) -> float:
    began = time.perf_counter()
    for position in positions.tolist():
        read(position)
    return time.perf_counter() - began


def _drop_caches() -> bool:
    """Empties the page cache, with names and attributes of files; False: not permitted."""
    os.sync()
    with contextlib.suppress(OSError):
        _CACHES.write_text("3")
        return True
    return False
