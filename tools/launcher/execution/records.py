"""The launch record of the jobs that the launcher starts: `launch/launch.json` in each run folder.

It contains the stage, its options and all jobs that were started there. How a job ended is in state.json, which the
stage writes (`pretrain.common.run.state`). Both name a job by the folder of its output: unlike job ids, names of these
folders are never reused.
"""

import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from pretrain.common.config import extensions
from pretrain.common.errors import UserError
from pretrain.common.files import write_json
from pretrain.common.output import warn
from pretrain.common.run.folder import read_git_state
from pretrain.common.run.state import find_working_folder, read_json_or_empty
from tools.stages.base import Stage

from ..resources import Resources
from .job import Job


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


def format_resume_command(folder: str) -> str:
    """Return the command that continues a run or pipeline."""
    return shlex.join(["python", "tools/launch.py", "resume", folder, *extensions.options()])


def format_original_command(folder: Path) -> str:
    """Return the command that started the jobs of a run folder, as a user of this working folder types it."""
    record = read_json_or_empty(folder / "launch" / "launch.json")
    command = f"python {record.get('command', '')}"
    working_folder = record.get("cwd", "")
    is_here = working_folder in ("", find_working_folder())
    return command if is_here else f"cd {shlex.quote(working_folder)} && {command}"


def record_job(spec: Stage, resources: Resources, job: Job) -> None:
    """Add a job to the launch.json of its run folder."""
    path = job.folder / "launch" / "launch.json"
    earlier = read_json_or_empty(path)
    jobs = [*earlier.get("jobs", []), {**job.to_record(), "code": read_git_state()}]
    is_resumed = sys.argv[1:2] == ["resume"] and "command" in earlier
    record = {
        "spec": spec.to_json(),
        "options": asdict(resources.request),
        "command": earlier["command"] if is_resumed else shlex.join(sys.argv),
        "cwd": find_working_folder(),
        "jobs": jobs,
    }
    try:
        write_json(path, record)
    except UserError as error:  # too late to refuse: the job is submitted
        warn(f"warning: {error}; {job.cluster} job {job.id} is submitted, but status and cancel cannot find it")
