"""Reading images from a folder compared with a tar, with a cold and a warm page cache; reduced decoding."""

import argparse
import io
import os
import tarfile
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image
from tabulate import tabulate

from benchmarks.views import encode_photo
from pretrain.common.errors import UserError
from pretrain.common.files import make_folder
from pretrain.common.images import decode
from pretrain.data import datasets
from pretrain.data.augmentations import AUGMENTATIONS
from pretrain.data.image_data import ImageData
from pretrain.data.loader import VIEW, make_random_stream
from pretrain.data.views import choose_reduction, make_views

_CACHES = ("cold", "warm")
_FILES = {"folder": "images", "tar": "images.tar"}
_COMMENT = 60_000  # bytes
_PHOTO_SIZES = ((500, 375), (1920, 1080), (4000, 3000))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print median images/s of both forms and the median of the rounds' ratios, for photographs and for tiny pictures.

    Photographs show what a loader gets, decoding included. Tiny pictures with long comments, which decode in no time,
    show the reading alone. One process reads all images in random order. Before a cold read, the kernel drops the
    files' pages; it may keep their names and places, which a folder needs more often than a tar.

    Raises:
        UserError: this system cannot drop pages, or --folder cannot be written.
    """
    if not hasattr(os, "posix_fadvise"):
        raise UserError("this system has no posix_fadvise, which empties the page cache; run the benchmark on Linux")
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    make_folder(args.folder)
    contents = {"photographs": encode_photo(), "tiny pictures": _encode_commented()}
    results = {}
    for name, jpeg in contents.items():
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            results[name] = _measure(Path(folder), jpeg, args.images, args.rounds)
    print(f"{args.images} JPEGs of {[len(jpeg) for jpeg in contents.values()]} bytes, one process, in {args.folder}")
    rows = [[name, cache, *results[name][cache].values()] for name in results for cache in _CACHES]
    head = ["images", "page cache", "folder, images/s", "tar, images/s", "tar / folder"]
    print(tabulate(rows, head, floatfmt=("", "", ".0f", ".0f", ".2f")))
    reduced = {f"{width} x {height}": _measure_reduced(width, height, args.rounds) for width, height in _PHOTO_SIZES}
    rows = [[size, *numbers.values()] for size, numbers in reduced.items()]
    head = ["JPEG", "CPU ms per image, full size", "DATALOADER.REDUCED_DECODING", "reduced / full"]
    print(tabulate(rows, head, floatfmt=("", ".1f", ".1f", ".2f")))
    return {"images": args.images, "rounds": args.rounds, "reading": results, "reduced_decoding": reduced}


def _measure_reduced(width: int, height: int, rounds: int) -> dict[str, float]:
    """Return the median CPU milliseconds to decode a photograph and make two views of 224 pixels, and their ratio."""
    jpeg = encode_photo(width, height)
    augmentations = [AUGMENTATIONS["moco_v2"]] * 2
    choosers = {"full": None, "reduced": partial(choose_reduction, augmentations, 224)}
    milliseconds: dict[str, list[float]] = {form: [] for form in choosers}
    for number in range(rounds + 1):
        view_rng = partial(make_random_stream, 0, 0, VIEW, number)
        for form, chooser in choosers.items():
            start = time.process_time()
            make_views(decode(jpeg, "photo", chooser), augmentations, 224, view_rng)
            milliseconds[form].append(1000 * (time.process_time() - start))
    medians = {form: float(np.median(values[1:])) for form, values in milliseconds.items()}  # the first warms up
    return {**medians, "reduced_to_full": medians["reduced"] / medians["full"]}


def _measure(root: Path, jpeg: bytes, count: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return for each state of the page cache the median images/s of both forms, and the median ratio."""
    files = write_images(root, jpeg, count)
    forms = {form: datasets.load(f"{form}:{root / file}", "train") for form, file in _FILES.items()}
    order = np.random.default_rng(0).permutation(count).tolist()
    seconds: dict[tuple[str, str], list[float]] = {(form, cache): [] for form in forms for cache in _CACHES}
    for number in range(rounds):
        for form in list(forms) if number % 2 else list(forms)[::-1]:
            drop_pages(files[form])
            for cache in _CACHES:  # the cold read leaves a warm cache
                seconds[form, cache].append(_time_reads(forms[form], order))
    results: dict[str, dict[str, float]] = {}
    for cache in _CACHES:
        times = {form: np.array(seconds[form, cache]) for form in forms}
        results[cache] = {form: count / float(np.median(values)) for form, values in times.items()}
        results[cache]["tar_to_folder"] = float(np.median(times["folder"] / times["tar"]))
    return results


def _encode_commented() -> bytes:
    """Return a JPEG of 8 x 8 pixels with a long comment."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG", comment=b"x" * _COMMENT)
    return buffer.getvalue()


def write_images(root: Path, jpeg: bytes, count: int) -> dict[str, list[Path]]:
    """Write ``count`` copies of a JPEG to ten folders and to a tar, and return the files of each form."""
    folder = root / _FILES["folder"]
    files = [folder / f"{number % 10:02d}" / f"{number:06d}.jpg" for number in range(count)]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg)
    with tarfile.open(root / _FILES["tar"], "w") as tar:
        for path in files:
            tar.add(path, path.relative_to(folder))
    return {"folder": files, "tar": [root / _FILES["tar"]]}


def drop_pages(files: list[Path]) -> None:
    """Remove the files' pages from the page cache; this needs no privileges."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # the kernel keeps pages that it has not written yet
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _time_reads(data: ImageData, order: list[int]) -> float:
    start = time.perf_counter()
    for index in order:
        data.read(index)
    return time.perf_counter() - start
