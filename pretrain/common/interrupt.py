"""Requests to stop (preemption, time-out, Ctrl-C) set a flag that a stage reads between two steps.

The stage finishes the current step, writes its checkpoint and raises `Stopped`. A signal handler writes nothing.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_reason: str = ""
_IGNORED_IN_WORKERS = {signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT}


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


def request_stop(reason: str) -> None:
    """Ask the running stage to stop after the current step."""
    global _reason
    _reason = _reason or reason


def stop_requested() -> str:
    """Return the reason of a pending request to stop, or an empty string."""
    return _reason


def clear() -> None:
    """Clear a request, at the start of a stage that shares its process with an earlier one."""
    global _reason
    _reason = ""


def install_handlers() -> None:
    """Turn SIGINT and SIGTERM into a request to stop; a second SIGINT interrupts immediately."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _handle)


def _handle(number: int, _frame: FrameType | None) -> None:
    if number == signal.SIGINT and _reason:
        raise KeyboardInterrupt
    request_stop(signal.Signals(number).name)


@contextlib.contextmanager
def handle_signals() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into requests to stop until the block ends; clear earlier requests.

    Python handles signals in the main thread only; in another one this changes nothing.
    """
    clear()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    install_handlers()
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        clear()


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
    threading.Thread(target=_end_with_parent, args=(parent.pid,), daemon=True).start()


@contextlib.contextmanager
def block_signals() -> Iterator[None]:
    """Block signals until the block ends; workers started in it inherit this, so that no signal comes too early."""
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED_IN_WORKERS | {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def _end_with_parent(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
