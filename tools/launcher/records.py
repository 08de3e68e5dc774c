"""What the launcher and the jobs record in a run folder.

    launch/launch.json                               the stage, its options, and every job that was started there
    launch/ranks/<submission>.<attempt>.<rank>.json  state: running | done | stopped | requeued | failed, with the error

Any machine that sees the file system can read them, without a scheduler. The submission is the name of the folder with
the job's output: unlike job ids, it never comes again. Where a rank's files cannot be written (the disk is full), the
reason is printed and the job continues.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shlex
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pretrain.common.errors import ProcessLost, UserError
from pretrain.common.files import write_json
from pretrain.common.run.folder import git_state

from .options import Options
from .spec import StageSpec, read_record


def launch_files(folder: Path, required: bool = True) -> list[Path]:
    """The launch.json of a run folder, or of all stages below the folder of a pipeline or sweep."""
    file = folder / "launch" / "launch.json"
    files = [file] if file.is_file() else files_below(folder, "launch/launch.json")
    if required and not files:
        raise UserError(f"nothing was started in {folder} (no launch/launch.json there or below)")
    return files


def files_below(folder: Path, *names: str) -> list[Path]:
    """The files of these names in and below ``folder``, without those in what jobs left (a copy of the code)."""
    files = []
    for place, folders, _ in os.walk(folder):
        files += [Path(place, name) for name in names if os.path.isfile(os.path.join(place, name))]
        folders[:] = sorted(name for name in folders if name != "launch")
    return files


def new_log_folder(folder: str | Path) -> Path:
    """A new name per submission: where job ids repeat, submitit would find the result of an earlier job."""
    return Path(folder) / "launch" / f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"


def record_job(spec: StageSpec, options: Options, job_id: str, logs: Path, *, name: str = "", **more: Any) -> None:
    """Adds a job to launch.json; ``name`` is that of `submit.name_job`, which the jobs of an array share."""
    path = Path(spec.folder) / "launch" / "launch.json"
    job = {
        "id": job_id, "cluster": options.cluster, "slurm_cluster": options.sbatch.get("clusters", ""), "name": name,
        "logs": str(logs), "host": socket.gethostname(), "submitted": time.time(),
        "tasks": options.nodes * options.tasks_per_node, "code": git_state(), **more,
    }  # fmt: skip
    jobs = [*read_record(path).get("jobs", []), job]
    record = {"spec": spec.to_json(), "options": asdict(options), "command": shlex.join(sys.argv), "jobs": jobs}
    try:
        write_json(path, record)
    except UserError as error:  # too late to refuse: the job is submitted
        warn(f"warning: {error}; {options.cluster} job {job_id} is under way, but status and cancel cannot find it")


class RankRecord:
    """The file of a rank.

    Args:
        attempt: the number of this start of the job, from 0; the same on every rank.
    """

    def __init__(self, folder: str | Path, submission: str, attempt: int, rank: int) -> None:
        self._path = Path(folder) / "launch" / "ranks" / f"{submission}.{attempt}.{rank}.json"
        self._place = {"attempt": attempt, "rank": rank, "host": socket.gethostname(), "started": time.time()}

    def begin(self) -> None:
        self._write("running")

    def end(self, state: str, reason: str = "") -> None:
        """Records how this rank ended."""
        self._write(state, reason=reason, ended=time.time())

    def fail(self, error: BaseException) -> None:
        """Records this rank's error."""
        is_mistake = isinstance(error, UserError)
        line = str(error) if is_mistake else f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        self._fail(line, trace, user_error=is_mistake, followed=isinstance(error, ProcessLost))

    def die(self, error: str) -> None:
        """Records, in another process, how a rank ended that did not record it."""
        if not self.has_failed():
            self._fail(error)

    def has_failed(self) -> bool:
        """True if this rank's error is recorded; the rank may still hang at its exit."""
        return read_record(self._path).get("state") == "failed"

    def _fail(self, error: str, trace: str = "", user_error: bool = False, followed: bool = False) -> None:
        values = {"error": error, "traceback": trace, "user_error": user_error, "followed": followed}
        self._write("failed", ended=time.time(), **values)

    def _write(self, state: str, **values: Any) -> None:
        try:
            write_json(self._path, {**self._place, **read_record(self._path), "state": state, **values})
        except UserError as reason:
            what = f"error: {values['error']}" if "error" in values else f"warning: {state}"
            warn(f"{what} (of rank {self._place['rank']}; it could not be recorded: {reason})")


def attempts(folder: str | Path, job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rank 0's records of a job of launch.json, oldest first, each with the first failing rank's as ``failure``.

    Where another rank failed before rank 0 could write its record, the failure stands for it. An error that followed
    from another rank's is the first one only where no other is known.
    """
    by_attempt: dict[int, list[dict[str, Any]]] = {}
    submission = glob.escape(Path(job["logs"]).name)
    for path in sorted((Path(folder) / "launch" / "ranks").glob(f"{submission}.*.json")):
        if record := read_record(path):
            by_attempt.setdefault(record["attempt"], []).append(record)
    records = []
    for _, ranks in sorted(by_attempt.items()):
        record = min(ranks, key=lambda rank: rank["rank"])
        if failed := [rank for rank in ranks if rank["state"] == "failed"]:
            failure = min(failed, key=lambda rank: (rank["followed"], rank["ended"]))
            record = {**record, "failure": failure, "state": record["state"].replace("running", "failed")}
        records.append(record)
    return records


def warn(text: str) -> None:
    """Prints to standard error, which may be a file on a full disk."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
