"""What both engines need to run on several ranks: one group, and agreement on a stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from pretrain.common import distributed
from pretrain.common.errors import UserError
from pretrain.common.interrupt import Stopped, stop_requested

T = TypeVar("T")


def join(device_name: str) -> torch.device:
    """Joins the process group of the environment (RANK, WORLD_SIZE, ...), if any, and returns this process's device.

    Args:
        device_name: MODEL.DEVICE; cuda means the CPU where there is no GPU.

    Raises:
        UserError: an unknown device, a GPU chosen by its number, or more processes on this machine than GPUs.
    """
    if device_name not in ("cpu", "cuda"):
        raise UserError(f"MODEL.DEVICE is {device_name}; choose cpu or cuda (CUDA_VISIBLE_DEVICES selects a GPU)")
    return distributed.join(device_name == "cuda" and torch.cuda.is_available())


def raise_if_stopped() -> None:
    """Raises Stopped on all ranks if any of them was asked to stop; all of them must call it."""
    if reason := next(filter(None, distributed.gather_objects(stop_requested())), ""):
        raise Stopped(reason)


def reported(batches: Iterable[T], total: int, what: str, log: Callable[[str], None]) -> Iterator[T]:
    """``batches``; logs every 10 s how many of ``total`` are done, how fast, and how long the others will take."""
    start = shown = time.perf_counter()
    for done, batch in enumerate(batches):
        now = time.perf_counter()
        if done and now - shown > 10:
            shown = now
            rate = done / (now - start)
            log(f"{what}: {done} / {total} batches, {rate:.2f} batches/s, {(total - done) / rate:.0f} s left")
        yield batch
