"""Requests to stop (preemption, time-out, Ctrl-C), which a stage reads between two steps.

The stage finishes the current step, writes its checkpoint and raises `Stopped`. A signal handler writes nothing.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from .errors import UserError

_IGNORED_IN_WORKERS = {signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT}
_PARENT_POLL_S = 5.0  # between two looks of a worker at its parent
T = TypeVar("T")


class Stopped(Exception):
    """A stage was asked to stop; its checkpoint, if it writes any, is on disk. The text is the reason.

    Attributes:
        remedy: how to resume the work.
    """

    def __init__(self, reason: str, remedy: str = "run the same command again") -> None:
        super().__init__(reason)
        self.remedy = remedy


def describe_resume(folder: Path, step: int) -> str:
    """Return the remedy of a stopped stage that has a checkpoint."""
    return f"{folder} contains the checkpoint of step {step}; run the same command again to resume"


def save_before_stop(batches: Iterator[T], save: Callable[[int], object], num_processes: int) -> Iterator[T]:
    """Yield ``batches``; call ``save`` if the loader obeys a request to stop because no batch arrives.

    A single process also saves before a UserError of the loader, such as an image that was deleted. Of several, the
    others already compute the next step when one cannot read its batch.

    Args:
        save: takes the number of batches whose steps are complete; not called for 0.
    """
    causes = (Stopped, UserError) if num_processes == 1 else Stopped
    steps = 0
    try:
        for batch in batches:
            yield batch
            steps += 1
    except causes:
        if steps:
            save(steps)
        raise


class StopRequest:
    """A request to stop a run, which its entry point makes and passes down.

    Attributes:
        reason: why to stop; empty unless a stop was requested.
    """

    def __init__(self) -> None:
        self.reason = ""

    def make(self, reason: str) -> None:
        """Ask the run to stop after the current step; the first reason counts."""
        self.reason = self.reason or reason

    def handle(self, number: int, _frame: FrameType | None = None) -> None:
        """Make a request of a signal; a second SIGINT interrupts immediately."""
        if number == signal.SIGINT and self.reason:
            raise KeyboardInterrupt
        self.make(signal.Signals(number).name)

    @contextlib.contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Turn what `handle_stop_signals` names into this request until the block ends."""
        with handle_stop_signals(self.handle):
            yield


@contextlib.contextmanager
def handle_stop_signals(handler: Callable[[int, Any], None], *numbers: signal.Signals) -> Iterator[None]:
    """Call ``handler`` for Ctrl-C, SIGTERM, the end of the terminal and these signals until the block ends.

    Python handles signals in the main thread only; in another one this changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stop_signals = (signal.SIGINT, signal.SIGTERM, *list_hangup_signals(), *numbers)
    earlier = {number: signal.signal(number, handler) for number in stop_signals}
    try:
        yield
    finally:
        for number, former in earlier.items():
            signal.signal(number, former)


def list_hangup_signals() -> tuple[signal.Signals, ...]:
    """Return SIGHUP, or nothing if nohup makes this process ignore it."""
    return () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)


def ignore_in_worker(_worker_id: int = 0) -> None:
    """Ignore signals to the job in a loader's worker (its ``worker_init_fn``), which must not run the job's handler.

    SIGTERM from the parent is obeyed: torch and multiprocessing end workers with it and wait for them.
    """
    parent = multiprocessing.parent_process()  # with a fork server, os.getppid() would be that server
    assert parent
    for number in _IGNORED_IN_WORKERS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before the worker has other threads
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()


@contextlib.contextmanager
def block_signals() -> Iterator[None]:
    """Block signals until the block ends; workers started in it inherit this, so that no signal comes too early."""
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED_IN_WORKERS | {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def _end_with_parent(parent: Any) -> None:
    """Exit when the parent sends SIGTERM or has ended; torch overlooks a parent killed before a worker has started."""
    while parent.is_alive():
        received = signal.sigtimedwait({signal.SIGTERM}, _PARENT_POLL_S)
        if received and received.si_pid == parent.pid:
            break
    os._exit(0)
