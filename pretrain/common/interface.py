"""What the functions of the Python interface check and set up; a caller may be a notebook, a thread or a worker."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from .errors import UserError
from .files import expand
from .interrupt import Stopped, StopRequest
from .shell import find_working_folder

_TURN_POLL_S = 0.5  # between two checks of the request to stop
_turn = threading.RLock()
log = logging.getLogger(__name__)


def _renew_turn() -> None:
    global _turn
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_renew_turn)  # the thread that holds it is not in a forked process


def read_path(value: Any, name: str) -> str:
    """Return an argument that is a path, with its variables and ``~`` replaced, as a shell would.

    Raises:
        UserError: it is of another type, or empty.
    """
    if not isinstance(value, (str, os.PathLike)) or isinstance(os.fspath(value), bytes):
        raise UserError(f"{name} is {value!r}, of type {type(value).__name__}; pass a path")
    if not os.fspath(value):
        raise UserError(f"{name} is empty; pass a path")
    return expand(os.fspath(value))


def list_words(overrides: Any) -> list[Any]:
    """Return config keys and values as KEY VALUE words; raise UserError unless they are a mapping of names."""
    example = 'pass a dictionary of config keys, as in {"SOLVER.BASE_LR": 0.05}'
    if not isinstance(overrides, Mapping):
        raise UserError(f"overrides are of type {type(overrides).__name__}; {example}")
    for key in overrides:
        if not isinstance(key, str):
            raise UserError(f"overrides contain the key {key!r}, of type {type(key).__name__}; {example}")
    return [word for pair in overrides.items() for word in pair]


@contextlib.contextmanager
def take_turn(stop: StopRequest) -> Iterator[None]:
    """Wait until no other thread of this process has a run, and keep others waiting until the block ends.

    Simultaneous runs would share torch's random numbers, and write to each other's logs.

    Raises:
        Stopped: a stop was requested while this run waited.
    """
    turn = _turn
    if not turn.acquire(blocking=False):
        log.info("a run in another thread waits until this one ends")
        while not turn.acquire(timeout=_TURN_POLL_S):
            if stop.reason:
                raise Stopped(stop.reason)
    try:
        yield
    finally:
        turn.release()


@contextlib.contextmanager
def set_torch_modes() -> Iterator[None]:
    """Compute as a command does, whatever modes the caller of this thread is in, until the block ends.

    Raises:
        UserError: the caller has changed a default of the whole process, which other threads may rely on; or its
            working folder has been removed, such as that of an open notebook.
    """
    import torch

    if not find_working_folder():
        raise UserError("the working folder of this process has been removed; change to another one with os.chdir")
    dtype = torch.get_default_dtype()
    if dtype != torch.float32:
        raise UserError(f"torch's default type is {dtype}; call torch.set_default_dtype(torch.float32) before this run")
    device = torch.get_default_device()
    if device.type != "cpu":
        raise UserError(
            f"torch's default device is {device}; leave its context, or call torch.set_default_device(None)"
        )
    with contextlib.ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            modes.enter_context(torch.autocast(kind, enabled=False))
        yield
