"""A few steps of a pretraining on random images, to see what they take, without a loader.

    python -m pretrain.trial --memory 8589934592 --processes 8 < config.yaml

`launch.py fit` and `benchmark.py growth` start one process per trial, or several that form a group. It prints one line
of JSON: fits, peak_bytes and images_per_second.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode

from . import distributed
from .common.errors import run_command_line
from .config import from_yaml_text
from .loader import Batch
from .objectives import build_objective
from .optim import build_optimizer
from .shares import slice_bounds

_NO_MEMORY = re.compile(
    r"out of memory|not enough memory|can't allocate memory|bad_alloc|could not create a (memory|prim)"
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pretrain.trial", description=__doc__)
    parser.add_argument("--memory", type=int, required=True, help="bytes that the steps may take; 0: all that are free")
    parser.add_argument("--processes", type=int, default=1, help="of the run, of which this one imitates one")
    parser.add_argument("--steps", type=int, default=2, help="timed, after a first one")
    args = parser.parse_args(argv)
    cfg = from_yaml_text(sys.stdin.read(), "the config on standard input")
    print(json.dumps(trial(cfg, args.memory, args.processes, args.steps)))


def trial(cfg: CfgNode, memory: int, processes: int, steps: int) -> dict[str, Any]:
    """Trains with the batch of ``cfg`` on this process's device.

    Args:
        memory: bytes that weights, optimizer and steps may take; 0: all that are free.
        processes: with several, gradients are held twice, as by DistributedDataParallel.
        steps: of which the median time counts.

    Returns:
        ``fits``; if it does, ``peak_bytes`` and ``images_per_second``.
    """
    device = distributed.init(cfg.DEVICE)
    _limit(device, memory)
    before = _peak(device)
    try:
        images, seconds = cfg.SOLVER.IMS_PER_BATCH, seconds_per_step(cfg, device, steps, processes)
    except (RuntimeError, MemoryError) as error:  # a GPU's OutOfMemoryError is a RuntimeError
        if not isinstance(error, MemoryError) and not _NO_MEMORY.search(str(error)):
            raise
        return {"fits": False}
    return {"fits": True, "peak_bytes": _peak(device) - before, "images_per_second": images / seconds}


def _limit(device: torch.device, memory: int) -> None:
    """Makes this process fail where it would take more."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        if 0 < memory < total:
            torch.cuda.set_per_process_memory_fraction(memory / total, device)
        return
    limit = _line("/proc/self/status", "VmData") + (memory or _line("/proc/meminfo", "MemAvailable"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _peak(device: torch.device) -> int:
    """The most bytes that this process has held so far."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else _line("/proc/self/status", "VmHWM")


def _line(file: str, name: str) -> int:
    """Bytes of a line of a file of /proc."""
    return next(int(line.split()[1]) * 1024 for line in Path(file).read_text().splitlines() if line.startswith(name))


def seconds_per_step(cfg: CfgNode, device: torch.device, steps: int, processes: int = 1) -> float:
    """Median of ``steps``, after a first one, in which libraries choose their algorithms; views and data left out.

    Args:
        processes: as in `trial`.
    """
    objective = build_objective(cfg, device, 1, lambda _: None, read_weights=False)
    optimizer = build_optimizer(objective.encoder, cfg.SOLVER)
    scaler = torch.amp.GradScaler(device.type, enabled=cfg.SOLVER.AMP == "fp16")
    first, stop = slice_bounds(cfg.SOLVER.IMS_PER_BATCH, distributed.rank(), distributed.world_size())
    size, index = cfg.VIEWS.IMAGE_SIZE, torch.arange(first, stop)
    copies = [torch.zeros_like(p) for p in objective.encoder.parameters()] if processes > 1 else []
    seconds = []
    for step in range(1 + steps):
        images = torch.randint(0, 256, (1 + cfg.METHOD.NUM_KEYS, len(index), 3, size, size), dtype=torch.uint8)
        images = images.to(device)
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        objective.backward(images, Batch(images, index, index, {}), step, scaler.scale)
        scaler.step(optimizer)
        scaler.update()
        objective.after_step(step)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    del copies
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    run_command_line(main)
