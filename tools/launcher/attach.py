"""Shows local jobs on the terminal; the first Ctrl-C stops them after a checkpoint, the second immediately."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.common import interrupt

from . import local_job
from .control import silent_end
from .job import LOCAL_STOP
from .logs import Tail, log_paths
from .ranks import attempts
from .status import progress


class Interrupted(Exception):
    """The user ended the job."""


@dataclass
class _Shown:
    """A local job that is running: its folder, its process, and its output that is still to be shown."""

    folder: Path
    job: Any
    output: Tail
    was_asked_to_stop: bool = False

    @property
    def process(self) -> Any:
        return self.job._process


class Terminal:
    """Shows the output of local jobs until they end, and forwards this process's signals to all of them.

    Attributes:
        signals: what this process got, in words; the first one asked the jobs to stop, the second killed them.
    """

    def __init__(self) -> None:
        self.signals: list[str] = []
        self._jobs: dict[str, _Shown] = {}
        self._line = _StatusLine()
        self._earlier: dict[int, Any] = {}

    def __enter__(self) -> Terminal:
        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._earlier = {number: signal.signal(number, self._forward) for number in handled}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def add(self, key: str, folder: Path, job: Any, prefix: str = "") -> None:
        """Shows a job that was just started.

        Args:
            prefix: before every line of its output, where several jobs run at the same time.
        """
        paths = log_paths({"id": job.job_id, "logs": str(job.paths.folder)}, 0)
        self._jobs[key] = _Shown(folder, job, Tail(paths, prefix))
        if interrupt.stop_requested():  # while this job was being started
            self._forward(signal.Signals[interrupt.stop_requested()], None)
        elif self.signals:
            self._ask_to_stop()

    def wait(self) -> tuple[str, dict[str, Any]]:
        """Waits until one of the jobs has ended.

        Returns:
            Its key, and rank 0's last record, with the first failing rank's error if any. If a signal to this process
            (Ctrl-C, SIGTERM, hang-up) or `cancel` ended the job, the record's ``interrupted`` says so.
        """
        while True:
            ended = next((key for key, shown in self._jobs.items() if shown.process.poll() is not None), None)
            self._line.clear()
            for shown in self._jobs.values():
                shown.output.copy()
            if ended is not None:
                return ended, self._record(self._jobs.pop(ended))
            self._line.show([progress(shown.folder) for shown in self._jobs.values()])
            time.sleep(0.2)

    def _record(self, shown: _Shown) -> dict[str, Any]:
        folder, job, logs = shown.folder, shown.job, str(shown.job.paths.folder)
        tries = attempts(folder, job.job_id)
        last = tries[-1] if tries else {"state": "running"}
        by = local_job.ended_by(folder, logs)
        if self.signals and not by:
            by = f"a second {self.signals[1]}" if len(self.signals) > 1 else self.signals[0]
            local_job.note_end(folder, logs, by)
        if by:
            return {**last, "interrupted": _interruption(folder, last, by)}
        if last["state"] == "running":
            killed = "it was killed by SIGKILL" if shown.process.returncode == -signal.SIGKILL else silent_end(folder)
            last = {**last, "state": "failed", "reason": killed}
        return last

    def _forward(self, number: int, _frame: Any) -> None:
        self.signals.append("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
        if len(self.signals) == 1:
            text = "Stopping after the current step and its checkpoint; press Ctrl-C again to stop immediately."
            print(f"\n{text}", file=sys.stderr, flush=True)
            self._ask_to_stop()
        else:
            for shown in self._jobs.values():
                local_job.kill(shown.folder, shown.process.pid)

    def _ask_to_stop(self) -> None:
        for shown in self._jobs.values():
            if not shown.was_asked_to_stop:
                shown.was_asked_to_stop = True
                shown.process.send_signal(signal.SIGTERM)  # the controller forwards it to every rank


def _interruption(folder: Path, last: dict[str, Any], by: str) -> str:
    if last["state"] == "done":  # no step was left to stop after
        return f"the stage in {folder} completed before it could be stopped"
    if last["state"] == "running":
        return f"the stage in {folder} was stopped immediately by {by}, without a checkpoint"
    failure = last.get("failure", {}).get("error", "")
    return last.get("reason", "").replace(LOCAL_STOP, by) or f"{by}: the stage in {folder} has ended; {failure}"


class _StatusLine:
    """The newest metrics on the last line of the terminal; nothing where there is no terminal."""

    def __init__(self) -> None:
        self._shown, self._is_terminal = "", sys.stderr.isatty()

    def show(self, parts: list[str]) -> None:
        if self._is_terminal:
            self._shown = " | ".join(filter(None, parts))[: shutil.get_terminal_size().columns - 1]
            print(f"\r{self._shown}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            print("\r" + " " * len(self._shown) + "\r", end="", file=sys.stderr, flush=True)
            self._shown = ""
