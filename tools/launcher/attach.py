"""Follows a local job on the terminal; the first Ctrl-C stops it after a checkpoint, the second immediately."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrain.common import interrupt

from . import local_job
from .control import progress, silent_end
from .job import LOCAL_STOP
from .logs import Tail, log_paths
from .ranks import attempts


class Interrupted(Exception):
    """The user ended the job."""


def follow(folder: Path, job: Any) -> dict[str, Any]:
    """Shows a local job until it ends; returns rank 0's last record, with the first failing rank's error if any.

    Raises:
        Interrupted: this process got a signal (Ctrl-C, SIGTERM, hang-up) or the job was cancelled, so that it stopped.
    """
    logs = str(job.paths.folder)
    tail = Tail(log_paths({"id": job.job_id, "logs": logs}, 0))
    line = _StatusLine(folder)
    with _forward_signals(folder, job._process) as signals:
        while job._process.poll() is None:
            line.clear()
            tail.copy()
            line.show()
            time.sleep(0.2)
        line.clear()
        tail.copy()
    tries = attempts(folder, job.job_id)
    last = tries[-1] if tries else {"state": "running"}
    by = local_job.ended_by(folder, logs)
    if signals and not by:
        by = f"a second {signals[1]}" if len(signals) > 1 else signals[0]
        local_job.note_end(folder, logs, by)
    if by:
        raise Interrupted(_interruption(folder, last, by))
    if last["state"] == "running":
        killed = "it was killed by SIGKILL" if job._process.returncode == -signal.SIGKILL else silent_end(folder)
        last = {**last, "state": "failed", "reason": killed}
    return last


def _interruption(folder: Path, last: dict[str, Any], by: str) -> str:
    if last["state"] == "done":  # no step was left to stop after
        return f"the stage in {folder} completed before it could be stopped"
    if last["state"] == "running":
        return f"the stage in {folder} was stopped immediately by {by}, without a checkpoint"
    failure = last.get("failure", {}).get("error", "")
    return last.get("reason", "").replace(LOCAL_STOP, by) or f"{by}: the stage in {folder} has ended; {failure}"


@contextlib.contextmanager
def signals_as_requests() -> Iterator[None]:
    """Remembers signals that arrive while `follow` does not handle them: as a job is started, or between two stages."""
    interrupt.clear()
    earlier = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    interrupt.install_handlers()
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        interrupt.clear()


@contextlib.contextmanager
def _forward_signals(folder: Path, process: Any) -> Iterator[list[str]]:
    """The first signal asks the job to stop after its current step; the second kills it."""
    signals: list[str] = []

    def forward(number: int, _frame: Any) -> None:
        signals.append("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
        if len(signals) == 1:
            text = "Stopping after the current step and its checkpoint; press Ctrl-C again to stop immediately."
            print(f"\n{text}", file=sys.stderr, flush=True)
            process.send_signal(signal.SIGTERM)  # the controller forwards it to every rank
        else:
            local_job.kill(folder, process.pid)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if interrupt.stop_requested():  # while this job was being started
        forward(signal.Signals[interrupt.stop_requested()], None)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _StatusLine:
    """The newest metrics on the last line of the terminal; nothing where there is no terminal."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._shown, self._is_terminal = folder, "", sys.stderr.isatty()

    def show(self) -> None:
        if self._is_terminal:
            self._shown = progress(self._folder)
            print(f"\r{self._shown}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            print("\r" + " " * len(self._shown) + "\r", end="", file=sys.stderr, flush=True)
            self._shown = ""
