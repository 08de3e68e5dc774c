"""VIEWS.EXECUTOR auto: times both ways to finish the views before the first step, and takes the faster one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch
from fvcore.common.config import CfgNode

from . import trial
from .common import process_group
from .datasets import ImageData
from .loader import Batch, build_loader
from .recipes import Recipe
from .view_ops import finish


def settle(
    cfg: CfgNode, earlier: str, data: ImageData, recipes: Sequence[Recipe], device: torch.device,
    log: Callable[[str], None],
) -> CfgNode:  # fmt: skip
    """``cfg`` with cpu or device for auto, the same on every rank.

    The two differ by rounding, so a resumed run keeps its choice, and its config names it.

    Args:
        earlier: what the run began with; empty: it begins now.
        recipes: one per view.
        log: takes a line for the log.
    """
    if cfg.VIEWS.EXECUTOR != "auto":
        return cfg
    chosen = earlier
    if not chosen:
        mine = process_group.on_every_rank(lambda: _seconds(cfg, data, recipes, device))
        each = process_group.gather_objects(mine)
        slowest = {executor: max(rank[executor] for rank in each) for executor in each[0]}
        chosen = min(slowest, key=slowest.__getitem__)
        times = ", ".join(f"{executor} {seconds:.3f}" for executor, seconds in slowest.items())
        log(f"VIEWS.EXECUTOR auto: {chosen} (seconds per step: {times})")
    cfg = cfg.clone()
    cfg.defrost()
    cfg.VIEWS.EXECUTOR = chosen
    cfg.freeze()
    return cfg


def _seconds(cfg: CfgNode, data: ImageData, recipes: Sequence[Recipe], device: torch.device) -> dict[str, float]:
    """Of a step under each executor on this rank, as long as its slower part: the workers' or the device's."""
    sizes = {"size": cfg.VIEWS.IMAGE_SIZE, "batch_size": cfg.SOLVER.IMS_PER_BATCH}
    loaders = {name: build_loader(cfg, data, recipes, device, executor=name, **sizes) for name in ("cpu", "device")}
    step = trial.seconds_per_step(cfg, device, 3)
    workers = min(cfg.DATALOADER.NUM_WORKERS, len(os.sched_getaffinity(0)))
    seconds = {}
    for executor, loader in loaders.items():
        loader.here(0)  # reads the disk, and libraries prepare themselves
        began = time.perf_counter()
        batch = loader.here(0)
        loading = time.perf_counter() - began
        finishing = _finishing(batch, device) if executor == "device" else 0.0
        seconds[executor] = max(step + finishing, loading / workers) if workers else step + finishing + loading
    return seconds


def _finishing(batch: Batch, device: torch.device) -> float:
    """Seconds in which ``device`` finishes the views of a batch."""
    began = 0.0
    for _ in range(2):  # the first time, libraries prepare themselves
        began = time.perf_counter()
        finish(batch.views_VNCHW.to(device), batch.programs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter() - began
