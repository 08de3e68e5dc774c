"""The process group of a fine-tuning, agreement on a stop, and inference on several ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from pretrain.common import distributed
from pretrain.common.errors import UserError
from pretrain.common.interrupt import Stopped, stop_requested

log = logging.getLogger(__name__)
T = TypeVar("T")


def join(device_name: str) -> torch.device:
    """Join the process group of the environment (RANK, WORLD_SIZE, ...), if any, and return this process's device.

    Args:
        device_name: MODEL.DEVICE; cuda means the CPU where there is no GPU.

    Raises:
        UserError: an unknown device, a GPU chosen by its number, GPUs that torch cannot use, or more processes on this
            machine than GPUs.
    """
    if device_name not in ("cpu", "cuda"):
        raise UserError(f"MODEL.DEVICE is {device_name}; choose cpu or cuda (CUDA_VISIBLE_DEVICES selects a GPU)")
    device = distributed.init("auto" if device_name == "cuda" else "cpu", "MODEL.DEVICE")
    torch.backends.cudnn.benchmark = False  # images differ in size; CUDNN_BENCHMARK decides for a training
    return device


def raise_if_stopped() -> None:
    """Raise Stopped on all ranks if any of them was asked to stop; every rank must call this."""
    reasons = distributed.gather_objects(stop_requested())
    reason = next(filter(None, reasons), "")
    if reason:
        raise Stopped(reason)


def log_progress(batches: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Yield ``batches``; log every 10 s how many of ``total`` are complete, the rate, and the time left."""
    start = last_line = time.perf_counter()
    for done, batch in enumerate(batches):
        now = time.perf_counter()
        if done and now - last_line > 10:
            last_line = now
            rate = done / (now - start)
            log.info(f"{what}: {done} / {total} batches, {rate:.2f} batches/s, {(total - done) / rate:.0f} s left")
        yield batch


@torch.no_grad()
def run_inference(model: nn.Module, batches: Iterable[T], total: int, detect: Callable[[T], list[Any]]) -> list[Any]:
    """Call ``detect`` on this rank's ``total`` batches with the model in evaluation mode.

    Returns:
        Every rank's results, in rank order, on rank 0; [] on other ranks.

    Raises:
        Stopped: a stop was requested on one of the ranks.
    """
    was_training = model.training
    results: list[Any] = []
    model.eval()
    for batch in log_progress(batches, total, "evaluation"):
        if stop_requested():
            break
        results += detect(batch)
    model.train(was_training)
    raise_if_stopped()
    world = distributed.world_size()
    if world == 1:
        return results
    gathered: list[Any] | None = [None] * world if distributed.is_main() else None
    dist.gather_object(results, gathered)
    return [result for rank_results in gathered or () for result in rank_results]
