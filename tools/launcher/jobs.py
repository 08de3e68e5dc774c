"""The jobs that run folders record: whether they are active, by SLURM or this system, and how they are cancelled."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError
from pretrain.common.lock import holder

from . import local, slurm
from .launch_file import launch_files, read_launch
from .ranks import attempts


def job_states(jobs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each job: PENDING (and in parentheses why), RUNNING, SLURM's name for how it ended, ENDED, or UNKNOWN.

    ENDED: only the run folder tells more. UNKNOWN: a scheduler that does not answer, or another machine's process: it
    may be running. SLURM is asked once for all jobs.
    """
    known = slurm.states([(job["id"], job["name"]) for job in jobs if job["cluster"] == "slurm"])
    return [
        known[job["id"], job["name"]] if job["cluster"] == "slurm"
        else "UNKNOWN" if job["host"] != socket.gethostname()
        else "RUNNING" if local.is_running(job) else "ENDED"
        for job in jobs
    ]  # fmt: skip


def check_not_running(folder: Path, job: Mapping[str, Any], state: str) -> None:
    """Two jobs in one run folder would overwrite each other.

    Raises:
        UserError: the ``folder``'s last job is pending or running, or its state cannot be found out.
    """
    state, place = state.split()[0], shlex.quote(str(folder))
    if state in ("PENDING", "RUNNING"):
        raise UserError(
            f"job {job['id']} ({state.lower()}) is already working on {folder}; "
            f"wait for it, or: python tools/launch.py cancel {place}"
        )
    if state == "UNKNOWN" and not is_finished(folder, job):
        silent = "SLURM does not answer" if job["cluster"] == "slurm" else f"it was started on {job['host']}"
        file = folder / "launch" / "launch.json"
        raise UserError(
            f"job {job['id']} may still be working on {folder} ({silent}); try again later or on the machine "
            f"that started it, or, if you know that it has ended: rm {shlex.quote(str(file))}"
        )


def is_finished(folder: Path, job: Mapping[str, Any]) -> bool:
    """True if the run folder records that the job has ended for good."""
    tries = attempts(folder, job)
    return bool(tries) and tries[-1]["state"] in ("done", "stopped", "failed")


def silent_end(folder: Path) -> str:
    """Why a job may have ended without recording how."""
    if shutil.disk_usage(folder).free < 2**20:
        return f"it could not record how it ended: the disk of {folder} is full"
    return "it exited without reporting an error"


def cancel(folder: Path, now: bool = False) -> None:
    """Ends every pending or running job of the folder; ``now``: without time for a checkpoint.

    Raises:
        UserError: a job cannot be ended from this machine, or SLURM refuses; the other jobs are still ended.
    """
    problems: list[str] = []
    has_ended = _end_launcher(folder, problems)
    jobs: list[tuple[Path, dict[str, Any], bool]] = []  # with the run folder, and whether it is the folder's last
    for file in launch_files(folder, required=not has_ended):
        try:
            listed = read_launch(file)["jobs"]
            jobs += [(file.parents[1], job, job is listed[-1]) for job in listed]
        except UserError as error:
            problems.append(str(error))
    for (stage, job, is_last), state in zip(jobs, job_states([job for _, job, _ in jobs]), strict=True):
        if state == "UNKNOWN" and is_last and not is_finished(stage, job):
            if job["cluster"] == "slurm":
                again = f"try again, or: scancel {job['id']}"
                problems.append(f"SLURM does not answer about job {job['id']} of {stage}; {again}")
            else:
                problems.append(_elsewhere(f"job {job['id']} of {stage} runs on {job['host']}", stage))
        if state.split()[0] not in ("PENDING", "RUNNING"):
            continue
        try:
            slurm.cancel(job["id"], now) if job["cluster"] == "slurm" else local.stop(stage, job, now)
        except UserError as error:
            problems.append(str(error))
            continue
        has_ended = True
        print(f"cancelled {job['cluster']} job {job['id']} ({stage})")
    if problems:
        raise UserError("; ".join(problems))
    if not has_ended:
        print(f"nothing runs in {folder}")


def _end_launcher(folder: Path, problems: list[str]) -> bool:
    """Ends the launcher that runs a pipeline here: it would start the next stage. False: there is none."""
    owner = holder(folder)
    if owner.get("work") not in ("pipeline", "sweep"):
        return False
    what = f"process {owner['pid']} on {owner['host']} runs the {owner['work']} in {folder}"
    if owner["host"] != socket.gethostname():
        problems.append(_elsewhere(what, folder))
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(owner["pid"], signal.SIGTERM)
        print(f"cancelled: {what}")
    return True


def _elsewhere(what: str, folder: Path) -> str:
    place = shlex.quote(str(folder))
    return f"{what}, as far as this machine can tell; on that machine, run: python tools/launch.py cancel {place}"
