"""The jobs that run folders record: whether they are active, their output, and how they are cancelled."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError, printable
from pretrain.common.files import read_json
from pretrain.common.run.lock import holder

from . import local_job, slurm
from .records import attempts, launch_files


def job_states(jobs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each job: PENDING (and in parentheses why), RUNNING, SLURM's name for how it ended, ENDED, or UNKNOWN.

    ENDED: only the run folder has details. UNKNOWN: a scheduler that does not answer, or another machine's process: it
    may be running. Each SLURM cluster is asked once for all its jobs.
    """
    asked: dict[str, list[tuple[str, str]]] = {}
    for job in jobs:
        if job["cluster"] == "slurm":
            asked.setdefault(job.get("slurm_cluster", ""), []).append((job["id"], job["name"]))
    known = {cluster: slurm.states(listed, cluster) for cluster, listed in asked.items()}
    return [
        known[job.get("slurm_cluster", "")][job["id"], job["name"]] if job["cluster"] == "slurm"
        else "UNKNOWN" if job["host"] != socket.gethostname()
        else "RUNNING" if local_job.is_running(job) else "ENDED"
        for job in jobs
    ]  # fmt: skip


def check_not_running(folder: Path, job: Mapping[str, Any], state: str) -> None:
    """Two jobs in one run folder would overwrite each other."""
    state, place = state.split()[0], shlex.quote(str(folder))
    if state in ("PENDING", "RUNNING"):
        raise UserError(
            f"job {job['id']} ({state.lower()}) is already working on {folder}; "
            f"wait for it, or: python tools/launch.py cancel {place}"
        )
    if state == "UNKNOWN" and not is_finished(folder, job):
        file = folder / "launch" / "launch.json"
        raise UserError(
            f"job {job['id']} may still be working on {folder} ({why_unknown(job)}); if you know that it has ended: "
            f"rm {shlex.quote(str(file))}"
        )


def why_unknown(job: Mapping[str, Any]) -> str:
    """Why the state of a job is UNKNOWN, and what to do."""
    return "SLURM does not answer; try again" if job["cluster"] == "slurm" else f"use {job['host']}, where it started"


def is_finished(folder: Path, job: Mapping[str, Any]) -> bool:
    """True if the run folder records that the job has ended for good."""
    tries = attempts(folder, job)
    return bool(tries) and tries[-1]["state"] in ("done", "stopped", "failed")


def describe_unrecorded_exit(folder: Path) -> str:
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
        listed = read_json(file)["jobs"]
        jobs += [(file.parents[1], job, job is listed[-1]) for job in listed]
    for (stage, job, is_last), state in zip(jobs, job_states([job for _, job, _ in jobs]), strict=True):
        if state == "UNKNOWN" and is_last and not is_finished(stage, job):
            problems.append(f"job {job['id']} of {stage} may still run ({why_unknown(job)})")
        if state.split()[0] not in ("PENDING", "RUNNING"):
            continue
        try:
            slurm.cancel(job, now) if job["cluster"] == "slurm" else local_job.stop(stage, job, now)
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
        problems.append(f"{what}; cancel it there")
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(owner["pid"], signal.SIGTERM)
        print(f"cancelled: {what}")
    return True


def print_logs(folder: Path, rank: int, follow: bool) -> None:
    """The newest job's output of a rank, and a user's mistake that ended it; with ``follow``, until Ctrl-C."""
    file = folder / "launch" / "launch.json"
    job = read_json(file)["jobs"][-1]
    moved = file.parent / Path(job["logs"]).name  # with the run folder; an array's logs lie elsewhere
    logs = moved if moved.is_dir() else Path(job["logs"])
    paths = local_job.log_paths(logs, rank)
    if job["cluster"] == "slurm":
        paths = [logs / f"{job['id']}_{rank}_log.{kind}" for kind in ("out", "err")]
    if not follow and not any(path.exists() for path in paths):
        raise UserError(f"rank {rank} of job {job['id']} has written nothing yet; add --follow to wait for it")
    command = ["tail", "-q", "-n", "+1", *["-F"] * follow, "--", *map(str, paths)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as tail:
        for line in tail.stdout or ():
            print(local_job.shown(line.rstrip("\n")), flush=True)
    failure = next(iter(attempts(folder, job)[-1:]), {}).get("failure", {})
    if failure.get("user_error"):  # its one line is in no rank's output
        print(printable(f"error: {failure['error']}"), file=sys.stderr)
