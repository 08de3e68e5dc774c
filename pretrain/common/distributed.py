"""Ranks and collectives; in a single process each of them is the identity.

The process group comes from the environment that torchrun and submitit set (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT). The global batch of N images is divided into contiguous slices whose sizes differ by at most one, so N
need not be a multiple of the number of processes.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import process_group
from .batch_split import slice_bounds
from .copies import to_device
from .errors import UserError


def init(device_name: str = "auto") -> torch.device:
    """Joins the process group named by the environment (none: single process) and returns this rank's device.

    Args:
        device_name: auto (cuda where there is one), cpu or cuda.
    """
    if device_name == "cuda" and not torch.cuda.is_available():
        raise UserError("DEVICE is cuda, but torch sees no CUDA device; set DEVICE cpu or auto")
    device = process_group.join(device_name != "cpu" and torch.cuda.is_available())
    torch.backends.cudnn.benchmark = device.type == "cuda"  # sizes do not change, so the search pays off
    return device


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    return rank() == 0


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


@contextlib.contextmanager
def in_turns() -> Iterator[None]:
    """Runs the block on rank 0, then on the first rank of every other machine, then on the other ranks.

    The block may take a day, longer than any other collective may: it may be a download.
    """
    group: Any = dist.new_group(backend="gloo") if world_size() > 1 else None  # nccl has no such time-out

    def wait(turns: int) -> None:
        for _ in range(turns if group else 0):
            dist.monitored_barrier(group, timeout=datetime.timedelta(days=1))

    turn = 0 if rank() == 0 else 1 if os.environ.get("LOCAL_RANK", "0") == "0" else 2
    wait(turn)
    try:
        yield
    finally:  # also after an error: the other ranks wait for their turn
        wait(3 - turn)
        if group:
            dist.destroy_process_group(group)


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
    if with_grad:
        return _Gather.apply(x, sizes)  # type: ignore[return-value]
    longest = max(sizes)
    if x.shape[0] < longest:  # the collective needs equal shapes; the padding is removed below
        x = torch.cat([x, x.new_zeros(longest - x.shape[0], *x.shape[1:])])
    parts = [torch.empty_like(x) for _ in sizes]
    dist.all_gather(parts, x.contiguous())
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


class _Gather(torch.autograd.Function):
    """`gather` whose gradient is the sum over ranks of each rank's gradient of its rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int]) -> Tensor:
        ctx.sizes = sizes
        return gather(x, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)  # autograd may still need its own
        dist.all_reduce(total)
        return total.split(ctx.sizes)[rank()], None


class ExchangePlan:
    """Moves rows between ranks by a permutation that every rank knows, and moves results back.

    The M x N global rows are numbered m N + i. Rank r holds rows (m, i) of its slice of the N images, m-major; after
    `scatter` it holds the rows ``order[M start:M stop]``, M positions for each image of its slice. Only rows that
    change rank travel, and only once (an all-gather would send every row to every rank).
    """

    def __init__(self, order: Tensor, num_keys: int, total: int) -> None:
        ranks, me = world_size(), rank()
        slices = [slice_bounds(total, r, ranks) for r in range(ranks)]
        counts = torch.tensor([stop - start for start, stop in slices])
        owner = torch.arange(ranks).repeat_interleave(counts)
        local = torch.cat([torch.arange(stop - start) for start, stop in slices])
        source = owner[order % total]  # rank that holds the row of each position
        slot = (order // total) * counts[source] + local[order % total]  # its place on that rank
        bounds = [(num_keys * start, num_keys * stop) for start, stop in slices]
        mine = slice(*bounds[me])
        # What I send to rank r, in the order of r's positions; what I receive comes grouped by source rank.
        sends = [slot[start:stop][source[start:stop] == me] for start, stop in bounds]
        self._send = torch.cat(sends)
        self._send_sizes = [len(s) for s in sends]
        self._receive_sizes = [int((source[mine] == r).sum()) for r in range(ranks)]
        self._arrange = torch.argsort(torch.argsort(source[mine], stable=True))  # position -> place among received
        self._alone = ranks == 1

    def scatter(self, rows: Tensor) -> Tensor:
        """This rank's (M n, ...) rows -> the rows of its positions."""
        picked = rows[to_device(self._send, rows.device)]
        if self._alone:
            return picked
        received = picked.new_empty(sum(self._receive_sizes), *rows.shape[1:])
        dist.all_to_all_single(received, picked, self._receive_sizes, self._send_sizes)
        return received[to_device(self._arrange, rows.device)]

    def collect(self, results: Tensor) -> Tensor:
        """Results of this rank's positions -> results of its own rows (inverse of `scatter`)."""
        if not self._alone:
            grouped = results[to_device(torch.argsort(self._arrange), results.device)].contiguous()
            results = grouped.new_empty(sum(self._send_sizes), *results.shape[1:])
            dist.all_to_all_single(results, grouped, self._send_sizes, self._receive_sizes)
        own = torch.empty_like(results)
        own[to_device(self._send, results.device)] = results
        return own


def mean_(x: Tensor) -> Tensor:
    """Replaces ``x`` by its mean over ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(x)
        x.div_(world_size())
    return x
