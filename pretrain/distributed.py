"""Ranks and collectives; every one of them is the identity in a single process.

The process group comes from the environment torchrun and submitit set (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT). The global batch of N images is cut into contiguous slices whose sizes differ by at most one, so N need not
be a multiple of the number of processes.
"""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_autograd
from torch import Tensor

from .common.errors import UserError


def init(device_name: str = "auto") -> torch.device:
    """Joins the process group named by the environment (none: single process) and returns this rank's device.

    Args:
        device_name: auto (cuda where there is one), cpu or cuda.
    """
    if device_name == "cuda" and not torch.cuda.is_available():
        raise UserError("DEVICE is cuda, but torch sees no CUDA device; set DEVICE cpu or auto")
    use_cuda = device_name == "cuda" or (device_name == "auto" and torch.cuda.is_available())
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if use_cuda:
        count = torch.cuda.device_count()
        device = torch.device("cuda", local_rank if local_rank < count else 0)  # SLURM may show each task only its own
        if local_rank >= count > 1:
            raise UserError(f"local rank {local_rank} but {count} GPUs are visible; start at most {count} processes a node")
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if use_cuda else "gloo", timeout=datetime.timedelta(minutes=30))
    return device


def shutdown() -> None:
    """Leaves the process group, if any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    return rank() == 0


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def slice_bounds(total: int, of_rank: int, ranks: int) -> tuple[int, int]:
    """First and one-past-last index of a rank's contiguous share of ``total`` items."""
    return of_rank * total // ranks, (of_rank + 1) * total // ranks


def slice_sizes(total: int) -> list[int]:
    """Every rank's share of ``total`` items, in rank order."""
    bounds = [slice_bounds(total, r, world_size()) for r in range(world_size())]
    return [stop - start for start, stop in bounds]


def gather(x: Tensor, sizes: list[int], with_grad: bool = False) -> Tensor:
    """Concatenates every rank's rows in rank order.

    Args:
        x: (sizes[rank], ...) rows of this rank.
        sizes: rows of every rank.
        with_grad: gradients flow back to the rank a row came from, summed over ranks.

    Returns:
        (sum(sizes), ...) on every rank.
    """
    if world_size() == 1:
        return x
    longest = max(sizes)
    if x.shape[0] < longest:  # equal shapes for the collective; the padding is cut below
        x = torch.cat([x, x.new_zeros(longest - x.shape[0], *x.shape[1:])])
    if with_grad:
        parts = list(dist_autograd.all_gather(x.contiguous()))
    else:
        parts = [torch.empty_like(x) for _ in sizes]
        dist.all_gather(parts, x.contiguous())
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def mean_(x: Tensor) -> Tensor:
    """Replaces ``x`` by its mean over ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(x)
        x.div_(world_size())
    return x


def broadcast_object(value: object) -> object:
    """Rank 0's value on every rank (plain Python objects)."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]
