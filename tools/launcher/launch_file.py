"""launch/launch.json of a run folder: the stage, its options, and every job that was started there."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError
from pretrain.common.run_folder import git_state, read_json, write_json

from .options import Options
from .ranks import warn
from .spec import StageSpec


def launch_files(folder: Path, required: bool = True) -> list[Path]:
    """The launch.json of a run folder, or of all stages below the folder of a pipeline or sweep.

    Raises:
        UserError: nothing was started there, and something is ``required``.
    """
    own = folder / "launch" / "launch.json"
    found = [own] if own.is_file() else files_below(folder, "launch/launch.json")
    if required and not found:
        raise UserError(f"nothing was started in {folder} (no launch/launch.json there or below)")
    return found


def files_below(folder: Path, *names: str) -> list[Path]:
    """The files of these names in and below ``folder``, without those in what jobs left (a copy of the code)."""
    files = []
    for place, folders, _ in os.walk(folder):
        files += [Path(place, name) for name in names if os.path.isfile(os.path.join(place, name))]
        folders[:] = sorted(name for name in folders if name != "launch")
    return files


def read_launch(file: Path) -> dict[str, Any]:
    """Reads a launch.json and checks that it has the keys that the commands need.

    Raises:
        UserError: it is damaged.
    """
    data = read_json(file)
    jobs = data.get("jobs")
    kinds = {"id": str, "cluster": str, "name": str, "logs": str, "host": str, "tasks": int}
    if not isinstance(data.get("spec"), dict) or not isinstance(jobs, list) or not jobs:
        raise UserError(f"{file} names no job; it is damaged or the wrong file")
    if not all(isinstance(job, dict) and all(isinstance(job.get(key), kinds[key]) for key in kinds) for job in jobs):
        names = ", ".join(sorted(kinds))
        raise UserError(f"{file} lacks one of {names}, or has another kind of value; it is damaged or the wrong file")
    return data


def new_log_folder(folder: str | Path) -> Path:
    """A new name per submission: where job ids repeat, submitit would find the result of an earlier job."""
    return Path(folder) / "launch" / f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"


def record(spec: StageSpec, options: Options, job_id: str, logs: Path, *, name: str = "", **more: Any) -> None:
    """Adds a job to launch.json; ``name`` is that of `job_name`, which the jobs of an array share."""
    path = Path(spec.folder) / "launch" / "launch.json"
    job = {
        "id": job_id, "cluster": options.cluster, "name": name, "logs": str(logs), "host": socket.gethostname(),
        "submitted": time.time(), "tasks": options.nodes * options.tasks_per_node, "code": git_state(), **more,
    }  # fmt: skip
    jobs = [*(read_launch(path)["jobs"] if path.exists() else []), job]
    try:
        write_json(
            path, {"spec": spec.to_json(), "options": asdict(options), "command": shlex.join(sys.argv), "jobs": jobs}
        )
    except UserError as error:  # too late to refuse: the job is submitted
        warn(f"warning: {error}; {options.cluster} job {job_id} is under way, but status and cancel cannot find it")
