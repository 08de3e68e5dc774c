"""The process group of a fine-tuning run, and its progress."""

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from pretrain.common.errors import UserError
from pretrain.common.ranks import process_group

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
    device = process_group.init_process_group("auto" if device_name == "cuda" else "cpu", "MODEL.DEVICE")
    torch.backends.cudnn.benchmark = False  # images differ in size; CUDNN_BENCHMARK decides for training
    return device


def log_progress(batches: Iterable[T], total: int, activity: str) -> Iterator[T]:
    """Yield ``batches``; log every 10 s how many of ``total`` are complete, the rate, and the time left."""
    start = last_line = time.perf_counter()
    for done, batch in enumerate(batches):
        now = time.perf_counter()
        if done and now - last_line > 10:
            last_line = now
            rate = done / (now - start)
            log.info(f"{activity}: {done} / {total} batches, {rate:.2f} batches/s, {(total - done) / rate:.0f} s left")
        yield batch
