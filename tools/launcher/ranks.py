"""One small file per rank and attempt, in the run folder: who runs where, how it ended, which rank failed first.

    launch/ranks/<submission>.<attempt>.<rank>.json   state: running | done | stopped | requeued | failed
    launch/ranks/<submission>.<attempt>.failed        the first failing rank's error, not what followed from it

Any machine that sees the file system can read them, without a clock or a scheduler. The submission is the name of the
folder with the job's output: unlike job ids, it never comes again. Where the files cannot be written (the disk is
full), the reason is printed and the job continues. Ranks whose neighbor has failed are ended by srun or `local`.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrain.common.errors import ProcessLost, UserError
from pretrain.common.run_folder import write_json

from .spec import read_json


class RankRecord:
    """This rank's file.

    Args:
        attempt: the number of this start of the job, from 0; the same on every rank.
    """

    def __init__(self, folder: str | Path, submission: str, attempt: int, rank: int) -> None:
        self.rank = rank
        self._stem = stem(folder, submission, attempt)
        self._values: dict[str, Any] = {
            "attempt": attempt, "rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "started": time.time(),
            "state": "running",
        }  # fmt: skip
        self._write()

    def end(self, state: str, reason: str = "") -> None:
        """Records how this rank ended."""
        self._values.update(state=state, reason=reason, ended=time.time())
        self._write()

    def fail(self, error: BaseException) -> None:
        """Records this rank's error, as the job's first one unless another rank was earlier."""
        user_error = isinstance(error, UserError)
        line = str(error) if user_error else f"{type(error).__name__}: {error}"
        text = "".join(traceback.format_exception(error))
        self.end("failed", line)
        is_lost = isinstance(error, ProcessLost)
        mark_failed(self._stem, self.rank, line, traceback=text, user_error=user_error, followed=is_lost)

    def _write(self) -> None:
        try:
            write_json(f"{self._stem}.{self.rank}.json", self._values)
        except UserError as error:
            warn(f"warning: {error}")


def mark_failed(
    place: Path, rank: int, error: str, *, traceback: str = "", user_error: bool = False, followed: bool = False
) -> None:
    """Creates ``<place>.failed`` unless another rank was first; ``error`` is printed where that cannot be done.

    Args:
        followed: the error followed from another rank's, which replaces it as soon as it is known.
    """
    failure = {
        "rank": rank, "error": error, "traceback": traceback, "user_error": user_error, "followed": followed,
        "host": socket.gethostname(), "time": time.time(),
    }  # fmt: skip
    marker, file = Path(f"{place}.failed"), None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if not followed and marker.exists() and read_json(marker).get("followed"):
            write_json(marker, failure)
            return
        with contextlib.suppress(FileExistsError), open(marker, "x") as file:
            file.write(json.dumps(failure))
    except (OSError, UserError) as reason:
        if file is not None:  # half of it would keep others from creating it
            marker.unlink(missing_ok=True)
        why = reason.strerror if isinstance(reason, OSError) else reason
        warn(f"error: {error} (of rank {rank}; it could not be written to {marker}: {why})")


def attempts(folder: str | Path, job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rank 0's records of a job of launch.json, oldest first, each with the first failing rank's error as ``failure``.

    Where another rank failed before rank 0 could write its record, the failure stands for it.
    """
    submission = Path(job["logs"]).name
    starts = {int(path.name.split(".")[1]) for end in ("0.json", "failed")
              for path in stem(folder, submission, 0).parent.glob(f"{glob.escape(submission)}.*.{end}")}  # fmt: skip
    records = []
    for attempt in sorted(starts):
        place = stem(folder, submission, attempt)
        record, failure = (read_json(Path(f"{place}.{end}")) for end in ("0.json", "failed"))
        if failure:
            known = {"attempt": attempt, "started": failure.get("time", 0.0), "host": failure.get("host", "")}
            state = record.get("state", "failed").replace("running", "failed")
            record = {**known, **record, "failure": failure, "state": state}
        if record:
            records.append(record)
    return records


def warn(text: str) -> None:
    """Prints to standard error, which may be a file on a full disk."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def stem(folder: str | Path, submission: str, attempt: int) -> Path:
    """What the names of an attempt's files begin with."""
    return Path(folder) / "launch" / "ranks" / f"{submission}.{attempt}"
