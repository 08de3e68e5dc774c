"""What both engines need to run on several ranks: one group, and agreement on a stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from pretrain.common import distributed
from pretrain.common.errors import UserError
from pretrain.common.interrupt import Stopped, stop_requested

T = TypeVar("T")


def join(device_name: str) -> torch.device:
    """Joins the process group of the environment (RANK, WORLD_SIZE, ...), if any, and returns this process's device.

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
    """Raises Stopped on all ranks if any of them was asked to stop; all of them must call it."""
    if reason := next(filter(None, distributed.gather_objects(stop_requested())), ""):
        raise Stopped(reason)


def log_progress(batches: Iterable[T], total: int, what: str, log: Callable[[str], None]) -> Iterator[T]:
    """``batches``; logs every 10 s how many of ``total`` are done, how fast, and how long the others will take."""
    start = shown = time.perf_counter()
    for done, batch in enumerate(batches):
        now = time.perf_counter()
        if done and now - shown > 10:
            shown = now
            rate = done / (now - start)
            log(f"{what}: {done} / {total} batches, {rate:.2f} batches/s, {(total - done) / rate:.0f} s left")
        yield batch


@torch.no_grad()
def predict(
    model: nn.Module, batches: Iterable[T], total: int, detect: Callable[[T], list[Any]], log: Callable[[str], None]
) -> list[Any]:
    """What ``detect`` returns of this rank's ``total`` batches, the model in evaluation mode: of all ranks on rank 0.

    Raises:
        Stopped: a stop was requested on one of the ranks.
    """
    was_training, predictions = model.training, []
    model.eval()
    for batch in log_progress(batches, total, "evaluation", log):
        if stop_requested():
            break
        predictions += detect(batch)
    model.train(was_training)
    raise_if_stopped()
    if (world := distributed.world_size()) > 1:
        gathered: list[Any] | None = [None] * world if distributed.is_main() else None
        dist.gather_object(predictions, gathered)
        predictions = [prediction for part in gathered or () for prediction in part]
    return predictions
