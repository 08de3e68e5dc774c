"""A job of this machine with its output on the terminal; Ctrl-C ends it, the first time with a checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrain.common import interrupt

from .control import Tail, children, log_paths, progress
from .ranks import attempts
from .spec import read_json


class Interrupted(Exception):
    """The user ended the job."""


def follow(folder: Path, job: Any) -> dict[str, Any]:
    """Shows a local job until it ends; returns rank 0's last record, with the first failing rank's error if any.

    Raises:
        Interrupted: the job stopped because this process was told to (Ctrl-C, SIGTERM, hang-up).
    """
    record = read_json(folder / "launch" / "launch.json")["jobs"][-1]
    tail = Tail(log_paths(record, 0))
    line = _StatusLine(folder)
    with _hand_on_signals(job._process) as told:
        while job._process.poll() is None:
            line.clear()
            tail.copy()
            line.show()
            time.sleep(0.2)
        line.clear()
        tail.copy()
    tries = attempts(folder, record["id"])
    last = tries[-1] if tries else {"state": "failed", "reason": "it ended before its first line"}
    if last["state"] == "running":
        last = {**last, "state": "failed", "reason": "it was killed (out of memory?)"}
    if told:  # also where the stage had no step left to stop after: what follows it must not start
        raise Interrupted(last.get("reason") or f"the stage in {folder} was at its end and is complete")
    return last


@contextlib.contextmanager
def _hand_on_signals(process: Any) -> Iterator[list[int]]:
    """The first signal asks the job to stop after its step; the second ends it at once."""
    told: list[int] = []

    def hand_on(number: int, _frame: Any) -> None:
        told.append(number)
        if len(told) == 1:
            print("\nstopping after the step in hand and its checkpoint (again: at once)", file=sys.stderr, flush=True)
            process.send_signal(signal.SIGTERM)  # submitit's controller hands it on to every rank
            return
        for pid in (*children(process.pid), process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if interrupt.stop_requested():  # a pipeline was told to stop while it started this job
        hand_on(signal.SIGTERM, None)
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _StatusLine:
    """The newest metrics on the terminal's last line; nothing where there is no terminal."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._shown, self._on = folder, "", sys.stderr.isatty()

    def show(self) -> None:
        if self._on:
            self._shown = progress(self._folder)
            print(f"\r{self._shown}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            print("\r" + " " * len(self._shown) + "\r", end="", file=sys.stderr, flush=True)
            self._shown = ""
