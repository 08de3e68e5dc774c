"""The file of a job, which the launcher writes and each of the job's processes reads.

It contains the stage, SLURM's limits, and what the stage depends on besides its record: the working folder, in which
its relative names are looked up, and a digest of the user's modules.
"""

import os
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pretrain.common.config import extensions
from pretrain.common.errors import UserError, shorten_list
from pretrain.common.files import read_json, write_json
from pretrain.common.run.state import read_json_or_empty
from pretrain.common.shell import find_working_folder
from tools.stages.base import Stage
from tools.stages.registry import build_stage

from .job import Job


@dataclass(frozen=True)
class Limits:
    """The limits of a SLURM job.

    Attributes:
        minutes: time limit of an attempt.
        timeouts: requeues after a time limit that are left.
        patience_s: seconds from the signal to a requeue even if the stage has not stopped by then.
    """

    minutes: int
    timeouts: int
    patience_s: float

    def count_timeout(self, elapsed_s: float) -> "Limits":
        """Return what is left after an attempt that was asked to stop; a preemption comes before its limit is near."""
        limit_s = self.minutes * 60
        is_timeout = elapsed_s >= min(limit_s * 0.8, limit_s - 600)
        return replace(self, timeouts=self.timeouts - is_timeout)


def name_job_file(logs: Path, index: int | str = 0) -> Path:
    """Return the file of a job that writes to ``logs``, or of an array's job with this ``index``."""
    return logs / f"spec_{index}.json"


def write_job(file: Path, stage: Stage, limits: Limits | None = None) -> None:
    """Write the file of a job, whose path each of its processes gets; only one of SLURM has limits."""
    record = {"spec": stage.to_json(), "limits": asdict(limits) if limits else {}, "cwd": find_working_folder()}
    has_modules = stage.has_config and extensions.sources()  # without a config, the stage names nothing of theirs
    write_json(file, {**record, "imported": extensions.digest() if has_modules else ""})


def read_job(file: Path) -> dict[str, Any]:
    """Read the file of a job: its stage, and its limits, if it is one of SLURM.

    A job of SLURM imports the copy of the code that wrote its file. A launcher on this machine may have been started
    by an earlier version, which wrote the stage alone.
    """
    record = read_json(file)
    return record if "spec" in record else {"spec": record, "limits": {}}


def read_imported(job: Job) -> str:
    """Return the digest of the user's modules with which a job was submitted; "" if it uses none, or none is known."""
    index = job.id.partition("_")[2] or 0  # of an array's job
    return read_json_or_empty(name_job_file(Path(job.logs), index)).get("imported", "")


def open_stage(record: dict[str, Any]) -> Stage:
    """Build the stage of a job, and enter the folder in which the launcher worked.

    Setup lines may have entered another folder, and SLURM starts a job in /tmp where a node does not have its folder.

    Raises:
        UserError: this machine does not have the folder, in which the stage has relative names; or the user's modules
            are not those of the submission.
    """
    stage = build_stage(record["spec"])
    folder = record.get("cwd", "")
    if folder:
        try:
            os.chdir(folder)  # through a link on some nodes, where the working folder then has another name
        except OSError as error:
            names = stage.list_relative_names()
            if names:
                problem = f"{shorten_list(names)} is relative to {folder}, which {socket.gethostname()} does not have"
                raise UserError(f"{problem}; run the original command with absolute names") from error
    extensions.check_unchanged(record.get("imported", ""))
    return stage
