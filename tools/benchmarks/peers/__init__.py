"""This project's pretraining compared with lightly's: MoCo v2 of the same JPEGs, in turn.

Two settings, each measured run in a separate process, which is pinned to one core with its workers:

- ``loading``, which the loader bounds: one epoch of two MoCo v2 views of 224 pixels from 500 x 375 JPEGs, read by one
  worker process, up to normalized float32 batches. The first batch, for which the worker starts, is not in the rate.
- ``training``, which computing bounds: a whole run of the demo's MoCo v2 (ResNet-18, digits) without its imports; then
  this project's kNN scores both backbones on the same images.

lightly is used as its own MoCo v2 example does, with the recipe's images, views, batch, epochs, optimizer, learning
rates, temperature, queue, head, key momentum and workers. These differences remain:

- Batch norm: in a single process this project normalizes two halves of the batch separately, in place of ShuffleBN.
  lightly's example normalizes the whole batch.
- lightly decodes and crops by Pillow, whose pixels differ slightly from ours, and draws other random numbers.
- Each writes all state at its end, this project twice (the last step's checkpoint, then the final one). This project
  also writes a log, metrics and TensorBoard events.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tabulate import tabulate

from pretrain.common.errors import UserError
from pretrain.common.run_folder import read_json, write_json
from tools import make_data
from tools.benchmarks.machine import about
from tools.reporting.groups import with_interval

# Only the measured processes import torch: a process starts with the peak memory of the one that started it.

SIDES = ("ours", "lightly")  # modules of this folder
_ROOT = Path(__file__).resolve().parents[3]
_SETTINGS = {
    "loading": "two MoCo v2 views of 224 pixels from {images} JPEGs of 500 x 375 pixels, one worker",
    "training": "configs/examples/demo_mocov2_R18_digits.yaml (MoCo v2, ResNet-18, no worker), {epochs} epochs",
}
# What is measured: heading, and its digits.
_COLUMNS = {
    "images_per_cpu_second": ("images per CPU s", 1), "images_per_second": ("images/s", 1), "peak_mib": ("peak MiB", 0),
    "knn_top1": ("kNN top-1", 2),
}  # fmt: skip
Runs = dict[str, list[dict[str, float]]]  # by side, what each round measured


def peers(args: argparse.Namespace) -> dict[str, Any]:
    """Prints a Markdown table per setting: the rounds' median (and range), and ours to lightly's, paired by round.

    Raises:
        UserError: lightly is not installed, or fewer images than two batches.
        RuntimeError: a measured process failed.
    """
    if not importlib.util.find_spec("lightly"):
        raise UserError("lightly is not installed; `pip install '.[peers]'` installs it")
    if args.images < 128:
        raise UserError(f"--images is {args.images}; it must be at least 128: the first batch of 64 is not timed")
    result: dict[str, Any] = {"environment": about(["lightly"], 1)}
    with tempfile.TemporaryDirectory() as folder:
        for setting, title in _SETTINGS.items():
            data = Path(folder, setting)
            if setting == "loading":
                _make_photos(data, args.images)
            else:
                make_data.main(["digits", str(data), "--scenes", "1", "--val-scenes", "1"])
            runs: Runs = {side: [] for side in SIDES}
            for number in range(1, args.rounds + 1):  # of which the number is the seed; in alternating order
                for side in SIDES if number % 2 else SIDES[::-1]:
                    request = {"setting": setting, "side": side, "data": str(data), "seed": number}
                    runs[side].append(_measured(request | {"epochs": args.epochs}))
                    print(f"{setting}, round {number}, {side}: {json.dumps(runs[side][-1])}", file=sys.stderr)
            title = f"{setting}: {title.format(images=args.images, epochs=args.epochs)}"
            print(f"{title}; rounds: {args.rounds}, on one core\n\n{table(runs)}\n")
            result[setting] = {"setting": title, "runs": runs}
    return result


def _measured(request: dict[str, Any]) -> dict[str, float]:
    """What one run measured, in a new process with its own working folder."""
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    command = [sys.executable, "-W", "ignore", "-m", "tools.benchmarks.peers.run"]
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder, "request.json"), request)
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": str(_ROOT), **limits}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        if done.returncode:
            what = f"{request['setting']} by {request['side']}"
            raise RuntimeError(f"{what} ended with exit status {done.returncode}:\n{done.stdout[-4000:]}")
        return read_json(Path(folder, "result.json"))


def table(runs: Runs) -> str:
    """A Markdown table: a row per side, then the mean over rounds of ours to lightly's, with its 95% interval.

    That is a ratio; of accuracy it is a difference.
    """
    columns = list(runs["ours"][0])
    rows = [[side] for side in SIDES] + [["ours to lightly"]]
    for column in columns:
        digits = _COLUMNS[column][1]
        sides = [[measured[column] for measured in runs[side]] for side in SIDES]
        for row, values in zip(rows, sides, strict=False):
            median, *ends = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
            row.append(f"{median} ({' to '.join(ends)})")
        pairs, is_score = list(zip(*sides, strict=True)), column == "knn_top1"
        compared = [ours - other if is_score else ours / other for ours, other in pairs]
        rows[2].append(with_interval(compared, 2, "+" if is_score else ""))
    heads = ["", *(_COLUMNS[column][0] for column in columns)]
    return tabulate(rows, heads, "pipe", disable_numparse=True, colalign=["left", *["right"] * len(columns)])


def _make_photos(folder: Path, count: int) -> None:
    """Writes JPEGs of 500 x 375 pixels: random parts of two photographs."""
    import cv2
    import numpy as np
    from sklearn.datasets import load_sample_images

    from tools.data.coco_writer import write_jpeg

    folder.mkdir()
    rng, photos = np.random.default_rng(0), load_sample_images().images
    for number in range(count):
        photo = photos[number % len(photos)]
        height = int(rng.integers(photo.shape[0] // 2, photo.shape[0] + 1))
        width = height * 4 // 3
        top, left = rng.integers(photo.shape[0] - height + 1), rng.integers(photo.shape[1] - width + 1)
        part = photo[top : top + height, left : left + width]
        write_jpeg(folder / f"{number:05d}.jpg", cv2.resize(part, (500, 375), interpolation=cv2.INTER_CUBIC))
