"""Ranks, collectives and agreement; in a single process each of them is the identity.

The process group comes from the environment that torchrun and submitit set (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT). The global batch of N images is divided into contiguous slices of equal size.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from . import interrupt
from .async_copy import AsyncHostCopy
from .config import extensions
from .device import can_use_gpus
from .errors import UserError, first_line

RENDEZVOUS_S = 300.0  # for the processes of a run to find each other
TIMEOUT_S = 1800.0  # of one collective: rank 0 may evaluate or write while the others wait
STOP_ELSEWHERE = "a signal to another process of this run"  # the reason on ranks that were not asked themselves
T = TypeVar("T")


def init(device_name: str = "auto") -> torch.device:
    """Joins the process group named by the environment (none: single process) and returns this rank's device.

    Args:
        device_name: auto (cuda where there is one), cpu or cuda.
    """
    cuda = device_name != "cpu" and can_use_gpus("DEVICE")
    if device_name == "cuda" and not cuda:
        raise UserError("DEVICE is cuda, but torch sees no CUDA device; set DEVICE cpu or auto")
    device = join(cuda)
    torch.backends.cudnn.benchmark = device.type == "cuda"  # sizes do not change, so the search pays off
    return device


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    return rank() == 0


@contextlib.contextmanager
def in_turns() -> Iterator[None]:
    """Runs the block on rank 0, then on the first rank of every other machine, then on the other ranks.

    The block may be a download that takes a day, longer than any collective may take.
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


def rank_slice(total: int) -> slice:
    """Return this rank's contiguous part of ``total`` items; the parts differ by at most one item."""
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
    """Replaces ``x`` by its mean over ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(x)
        x.div_(world_size())
    return x


def join(cuda: bool) -> torch.device:
    """This process's device; joins the process group of the environment, where WORLD_SIZE is above 1.

    Args:
        cuda: one GPU per process and nccl; else the CPU and gloo.

    Raises:
        UserError: more processes on this machine than GPUs; ranks that run different code.
    """
    device = torch.device("cpu")
    if cuda:
        local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        # SLURM may show each task only its own GPU.
        is_only_gpu = count == 1 and os.environ.get("SLURM_LOCALID") == str(local)
        if local >= count and not is_only_gpu:  # two ranks on one GPU would fail inside nccl without a reason
            raise UserError(f"local rank {local}, but {count} GPU(s); start at most {count} process(es) per machine")
        device = torch.device("cuda", 0 if is_only_gpu else local)
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        timeout, place = datetime.timedelta(seconds=TIMEOUT_S), _meet()
        place["store"].set_timeout(timeout)
        device_id = device if cuda else None
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timeout, device_id=device_id, **place)
        check_agreement((torch.__version__, code_digest()), "(torch's version, digest of the code)")
    return device


def _meet() -> dict[str, Any]:
    """The store that all ranks share, this rank and their number; waits minutes for the others, not `TIMEOUT_S`."""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        socket.getaddrinfo(os.environ.get("MASTER_ADDR"), None)  # the store would try for as long as it may
        store, rank, size = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=RENDEZVOUS_S)))
        return {"store": store, "rank": rank, "world_size": size}
    except (OSError, dist.DistError) as error:
        raise UserError(
            f"the processes of this run cannot meet at {address} ({first_line(error)}); export a MASTER_ADDR by which "
            "all machines reach the first one, and a free MASTER_PORT there (on SLURM in --setup lines)"
        ) from error


def code_digest() -> str:
    """8 hexadecimal digits of the source of both stages and of extensions: a machine may have an older copy."""
    root, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    sources = sorted(path for stage in ("pretrain", "transfer") for path in (root / stage).rglob("*.py"))
    for path in (*sources, *extensions.sources()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def data_parallel(module: nn.Module, device: torch.device) -> nn.Module:
    """``module`` with gradients that its backward pass averages over ranks; each rank keeps its own buffers."""
    if world_size() == 1:
        return module
    with warnings.catch_warnings():  # not every supported torch has the argument's new name
        warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
        return DistributedDataParallel(
            module, device_ids=[device.index] if device.type == "cuda" else None, broadcast_buffers=False
        )


def average_gradients(module: nn.Module, when: bool) -> contextlib.AbstractContextManager[None]:
    """Average the gradients of `data_parallel`'s ``module`` over ranks in this context only ``when`` it is True."""
    if when or not isinstance(module, DistributedDataParallel):
        return contextlib.nullcontext()
    return cast(contextlib.AbstractContextManager[None], module.no_sync())


def on_first_rank(function: Callable[[], T]) -> T:
    """Calls ``function`` on rank 0, or in a single process, and returns its result on every rank.

    What ranks must agree on (which checkpoint to resume from, whether a run is complete) is read by one of them: each
    may see another state of a shared file system, or another disk.

    Raises:
        UserError: ``function`` raised it on rank 0, or failed there with another error.
    """
    if world_size() == 1:
        return function()
    box: list[Any] = [None, None]
    failure: BaseException | None = None
    if dist.get_rank() == 0:
        try:
            box[0] = function()
        except Exception as error:
            failure, box[1] = error, (str(error) if isinstance(error, UserError) else f"rank 0 failed: {error!r}")
    dist.broadcast_object_list(box)
    if failure is not None:
        raise failure
    if box[1] is not None:
        raise UserError(box[1])
    return box[0]


def gather_objects(value: T) -> list[T]:
    """Every rank's ``value`` (of a type that pickles), in rank order."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_every_rank(function: Callable[[], T]) -> T:
    """Calls ``function`` on every rank and returns this rank's result.

    Raises:
        UserError: ``function`` raised it on some rank. It is raised on all ranks, which would otherwise wait for those
            that failed; where only some failed, it names them.
    """
    if world_size() == 1:
        return function()
    result: Any = None
    reason = ""
    try:
        result = function()
    except UserError as error:
        reason = str(error)
    reasons = gather_objects(reason)
    failed = [rank for rank, text in enumerate(reasons) if text]
    if len(failed) == len(reasons):
        raise UserError(reasons[0])
    if failed:
        ranks = f"rank{'s' * (len(failed) > 1)} {', '.join(map(str, failed))} of {len(reasons)}"
        raise UserError(f"{ranks}: {reasons[failed[0]]}; do all machines see the same files?")
    return result


def check_agreement(value: Any, what: str) -> None:
    """Raises UserError, which calls it ``what``, on every rank unless all have the same ``value`` (that pickles)."""
    values = gather_objects(value)
    other = next((rank for rank, theirs in enumerate(values) if theirs != values[0]), None)
    if other is not None:
        raise UserError(
            f"{what} differs between ranks: {values[0]!r} on rank 0, {values[other]!r} on rank {other}; do all "
            "machines see the same files?"
        )


class AgreedStop:
    """A request to stop that any rank received, reported to all ranks alike.

    Every rank must poll at the same points of its work. With several ranks the answer is that of the previous poll,
    which has reached the host already: waiting for the current one would leave the device idle.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._earlier: AsyncHostCopy | None = None

    def poll(self) -> str:
        """The reason to stop, or an empty string."""
        reason = interrupt.stop_requested()
        if world_size() == 1:
            return reason
        asked = torch.full((1,), float(bool(reason)), device=self._device)
        dist.all_reduce(asked)
        earlier, self._earlier = self._earlier, AsyncHostCopy(asked)
        agreed = earlier is not None and earlier.read().item() > 0
        return (reason or STOP_ELSEWHERE) if agreed else ""
