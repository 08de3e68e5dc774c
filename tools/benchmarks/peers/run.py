"""One measured run, in a separate process: reads request.json in the working folder and writes result.json there.

A side is a module with ``load(cfg)``, which yields the number of images of each batch of an epoch, and ``train(cfg)``,
which returns where it has written its checkpoint.
"""

from __future__ import annotations

import importlib
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pretrain.common.run_folder import read_json, write_json
from pretrain.config import load_config
from pretrain.probe import knn
from pretrain.probe.data import probe_data
from pretrain.probe.features import load_frozen

_RECIPE = Path(__file__).resolve().parents[3] / "configs/examples/demo_mocov2_R18_digits.yaml"
_RSS_PER_MIB = 2**20 if sys.platform == "darwin" else 2**10


def main() -> None:
    if hasattr(os, "sched_setaffinity"):  # workers and threads inherit it: no side gains by using more cores
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    request = read_json("request.json")
    side = importlib.import_module(f"tools.benchmarks.peers.{request['side']}")
    random.seed(request["seed"])
    np.random.seed(request["seed"])
    torch.manual_seed(request["seed"])
    measure = {"loading": loading, "training": training}[request["setting"]]
    write_json("result.json", measure(side, request))


def loading(side: Any, request: dict[str, Any]) -> dict[str, float]:
    """Rates and peak memory of ``side.load``, by the keys' defaults, which are MoCo v2's."""
    cfg = load_config(None, [
        "DATA.TRAIN", f"folder:{request['data']}", "SEED", str(request["seed"]),
        "SOLVER.IMS_PER_BATCH", "64", "DATALOADER.NUM_WORKERS", "1",
    ])  # fmt: skip
    batches: list[tuple[float, int]] = []

    def load() -> None:
        batches.extend((time.perf_counter(), images) for images in side.load(cfg))

    cpu_seconds, peak = _used(load, workers=1)
    seconds, images = batches[-1][0] - batches[0][0], sum(images for _, images in batches)
    rates = {"images_per_cpu_second": images / cpu_seconds, "images_per_second": (images - batches[0][1]) / seconds}
    return {**rates, "peak_mib": peak}


def training(side: Any, request: dict[str, Any]) -> dict[str, float]:
    """Rates, peak memory and kNN accuracy of ``side.train``."""
    images = Path(request["data"], "images")
    common = ["SEED", str(request["seed"]), "SOLVER.EPOCHS", str(request["epochs"]), "OUTPUT_DIR", "run"]
    # Without the val split our own run scores no kNN, which would be in its time.
    at_end = ["SOLVER.CHECKPOINT_PERIOD", str(10**6)]
    cfg = load_config(_RECIPE, ["DATA.TRAIN", f"folder:{images / 'train'}", *at_end, *common])
    steps = len(list((images / "train").glob("*/*.jpg"))) // cfg.SOLVER.IMS_PER_BATCH * cfg.SOLVER.EPOCHS
    trained: list[Path] = []
    start = time.perf_counter()
    cpu_seconds, peak = _used(lambda: trained.append(side.train(cfg)), workers=cfg.DATALOADER.NUM_WORKERS)
    seconds, count = time.perf_counter() - start, steps * cfg.SOLVER.IMS_PER_BATCH
    rates = {"images_per_cpu_second": count / cpu_seconds, "images_per_second": count / seconds}
    cfg = load_config(_RECIPE, ["DATA.TRAIN", f"folder:{images}", *common])
    device = torch.device("cpu")
    score = knn.evaluate(load_frozen(trained[0], cfg, device)[0], probe_data(cfg), cfg, device)
    return {**rates, "peak_mib": peak, "knn_top1": score["top1"]}


def _used(work: Callable[[], None], workers: int) -> tuple[float, float]:
    """CPU seconds of ``work`` and its child processes, and peak MiB: this process's, and the largest worker's."""
    before = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    work()
    after = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(b.ru_utime - a.ru_utime + b.ru_stime - a.ru_stime for a, b in zip(before, after, strict=True))
    peak = after[0].ru_maxrss + (after[1].ru_maxrss if workers else 0)
    return cpu, peak / _RSS_PER_MIB


if __name__ == "__main__":
    main()
