"""This project's loader compared with lightly's: MoCo v2 views of the same JPEGs, in turn.

Each run loads one epoch of two views of 224 pixels from 500 x 375 JPEGs, read by one worker process, up to normalized
float32 batches. It is a separate process, pinned to one core with its worker. The first batch, for which the worker
starts, is not in images/s. lightly is used as in its own MoCo v2 example; it decodes and crops by Pillow, whose pixels
differ slightly from ours, and draws other random numbers.
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
from tools.benchmarks.machine import about
from tools.launcher.spec import ROOT
from tools.reporting.seeds import format_mean

# Only the measured processes import torch: a process starts with the peak memory of the one that started it.

SIDES = ("ours", "lightly")
# What is measured: heading, and its digits.
_COLUMNS = {
    "images_per_cpu_second": ("images per CPU s", 1), "images_per_second": ("images/s", 1), "peak_mib": ("peak MiB", 0),
}  # fmt: skip
Runs = dict[str, list[dict[str, float]]]  # by side, what each round measured


def peers(args: argparse.Namespace) -> dict[str, Any]:
    """Prints a Markdown table: the rounds' median (and range), and the ratio of ours to lightly's, paired by round.

    Raises:
        UserError: lightly is not installed, or fewer images than two batches.
        RuntimeError: a measured process failed.
    """
    if not importlib.util.find_spec("lightly"):
        raise UserError("lightly is not installed; `pip install '.[peers]'` installs it")
    if args.images < 128:
        raise UserError(f"--images is {args.images}; it must be at least 128: the first batch of 64 is not timed")
    runs: Runs = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder, "photos")
        make_photos(photos, args.images)
        for number in range(1, args.rounds + 1):  # of which the number is the seed; in alternating order
            for side in SIDES if number % 2 else SIDES[::-1]:
                runs[side].append(_measured(side, photos, number))
                print(f"round {number}, {side}: {json.dumps(runs[side][-1])}", file=sys.stderr)
    setting = f"two MoCo v2 views of 224 pixels from {args.images} JPEGs of 500 x 375 pixels, one worker"
    print(f"{setting}; rounds: {args.rounds}, on one core\n\n{table(runs)}\n")
    return {"environment": about(["lightly"], 1), "loading": {"setting": setting, "runs": runs}}


def _measured(side: str, photos: Path, seed: int) -> dict[str, float]:
    """What one run measured, in a new process."""
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    command = [sys.executable, "-W", "ignore", "-m", "tools.benchmarks.peers_run", side, str(photos), str(seed)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **limits}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{side} ended with exit status {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(runs: Runs) -> str:
    """A Markdown table: a row per side, then the mean over rounds of ours to lightly's, with its 95% interval."""
    columns = list(runs["ours"][0])
    rows = [[side] for side in SIDES] + [["ours to lightly"]]
    for column in columns:
        digits = _COLUMNS[column][1]
        sides = [[measured[column] for measured in runs[side]] for side in SIDES]
        for row, values in zip(rows, sides, strict=False):
            median, *ends = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
            row.append(f"{median} ({' to '.join(ends)})")
        rows[2].append(format_mean([ours / theirs for ours, theirs in zip(*sides, strict=True)], 2))
    heads = ["", *(_COLUMNS[column][0] for column in columns)]
    return tabulate(rows, heads, "pipe", disable_numparse=True, colalign=["left", *["right"] * len(columns)])


def make_photos(folder: Path, count: int) -> None:
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
