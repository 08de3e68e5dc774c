"""A job of this machine: whether it runs, how it is killed, and who ended it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError
from pretrain.common.lock import start_of
from pretrain.common.run_folder import read_json, write_json

_END_S = 10.0  # for killed processes to free their memory and their devices


def is_running(job: dict[str, Any]) -> bool:
    """True if the job's controller is alive; process ids are reused, so it has to be the one that was started."""
    started = start_of(int(job["id"]))
    return started != "" and started == job.get("started")


def kill(folder: Path, controller: int) -> None:
    """Ends a job without giving it time for a checkpoint."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(controller, signal.SIGSTOP)  # it would start more ranks, or report that its ranks have failed
    processes = [controller, *_children(controller)]
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + _END_S
    while any(map(start_of, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)


def note_end(folder: Path, logs: str, by: str) -> None:
    """Records in launch.json who ended the job that logs to ``logs``: a process that is killed cannot record it."""
    path = folder / "launch" / "launch.json"
    with contextlib.suppress(UserError):  # on a full disk the job must still end
        record = read_json(path)
        jobs = [{**job, "ended_by": by} if job["logs"] == logs else job for job in record["jobs"]]
        write_json(path, {**record, "jobs": jobs})


def ended_by(folder: Path, logs: str) -> str:
    """Who ended the job that logs to ``logs`` (see `note_end`); empty: nobody did."""
    with contextlib.suppress(UserError):
        jobs = read_json(folder / "launch" / "launch.json")["jobs"]
        return next((job.get("ended_by", "") for job in jobs if job["logs"] == logs), "")
    return ""


def _children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found
