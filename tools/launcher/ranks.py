"""One small file per rank and attempt, in the run folder: who runs where, how it ended, which rank failed first.

    launch/ranks/<submission>.<job>.<attempt>.<rank>.json   state: running | done | stopped | requeued | failed
    launch/ranks/<submission>.<job>.<attempt>.failed        the first failing rank's error, not what followed from it

Any machine that sees the file system can read them, without a clock or a scheduler. torch.distributed.run keeps error
files too, but only of ranks that it has started on one node, and submitit keeps results only of processes that end by
themselves; neither ends a rank that waits for a peer whose exit hangs.

The name of the submission is part of theirs because job ids are reused: process ids in containers, SLURM's by every new
cluster. The files are for people to read. Where they cannot be written (the disk is full), the reason is printed and
the job continues: ranks whose neighbor has failed are ended by their parent, srun or `controller`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from pretrain.common.errors import ProcessLost, UserError
from pretrain.common.run_folder import write_json

from .spec import read_json

_POLL_S = 5.0
_GRACE_S = 5.0  # between the first rank's failure and the end of those that did not notice


class RankRecord:
    """This rank's file, and a thread that ends this process once another rank has recorded its failure.

    The exit of a failed rank may hang (a library waits for its peers), and a rank that waits for it in a collective
    would wait for the time-out of the collective: half an hour.

    Args:
        attempt: the number of this start of the job, from 0; the same on every rank.
    """

    def __init__(
        self, folder: str | Path, submission: str, job_id: str, attempt: int, rank: int, world_size: int
    ) -> None:
        self.rank = rank
        self._stem = _ranks(folder) / f"{submission}.{job_id}.{attempt}"
        self._ended = threading.Event()
        self._values: dict[str, Any] = {
            "job": job_id, "attempt": attempt, "rank": rank, "world_size": world_size,
            "host": socket.gethostname(), "pid": os.getpid(), "started": time.time(), "state": "running",
        }  # fmt: skip
        self._write()
        if world_size > 1:
            threading.Thread(target=self._watch, daemon=True).start()

    def end(self, state: str, reason: str = "") -> None:
        """Records how this rank ended."""
        self._ended.set()
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

    def _watch(self) -> None:
        marker = f"{self._stem}.failed"
        while not self._ended.wait(_POLL_S):
            if os.path.exists(marker):
                if not self._ended.wait(_GRACE_S):
                    self.end("failed", "ended because another rank failed")
                    os._exit(1)
                return


def mark_failed(
    stem: Path, rank: int, error: str, *, traceback: str = "", user_error: bool = False, followed: bool = False
) -> None:
    """Creates ``<stem>.failed`` unless another rank was first; ``error`` is printed where that cannot be done.

    Args:
        followed: the error followed from another rank's, which replaces it as soon as it is known.
    """
    failure = {
        "rank": rank, "error": error, "traceback": traceback, "user_error": user_error, "followed": followed,
        "host": socket.gethostname(), "time": time.time(),
    }  # fmt: skip
    marker, file = Path(f"{stem}.failed"), None
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        if not followed and marker.exists() and read_json(marker).get("followed"):
            write_json(marker, failure)
            return
        with contextlib.suppress(FileExistsError), open(marker, "x") as file:
            file.write(json.dumps(failure))
    except (OSError, UserError) as reason:
        if file is not None:  # half of it would keep the controller from creating it
            marker.unlink(missing_ok=True)
        why = reason.strerror if isinstance(reason, OSError) else reason
        warn(f"error: {error} (of rank {rank}; it could not be written to {marker}: {why})")


def attempts(folder: str | Path, job_id: str) -> list[dict[str, Any]]:
    """Rank 0's records of a job, oldest first; ``failure`` is the first failing rank's error, where there is one.

    Where another rank failed before rank 0 could write its record, the failure stands for it.
    """
    files = [*_ranks(folder).glob(f"*.{job_id}.*.0.json"), *_ranks(folder).glob(f"*.{job_id}.*.failed")]
    stems = {path.with_name(path.name.removesuffix(".failed").removesuffix(".0.json")) for path in files}
    newest = max((stem.name.split(".")[0] for stem in stems), default="")  # names begin with the time of submission
    found = []
    for stem in sorted((stem for stem in stems if stem.name.startswith(f"{newest}.")), key=_attempt):
        record, failure = (read_json(Path(f"{stem}.{end}")) for end in ("0.json", "failed"))
        if failure:
            known = {"attempt": _attempt(stem), "started": failure.get("time", 0.0), "host": failure.get("host", "")}
            state = record.get("state", "failed").replace("running", "failed")
            record = {**known, **record, "failure": failure, "state": state}
        if record:
            found.append(record)
    return found


def warn(text: str) -> None:
    """Prints to standard error, which may be a file on a full disk."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _ranks(folder: str | Path) -> Path:
    return Path(folder) / "launch" / "ranks"


def _attempt(stem: Path) -> int:
    return int(stem.name.rpartition(".")[2])
