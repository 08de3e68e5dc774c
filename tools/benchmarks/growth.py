"""How a step's time and memory grow with M', K, D, N, the image size, the parts of a batch and the processes."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from pretrain.common.errors import UserError
from pretrain.common.run_folder import atomic_write, write_json
from pretrain.config import load_config
from tools.benchmarks.machine import about
from tools.launcher.spec import ROOT
from tools.reporting import charts

_BASE = {
    "METHOD.NAME": "jcl", "METHOD.NUM_KEYS": 2, "MODEL.ARCH": "resnet18", "MODEL.QUEUE_SIZE": 4096,
    "MODEL.EMBEDDING_DIM": 128, "MODEL.BN_GROUPS": 4, "VIEWS.IMAGE_SIZE": 64, "SOLVER.IMS_PER_BATCH": 32,
    "DEVICE": "cpu",
}  # fmt: skip
# What varies, its values, and why time and memory grow as they do.
_VARIED = {
    "M'": ("METHOD.NUM_KEYS", (1, 2, 4, 8), "a forward pass per key, beside the query's forward and backward pass"),
    "K": (
        "MODEL.QUEUE_SIZE",
        (4096, 16384, 65536, 262144),
        "the loss reads the queue once; the encoders do not know it",
    ),
    "D": ("MODEL.EMBEDDING_DIM", (64, 128, 256, 512), "the head's last layer and the queue, small beside a ResNet"),
    "N": ("SOLVER.IMS_PER_BATCH", (16, 32, 64, 128), "every image costs the same; weights and optimizer do not grow"),
    "image side": ("VIEWS.IMAGE_SIZE", (32, 64, 128, 256), "convolutions: the number of pixels, the side squared"),
    "parts": ("SOLVER.ACCUMULATE", (1, 2, 4), "only one part's activations are held; its convolutions are smaller"),
    "processes": ("", (1, 2, 4), "the batch is divided, and every process holds the weights; limited by the cores"),
}


def growth(args: argparse.Namespace) -> None:
    """Prints, for each quantity, a row per value, and the exponents p of time ~ x^p and memory ~ x^p.

    Times are of a step on one thread per process, medians of ``--rounds`` steps; memory is the peak of one process
    above what it held before. An exponent is fitted to the upper half of the values, where constant parts matter least.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, (key, values, why) in _VARIED.items():
        points = [_measure(key, value, args.rounds) for value in values]
        found[name] = {"values": values, "milliseconds": [ms for ms, _ in points], "mib": [mib for _, mib in points]}
        upper = slice(-max(2, len(values) // 2), None)
        for what in ("milliseconds", "mib"):
            x, y = np.log(values[upper]), np.log(found[name][what][upper])
            found[name][f"{what}_exponent"] = float(np.polyfit(x, y, 1)[0])
        found[name]["why"] = why
        print(f"\n{name}: time ~ {name}^{found[name]['milliseconds_exponent']:.2f}, "
              f"memory ~ {name}^{found[name]['mib_exponent']:.2f}; {why}")  # fmt: skip
        rows = [[value, ms, mib] for value, (ms, mib) in zip(values, points, strict=True)]
        print(tabulate(rows, [name, "ms per step", "peak MiB"], floatfmt=("", ".0f", ".0f")), flush=True)
    if args.json:
        write_json(args.json, {**about([], 1), "base": _BASE, "growth": found})
    if args.plot:
        atomic_write(Path(args.plot), charts.svg(lambda: _draw(found)))


def _measure(key: str, value: int, steps: int) -> tuple[float, float]:
    """Milliseconds and MiB of a step where ``key`` has ``value``; without a key, on so many processes."""
    words = {**_BASE, **({key: value} if key else {})}
    config = load_config(None, [str(word) for pair in words.items() for word in pair]).dump()
    ranks = 1 if key else value
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        if ranks > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        command = [sys.executable, "-m", "pretrain.trial", "--memory", "0", "--steps", str(steps)]
        processes.append(
            subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )  # fmt: skip
    for process in processes:  # all read before any is waited for
        assert process.stdin
        process.stdin.write(config)
        process.stdin.close()
        process.stdin = None
    outputs = [process.communicate() for process in processes]
    if any(process.returncode for process in processes):
        raise UserError(f"a step with {key or 'processes'} {value} failed: {outputs[0][1].strip()[-300:]}")
    first = json.loads(outputs[0][0].splitlines()[-1])
    if not first["fits"]:
        raise UserError(f"a step with {key or 'processes'} {value} does not fit into this machine's memory")
    images = words["SOLVER.IMS_PER_BATCH"]
    return 1e3 * images / first["images_per_second"], first["peak_bytes"] / 2**20


def _draw(found: dict[str, dict[str, Any]]) -> Any:
    """Time and memory over each quantity, relative to its smallest value."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    styles = charts.looks(list(found))
    for axes, what, title in zip(
        figure.subplots(1, 2), ("milliseconds", "mib"), ("time per step", "peak memory"), strict=True
    ):
        for name, one in found.items():
            x, y = np.array(one["values"], float), np.array(one[what])
            axes.plot(x / x[0], y / y[0], color=styles[name][0], linestyle=styles[name][1], marker="o", markersize=3,
                      label=f"{name} ({one[f'{what}_exponent']:.2f})")  # fmt: skip
        axes.set(xscale="log", yscale="log", title=f"{title} (exponent)", xlabel="times the smallest value")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(2))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_locator(NullLocator())
        axes.legend(fontsize=7, loc="upper right")
    return figure
