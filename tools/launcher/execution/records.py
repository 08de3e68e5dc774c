"""The launch record of the jobs that the launcher starts: `launch/launch.json` in each run folder.

It contains the stage, its options and all jobs that were started there. How a job ended is in state.json, which the
stage writes (`pretrain.common.run.state`). Both name a job by the folder of its output: unlike job ids, names of these
folders are never reused.
"""

import contextlib
import os
import shlex
import socket
import sys
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pretrain.common.config import extensions
from pretrain.common.errors import UserError
from pretrain.common.files import write_json
from pretrain.common.run.folder import read_git_state
from pretrain.common.run.state import read_failure, read_record, read_state, write_failure

from ..options import Resources
from ..spec import StageSpec


def find_launch_files(folder: Path) -> list[Path]:
    """Return the launch.json of a run folder, or of all stages below the folder of a pipeline."""
    file = folder / "launch" / "launch.json"
    files = [file] if file.is_file() else find_files(folder, "launch/launch.json")
    if not files:
        raise UserError(f"no launch/launch.json in {folder}, or below it; pass the folder of a run or pipeline")
    return files


def find_files(folder: Path, *names: str) -> list[Path]:
    """Return the files of these names in and below ``folder``, except in jobs' copies of the code."""
    if os.path.isdir(folder):
        os.listdir(folder)  # raises PermissionError, which os.walk hides
    files = []
    for parent, folders, _ in os.walk(folder):
        files += [Path(parent, name) for name in names if os.path.isfile(os.path.join(parent, name))]
        folders[:] = sorted(name for name in folders if name != "launch")
    return files


def name_log_folder(folder: str | Path) -> Path:
    """Return a new log folder, whose name is unique: job ids repeat after a reset of SLURM."""
    return Path(folder) / "launch" / f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"


def format_resume_command(folder: str) -> str:
    """Return the command that continues a run or pipeline."""
    return shlex.join(["python", "tools/launch.py", "resume", folder, *extensions.options()])


def record_job(spec: StageSpec, resources: Resources, job_id: str, logs: Path, *, name: str = "", **more: Any) -> None:
    """Add a job to launch.json; ``name`` is that of `submit.name_job`, which the jobs of an array share."""
    path = Path(spec.folder) / "launch" / "launch.json"
    request = resources.request
    clusters = {"cluster": request.cluster, "slurm_cluster": request.slurm_cluster}
    source = {"host": socket.gethostname(), "submitted": time.time(), "code": read_git_state()}
    job = {"id": job_id, "name": name, "logs": str(logs), **clusters, **source, **more}
    jobs = [*read_record(path).get("jobs", []), job]
    record = {"spec": spec.to_json(), "options": asdict(request), "command": shlex.join(sys.argv), "jobs": jobs}
    try:
        write_json(path, record)
    except UserError as error:  # too late to refuse: the job is submitted
        warn(f"warning: {error}; {request.cluster} job {job_id} is submitted, but status and cancel cannot find it")


def read_outcome(folder: str | Path, logs: str | Path = "") -> dict[str, Any]:
    """Return the state of a run folder, as far as the job that logs to ``logs`` has written it.

    Its ``state`` is empty until the stage starts. ``failure`` is the record of the first failing rank, or empty.

    Args:
        logs: empty for a run that was started without the launcher.
    """
    job = Path(logs).name
    state = read_state(folder)
    job_state = state if state.get("job", "") == job else {}
    outcome = {"state": "", "reason": "", "failure": {}, **job_state}
    if outcome["state"] != "complete":  # a rank may fail at its exit, after its work
        outcome["failure"] = read_failure(folder, job)
    if outcome["failure"]:
        outcome["state"] = "failed"
    return outcome


def record_failure(folder: str | Path, rank: int, error: BaseException | str, job: str = "") -> None:
    """Record the error of a rank (see `write_failure`); print it where the disk is full."""
    try:
        write_failure(folder, rank, error, job)
    except UserError as reason:
        warn(f"error: {error} (of rank {rank}; it could not be recorded: {reason})")


def warn(text: str) -> None:
    """Print to standard error, which may be a file on a full disk."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
