"""This project's pretraining beside other libraries': MoCo v2 of the same JPEGs, in turn.

Two settings, each measured run in a process of its own, which is pinned to one core with its workers:

- ``loading``, which the loader bounds: one epoch of two MoCo v2 views of 224 pixels from 500 x 375 JPEGs, read by one
  worker process, up to normalized float32 batches. The first batch, for which the worker starts, is not in the rate.
- ``training``, which computing bounds: a whole run of the demo's MoCo v2 (ResNet-18, digits) without its imports; then
  this project's kNN scores both backbones on the same images.

A peer is used as its own MoCo v2 example does, with the recipe's images, views, batch, epochs, optimizer, learning
rates, temperature, queue, head, key momentum and workers. These differences remain:

- Batch norm: in a single process this project normalizes two halves of the batch separately, in place of ShuffleBN.
  lightly's example normalizes the whole batch.
- lightly decodes and crops by Pillow, whose pixels differ slightly from ours, and draws other random numbers.
- Each writes all state at its end, this project twice (the last step's checkpoint, then the final one). This project
  also writes a log, metrics and TensorBoard events.

Not a peer, although the package index has it: solo-learn 1.0 needs torch 1.9; lightning-bolts 0.7 needs
pytorch-lightning 1; mmpretrain 1.2's MoCo v2 views fail with NumPy 2 (mmcv 2.2 puts negative numbers into uint8), and
it replaces headless OpenCV; lightly-train has no MoCo.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from tabulate import tabulate

from pretrain.common.errors import UserError
from pretrain.common.run_folder import check_writable, read_json, write_json
from tools import make_data
from tools.benchmarks.machine import about
from tools.reporting.groups import mean_and_interval

# Only the measured processes import torch: a process starts with the peak memory of the one that started it.

OURS = "this project"
PEERS = ("lightly",)  # distributions; the module of that name in this folder runs it
_ROOT = Path(__file__).resolve().parents[3]
_SETTINGS = {
    "loading": "two MoCo v2 views of 224 pixels from {images} JPEGs of 500 x 375 pixels, one worker",
    "training": "configs/examples/demo_mocov2_R18_digits.yaml (MoCo v2, ResNet-18, no worker), {epochs} epochs",
}
# What is measured: heading, digits, and whether our distance to a peer is a ratio or a difference.
_COLUMNS = {
    "images_per_cpu_second": ("images per CPU s", 1, "ratio"),
    "images_per_second": ("images/s", 1, "ratio"),
    "peak_mib": ("peak MiB", 0, "ratio"),
    "knn_top1": ("kNN top-1", 2, "difference"),
}
Runs = dict[str, list[dict[str, float]]]  # by side, what each round measured


def peers(args: argparse.Namespace) -> None:
    """Prints a Markdown table per setting: the rounds' median (and range), and ours to each peer's, paired by round.

    Raises:
        UserError: no peer is installed, fewer images than two batches, or ``--json`` cannot be written.
        RuntimeError: a measured process failed.
    """
    found = [name for name in PEERS if importlib.util.find_spec(name)]
    if not found:
        raise UserError(f"{', '.join(PEERS)} is not installed; `pip install '.[peers]'` installs it")
    if args.images < 128:
        raise UserError(f"--images is {args.images}; it must be at least 128: the first batch of 64 is not timed")
    if args.json:
        check_writable(args.json)
    result: dict[str, Any] = {"environment": about(found, 1)}
    with tempfile.TemporaryDirectory() as folder:
        for setting, title in _SETTINGS.items():
            data = Path(folder, setting)
            if setting == "loading":
                _make_photos(data, args.images)
            else:
                _make_digits(data)
            runs = _rounds(setting, [OURS, *found], data, args)
            title = f"{setting}: {title.format(images=args.images, epochs=args.epochs)}"
            ratios = {name: ours_to_peer(runs[OURS], runs[name]) for name in found}
            result[setting] = {"setting": title, "runs": runs, "ours_to_peer": ratios}
            print(f"{title}; rounds: {args.rounds}, on one core\n\n{table(runs, ratios)}\n")
            if args.json:
                write_json(args.json, result)


def _rounds(setting: str, sides: list[str], data: Path, args: argparse.Namespace) -> Runs:
    """Every side once per round, with the round's number as its seed, in alternating order (as `timed_rounds`)."""
    runs: Runs = {name: [] for name in sides}
    for number in range(1, args.rounds + 1):
        for name in sides if number % 2 else sides[::-1]:
            request = {"setting": setting, "side": name, "data": str(data), "seed": number, "epochs": args.epochs}
            runs[name].append(_measured(request))
            print(f"{setting}, round {number}, {name}: {json.dumps(runs[name][-1])}", file=sys.stderr)
    return runs


def _measured(request: dict[str, Any]) -> dict[str, float]:
    """What one run measured, in a new process with a working folder of its own."""
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    command = [sys.executable, "-W", "ignore", "-m", "tools.benchmarks.peers.run"]
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder, "request.json"), request)
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": path, **limits}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        if done.returncode:
            what = f"{request['setting']} by {request['side']}"
            raise RuntimeError(f"{what} ended with exit status {done.returncode}:\n{done.stdout[-4000:]}")
        return read_json(Path(folder, "result.json"))


def ours_to_peer(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, Any]:
    """By column, mean and half the 95% interval (None for one round) of our ratio or difference to a peer."""
    out = {}
    for column in ours[0]:
        pairs = [(one[column], other[column]) for one, other in zip(ours, theirs, strict=True)]
        is_ratio = _COLUMNS[column][2] == "ratio"
        mean, half = mean_and_interval([one / other if is_ratio else one - other for one, other in pairs])
        out[column] = {"mean": mean, "interval": half}
    return out


def table(runs: Runs, ratios: dict[str, dict[str, Any]]) -> str:
    """A Markdown table: a row per side, then a row per peer with ours to theirs."""
    columns, rows = list(runs[OURS][0]), []
    for name, measured in runs.items():
        cells = [name if name == OURS else f"{name} {metadata.version(name)}"]
        for column in columns:
            digits, values = _COLUMNS[column][1], [run[column] for run in measured]
            cells.append(f"{statistics.median(values):.{digits}f}")
            if len(values) > 1:
                cells[-1] += f" ({min(values):.{digits}f} to {max(values):.{digits}f})"
        rows.append(cells)
    for name, of_column in ratios.items():
        cells = [f"ours to {name}"]
        for column in columns:
            sign = "+" if _COLUMNS[column][2] == "difference" else ""
            mean, half = of_column[column]["mean"], of_column[column]["interval"]
            cells.append(f"{mean:{sign}.2f}" + ("" if half is None else f" ± {half:.2f}"))
        rows.append(cells)
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


def _make_digits(folder: Path) -> None:
    """Writes the demo's image folder; its COCO scenes are not needed."""
    with contextlib.redirect_stdout(sys.stderr):
        make_data.main(["digits", str(folder), "--scenes", "1", "--val-scenes", "1"])
