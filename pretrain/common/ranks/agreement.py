"""Agreement between ranks: what they decide, check and stop for together; a single process decides alone."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from ..device import AsyncHostCopy
from ..distributed import gather_objects, world_size
from ..errors import UserError
from ..interrupt import Stopped, StopRequest
from .meeting import meet

STOP_ELSEWHERE = "a signal to another process of this run"  # the reason on ranks that got no signal
P = ParamSpec("P")
T = TypeVar("T")


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
