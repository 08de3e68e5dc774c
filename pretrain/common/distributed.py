"""Ranks, collectives and agreement between ranks; in a single process each of them does nothing.

The process group comes from the environment that torchrun or the launcher sets (RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT). The global batch of N images is divided into contiguous slices of equal size.
"""

import contextlib
import datetime
import hashlib
import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from .config import extensions
from .device import AsyncHostCopy, can_use_gpus, check_gpu_is_own, choose_gpu
from .errors import UserError, first_line
from .interrupt import Stopped, StopRequest
from .ranks.environment import read_world_size
from .ranks.meeting import meet

TIMEOUT_S = 1800.0  # for one collective up to the end of the first step, before which a rank may compile
STEP_TIMEOUT_S = 300.0  # for one collective afterwards; longer waits are meetings
STOP_ELSEWHERE = "a signal to another process of this run"  # the reason on ranks that got no signal
P = ParamSpec("P")
T = TypeVar("T")


def init_process_group(device_name: str = "auto", key: str = "DEVICE", rendezvous_s: float = 300.0) -> torch.device:
    """Join the process group that the environment names, if WORLD_SIZE is above 1, and return this rank's device.

    Args:
        device_name: auto (CUDA if available, with one GPU per process), cpu or cuda.
        key: the config key of the device, for errors.
        rendezvous_s: how long to wait until all processes of the run have found each other.

    Raises:
        UserError: no CUDA device, more processes on this machine than GPUs, or ranks that run different code.
    """
    is_cuda = device_name != "cpu" and can_use_gpus(key)
    if device_name == "cuda" and not is_cuda:
        raise UserError(f"{key} is cuda, but torch sees no CUDA device; set {key} cpu or auto")
    device = choose_gpu() if is_cuda else torch.device("cpu")
    torch.backends.cudnn.benchmark = is_cuda  # sizes do not change, so the search pays off
    if read_world_size() > 1 and not dist.is_initialized():
        timeout = datetime.timedelta(seconds=TIMEOUT_S)
        rendezvous = _rendezvous(rendezvous_s)
        rendezvous["store"].set_timeout(timeout)
        if is_cuda:
            check_gpu_is_own(device, **rendezvous)
        backend = "nccl" if is_cuda else "gloo"
        dist.init_process_group(backend, timeout=timeout, device_id=device if is_cuda else None, **rendezvous)
        check_agreement((torch.__version__, compute_code_digest()), "(torch's version, digest of the code)")
    return device


def _rendezvous(timeout_s: float) -> dict[str, Any]:
    """Wait for the other ranks; return the shared store, this rank and the number of ranks."""
    host = os.environ.get("MASTER_ADDR")
    address = f"{host}:{os.environ.get('MASTER_PORT')}"
    try:
        socket.getaddrinfo(host, None)  # the store would retry an unknown host until its time-out
        store, rank, size = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout_s)))
        return {"store": store, "rank": rank, "world_size": size}
    except (OSError, dist.DistError) as error:
        problem = f"the processes of this run cannot connect to each other at {address} ({first_line(error)})"
        remedy = "export a MASTER_ADDR that all machines reach and a free MASTER_PORT (SLURM: in the site file's setup)"
        raise UserError(f"{problem}; {remedy}") from error


def shorten_timeout() -> None:
    """Let collectives time out after STEP_TIMEOUT_S from now on; every loop calls it after its first step."""
    if world_size() > 1:
        set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # torch 2.14 and earlier
        set_timeout(datetime.timedelta(seconds=STEP_TIMEOUT_S))


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


def compute_code_digest() -> str:
    """Return 8 hexadecimal digits of the source of both stages and of extensions: a machine may have an older copy."""
    root = Path(__file__).resolve().parents[2]
    files = [path for stage in ("pretrain", "transfer") for path in (root / stage).rglob("*")]
    sources = sorted(path for path in files if path.suffix in (".py", ".yaml", ".txt"))  # defaults are in YAML
    content = b"".join(path.read_bytes() for path in (*sources, *extensions.sources()))
    return hashlib.sha256(content).hexdigest()[:8]


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


def on_first_rank(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``function`` on rank 0, or in a single process, and return its result on every rank.

    Rank 0 alone reads what ranks must agree on, such as whether a run is complete: each rank may see another state of
    a shared file system, or another disk. It may take as long as it needs: the others wait in a meeting.

    Raises:
        UserError: ``function`` raised it on rank 0, or failed there with another error.
    """
    if world_size() == 1:
        return function(*args, **kwargs)
    message: list[Any] = [None, ""]  # result, reason of a failure
    if dist.get_rank() == 0:
        try:
            message[0] = function(*args, **kwargs)
        except Exception as error:
            message[1] = str(error) if isinstance(error, UserError) else f"rank 0 failed: {error!r}"
            meet()
            dist.broadcast_object_list(message)
            raise
    meet()
    dist.broadcast_object_list(message)
    if message[1]:
        raise UserError(message[1])
    return message[0]


def gather_objects(value: T) -> list[T]:
    """Return every rank's ``value`` (of a type that pickles), in rank order; ranks may come at very different times."""
    if world_size() == 1:
        return [value]
    meet()
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def on_every_rank(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``function`` on every rank and return this rank's result.

    Raises:
        UserError: ``function`` raised it on some rank. All ranks raise it, because they would otherwise wait for the
            ranks that failed; if only some failed, it names them.
    """
    if world_size() == 1:
        return function(*args, **kwargs)
    result: Any = None
    reason = ""
    try:
        result = function(*args, **kwargs)
    except UserError as error:
        reason = str(error)
    reasons = gather_objects(reason)
    failed = [rank for rank, text in enumerate(reasons) if text]
    if len(failed) == len(reasons):
        raise UserError(reasons[0])
    if failed:
        ranks = f"{'ranks' if len(failed) > 1 else 'rank'} {', '.join(map(str, failed))} of {len(reasons)}"
        raise UserError(f"{ranks}: {reasons[failed[0]]}; do all machines see the same files?")
    return result


def check_agreement(value: Any, description: str) -> None:
    """Raise UserError on every rank unless all have the same ``value`` (of a type that pickles)."""
    values = gather_objects(value)
    for rank, other in enumerate(values):
        if other != values[0]:
            both = f"{values[0]!r} on rank 0, {other!r} on rank {rank}"
            raise UserError(f"{description} differs between ranks: {both}; do all machines see the same files?")


class AgreedStop:
    """A request to stop that any rank received, reported to all ranks alike.

    Every rank must call the same methods at the same points of its work. With several ranks, a poll returns the answer
    of the previous one, which has already reached the host: waiting for the current one would leave the device idle.

    Attributes:
        request: the request of this rank.
    """

    def __init__(self, request: StopRequest, device: torch.device) -> None:
        self.request = request
        self._device = device
        self._previous: AsyncHostCopy | None = None

    def poll(self) -> str:
        """Return the reason to stop, or an empty string."""
        reason = self.request.reason
        if world_size() == 1:
            return reason
        requests = torch.full((1,), float(bool(reason)), device=self._device)
        dist.all_reduce(requests)
        previous = self._previous
        self._previous = AsyncHostCopy(requests)
        if previous is None or previous.read().item() == 0:
            return ""
        return reason or STOP_ELSEWHERE

    def raise_if_requested(self) -> None:
        """Raise Stopped on all ranks if `poll` returns a reason."""
        reason = self.poll()
        if reason:
            raise Stopped(reason)

    def raise_now(self) -> None:
        """Raise Stopped on all ranks if any of them was asked to stop; this waits for the ranks' answers."""
        reason = next(filter(None, gather_objects(self.request.reason)), "")
        if reason:
            raise Stopped(reason)
