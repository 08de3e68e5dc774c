"""This project's loader compared with lightly's: MoCo v2 views of the same JPEGs, with both loaders in turn.

    python -m studies.lightly.compare --output build/lightly.json

Each run loads one epoch of two views of 224 pixels from 500 x 375 JPEGs, read by one worker process, up to normalized
float32 batches. It is a separate process, pinned to one core with its worker. The first batch, during which the worker
starts, does not count in images/s. lightly is used as in its own MoCo v2 example; it decodes and crops with Pillow,
whose pixels differ slightly from ours, and draws other random numbers.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    from pretrain.common.command_line import run_program

    run_program("studies.lightly.compare")

from tabulate import tabulate

from benchmarks.machine import describe_environment
from pretrain.common.errors import UserError
from pretrain.common.files import check_writable, write_json
from tools import ROOT
from tools.reporting.seeds.statistics import format_mean

# Only the measured processes import torch, because a process inherits the peak memory of its parent.

SIDES = ("ours", "lightly")
_COLUMNS = {  # measured value -> heading and number of decimals
    "images_per_cpu_second": ("images per CPU s", 1),
    "images_per_second": ("images/s", 1),
    "peak_mib": ("peak MiB", 0),
}
Runs = dict[str, list[dict[str, float]]]  # side -> values measured in each round


def main(argv: Sequence[str] | None = None) -> None:
    """Print a Markdown table: the rounds' median (and range), and the ratio of ours to lightly's, paired by round.

    Raises:
        UserError: lightly is not installed, the output cannot be written, or there are fewer images than two batches.
        RuntimeError: a measured process failed.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", required=True, metavar="FILE", help="file for the numbers")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default: 5)")
    parser.add_argument("--images", type=int, default=2048, help="number of JPEGs to load (default: 2048)")
    args = parser.parse_args(argv)
    check_writable(args.output, "--output")
    if not importlib.util.find_spec("lightly"):
        raise UserError("lightly is not installed; `pip install '.[peers]'` installs it")
    if args.images < 128:
        raise UserError(f"--images is {args.images}; it must be at least 128: the first batch of 64 is not timed")
    runs: Runs = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder, "photos")
        make_photos(photos, args.images)
        for number in range(1, args.rounds + 1):  # the round number is the seed; the order alternates
            for side in SIDES if number % 2 else SIDES[::-1]:
                runs[side].append(_measure(side, photos, number))
                print(f"round {number}, {side}: {json.dumps(runs[side][-1])}", file=sys.stderr)
    setting = f"two MoCo v2 views of 224 pixels from {args.images} JPEGs of 500 x 375 pixels, one worker"
    print(f"{setting}; rounds: {args.rounds}, on one core\n\n{format_table(runs)}\n")
    environment = {**describe_environment("lightly"), "threads_per_process": 1}
    numbers = {"environment": environment, "loading": {"setting": setting, "runs": runs}}
    write_json(args.output, numbers)


def _measure(side: str, photos: Path, seed: int) -> dict[str, float]:
    """Run one side in a new process and return its measured values."""
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    command = [sys.executable, "-W", "ignore", "-m", "studies.lightly.measure", side, str(photos), str(seed)]
    process = subprocess.run(command, cwd=ROOT, env={**os.environ, **limits}, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{side} ended with exit status {process.returncode}:\n{process.stderr[-4000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def format_table(runs: Runs) -> str:
    """Return a Markdown table: a row per side, and the mean ratio of ours to lightly's with its 95% interval."""
    columns = list(runs["ours"][0])
    rows = [[side] for side in SIDES] + [["ours to lightly"]]
    for column in columns:
        decimals = _COLUMNS[column][1]
        sides = [[values[column] for values in runs[side]] for side in SIDES]
        for row, values in zip(rows, sides, strict=False):
            summary = (statistics.median(values), min(values), max(values))
            median, lowest, highest = (f"{value:.{decimals}f}" for value in summary)
            row.append(f"{median} ({lowest} to {highest})")
        rows[2].append(format_mean([ours / lightly for ours, lightly in zip(*sides, strict=True)], 2))
    head = ["", *(_COLUMNS[column][0] for column in columns)]
    return tabulate(rows, head, "pipe", disable_numparse=True, colalign=["left", *["right"] * len(columns)])


def make_photos(folder: Path, count: int) -> None:
    """Write JPEGs of 500 x 375 pixels, which are random crops of two photographs."""
    import cv2
    import numpy as np
    from sklearn.datasets import load_sample_images

    from tools.data.coco_writer import write_jpeg

    folder.mkdir()
    rng = np.random.default_rng(0)
    photos = load_sample_images().images
    for number in range(count):
        photo = photos[number % len(photos)]
        height = int(rng.integers(photo.shape[0] // 2, photo.shape[0] + 1))
        width = height * 4 // 3
        top = rng.integers(photo.shape[0] - height + 1)
        left = rng.integers(photo.shape[1] - width + 1)
        crop = photo[top : top + height, left : left + width]
        write_jpeg(folder / f"{number:05d}.jpg", cv2.resize(crop, (500, 375), interpolation=cv2.INTER_CUBIC))
