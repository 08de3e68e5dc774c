"""Ranks and the collectives of tensors and objects; in a single process each of them does nothing.

The global batch of N images is divided into contiguous slices of equal size.
"""

import contextlib
import warnings
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .ranks.meeting import meet

T = TypeVar("T")


def rank() -> int:
    """Return this process's rank, 0 in a single process."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first_rank() -> bool:
    """Return whether this process is rank 0, or the only one."""
    return rank() == 0


def rank_slice(total: int) -> slice:
    """Return this rank's contiguous slice of ``total`` items; slices differ by at most one item."""
    return slice(rank() * total // world_size(), (rank() + 1) * total // world_size())


def gather(x_n: Tensor, with_grad: bool = False) -> Tensor:
    """Concatenate every rank's rows in rank order.

    Args:
        x_n: (n, ...) rows of this rank, as many as every other rank has.
        with_grad: Gradients flow back to the rank that a row came from, summed over ranks.

    Returns:
        (world size x n, ...) on every rank.
    """
    if world_size() == 1:
        return x_n
    if with_grad:
        return cast(Tensor, _Gather.apply(x_n))
    x_N = x_n.new_empty(world_size() * x_n.shape[0], *x_n.shape[1:])
    dist.all_gather_into_tensor(x_N, x_n.contiguous())
    return x_N


def gather_uneven(x_n: Tensor) -> Tensor:
    """Concatenate every rank's rows in rank order; ranks may have different numbers of rows."""
    if world_size() == 1:
        return x_n  # not copies: ImageNet's features take 10 GB
    sizes = gather_objects(x_n.shape[0])
    padding = x_n.new_zeros(max(sizes) - x_n.shape[0], *x_n.shape[1:])
    padded = gather(torch.cat([x_n, padding])).split(max(sizes))
    return torch.cat([rows[:size] for rows, size in zip(padded, sizes, strict=True)])


class _Gather(torch.autograd.Function):
    """`gather` whose gradient is the sum over ranks of each rank's gradient of its rows."""

    @staticmethod
    def forward(ctx: Any, x_n: Tensor) -> Tensor:
        return gather(x_n)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].clone(memory_format=torch.contiguous_format)  # autograd may still need its own
        dist.all_reduce(total)
        return total.chunk(world_size())[rank()]


def mean_(x: Tensor) -> Tensor:
    """Replace ``x`` with its mean over ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(x)
        x.div_(world_size())
    return x


def mean_together_(tensors: list[Tensor]) -> None:
    """Replace ``tensors`` with their means over ranks, in place, by one collective."""
    if world_size() > 1:
        means = mean_(torch.cat([tensor.flatten() for tensor in tensors])).split([x.numel() for x in tensors])
        torch._foreach_copy_(tensors, [mean.view_as(x) for mean, x in zip(means, tensors, strict=True)])


def data_parallel(module: nn.Module) -> nn.Module:
    """Wrap ``module`` so that its backward pass averages gradients over ranks; each rank keeps its own buffers.

    Its caller moves the inputs to the device: DDP, which would do it with ``device_ids``, waits for the copies.
    """
    if world_size() == 1:
        return module
    with warnings.catch_warnings():  # not every supported torch has the argument's new name
        warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
        return DistributedDataParallel(module, broadcast_buffers=False, gradient_as_bucket_view=True)


def average_gradients(module: nn.Module, when: bool) -> contextlib.AbstractContextManager[None]:
    """Average the gradients of `data_parallel`'s ``module`` over ranks in this context only ``when`` it is True."""
    if when or not isinstance(module, DistributedDataParallel):
        return contextlib.nullcontext()
    return cast(contextlib.AbstractContextManager[None], module.no_sync())


def gather_objects(value: T) -> list[T]:
    """Return every rank's ``value`` (of a type that pickles), in rank order; ranks may come at very different times."""
    if world_size() == 1:
        return [value]
    meet()
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values
