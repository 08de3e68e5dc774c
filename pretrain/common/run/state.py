"""The state of a run folder: `state.json`, which the stage writes, and `failed.RANK.json` of each rank that failed.

state.json contains the stage, its state (running, complete, stopped, requeued or failed) and the reason, the host, the
process id, the working folder (cwd), the attempt (SLURM counts requeues), and the times. A run that the launcher
started also has its submission (``job``), its work and the fingerprint of that work.
"""

import contextlib
import os
import socket
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ProcessLost, UserError, one_line
from ..files import read_json, remove, write_json
from ..interrupt import Stopped, StopRequest
from ..shell import find_working_folder
from . import file_names

_FAILURE_FILES = "failed.{}.json"  # by rank


@dataclass(frozen=True)
class RunContext:
    """What a process of a run is told when it is started; its entry point makes it and passes it down.

    Attributes:
        stop: the request to stop it.
        submission: name of the job that it is a rank of, whose entry point records the error of each rank; empty in a
            process that is no rank of a job, or one of torchrun. Unlike SLURM's job ids, names are never reused.
        state_entries: further entries of state.json: what the stage computes (``work``), and its fingerprint.
    """

    stop: StopRequest = field(default_factory=StopRequest)
    submission: str = ""
    state_entries: Mapping[str, Any] = field(default_factory=dict)


def read_json_or_empty(path: Path) -> dict[str, Any]:
    """Read a JSON object; return {} if the file is missing or damaged, which must not stop a job."""
    try:
        return read_json(path)
    except UserError:
        return {}


def read_state(folder: str | Path) -> dict[str, Any]:
    """Read the state of a run folder; return {} if no stage was started there."""
    return read_json_or_empty(Path(folder) / file_names.STATE)


def read_working_folder(folder: str | Path) -> str:
    """Return the folder in which the stage of a run folder worked; it is empty if no stage recorded it.

    Earlier versions did not. What the config of the run names relative to a folder is relative to this one.
    """
    return read_state(folder).get("cwd", "")


def is_state_of(folder: str | Path, submission: str) -> bool:
    """Return whether the job of this submission has written the state of a run folder."""
    return read_state(folder).get("job") == submission


def update_state(folder: str | Path, **values: Any) -> None:
    """Change entries of a run folder's state; only the process that claimed the folder, or its job, may do so."""
    write_json(Path(folder) / file_names.STATE, {**read_state(folder), **values, "updated": time.time()})


@contextlib.contextmanager
def record_state(folder: str | Path, stage: str, context: RunContext) -> Iterator[None]:
    """Record that a stage is running until the block ends, and how it ended.

    Raises:
        UserError: the state cannot be written. An error of the block is never replaced by this one.
    """
    attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    start = {"stage": stage, "state": "running", "host": socket.gethostname(), "pid": os.getpid(), "attempt": attempt}
    start["cwd"] = find_working_folder()
    now = time.time()
    start |= {"started": now, "updated": now, "job": context.submission, **context.state_entries}
    write_json(Path(folder) / file_names.STATE, start)
    for path in Path(folder).glob(_FAILURE_FILES.format("*")):
        is_of_this_job = context.submission and read_json_or_empty(path).get("job") == context.submission
        if not is_of_this_job:  # of this one, another rank may be faster
            remove(path)
    try:
        yield
    except BaseException as error:
        has_failed = isinstance(error, Exception) and not isinstance(error, Stopped)  # else Ctrl-C or a request to stop
        with contextlib.suppress(UserError):  # the disk may be full
            end = {"state": "failed" if has_failed else "stopped", "reason": one_line(error), "ended": time.time()}
            update_state(folder, **end, **({"remedy": error.remedy} if isinstance(error, Stopped) else {}))
        raise
    update_state(folder, state="complete", ended=time.time())


def write_failure(folder: str | Path, rank: int, error: BaseException | str, submission: str = "") -> None:
    """Record the error of a rank of this submission, which may have failed before its stage was started."""
    text = str(error) if isinstance(error, (UserError, str)) else f"{type(error).__name__}: {error}"
    trace = "" if isinstance(error, str) else "".join(traceback.format_exception(error))
    causes = {"user_error": isinstance(error, UserError), "followed": isinstance(error, ProcessLost)}
    process = {"rank": rank, "host": socket.gethostname(), "job": submission, "ended": time.time()}
    write_json(_name_failure_file(folder, rank), {**process, "error": text, "traceback": trace, **causes})


def has_recorded_failure(folder: str | Path, rank: int, submission: str) -> bool:
    """Return whether a rank of this submission has recorded its error."""
    return read_json_or_empty(_name_failure_file(folder, rank)).get("job") == submission


def read_failure(folder: str | Path, submission: str = "") -> dict[str, Any]:
    """Read the record of a submission's first failing rank; return {} if no rank failed.

    An error that followed from the loss of another rank counts only if no other error is known.
    """
    failures = [read_json_or_empty(path) for path in Path(folder).glob(_FAILURE_FILES.format("*"))]
    failures = [failure for failure in failures if failure.get("job") == submission]
    return min(failures, key=lambda failure: (failure["followed"], failure["ended"]), default={})


def read_outcome(folder: str | Path, submission: str = "") -> dict[str, Any]:
    """Return the state of a run folder, as far as the job of this submission has written it.

    Its ``state`` is empty until the stage starts. ``failure`` is the record of the first failing rank, or empty.

    Args:
        submission: as in `RunContext`.
    """
    state = read_state(folder)
    values = state if state.get("job", "") == submission else {}
    outcome = {"state": "", "reason": "", "failure": {}, **values}
    if outcome["state"] != "complete":  # a rank may fail at its exit, after its work
        outcome["failure"] = read_failure(folder, submission)
    if outcome["failure"]:
        outcome["state"] = "failed"
    return outcome


def is_end_recorded(outcome: Mapping[str, Any]) -> bool:
    """Return whether `read_outcome` says how the run has ended; a run that was killed has recorded nothing.

    One that was sent back to the queue has not ended: if its job is gone, it was cancelled there.
    """
    return outcome["state"] not in ("", "running", "requeued")


def _name_failure_file(folder: str | Path, rank: int) -> Path:
    return Path(folder) / _FAILURE_FILES.format(rank)
