"""The jobs of run folders: whether they are active, their output, and how they are cancelled."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError, escape_control
from pretrain.common.files import read_json

from . import local_job, slurm
from .records import find_launch_files, read_outcome, warn

_ENDING_CHECKS, _ENDING_CHECK_S = 30, 2.0  # longer than the 30 s that SLURM leaves to processes by default
# Meaning of SLURM's reasons for a job here, where the word alone does not say it.
_WAITS = "it waits forever: cancel it, and resume with another --time or --partition"
_HELD = " (it is held; once the reason is gone: scontrol release JOB)"
_MEANING = {
    "DependencyNeverSatisfied": " (a job that it waits for has failed)",
    "PartitionTimeLimit": f" (its time limit is above the partition's; {_WAITS})",
    "PartitionNodeLimit": f" (it asks for more nodes than the partition has; {_WAITS})",
    "PartitionConfig": f" (no node of the partition has what it asks for; {_WAITS})",
    "QOSMaxWallDurationPerJobLimit": f" ({_WAITS})",
    "AssocMaxWallDurationPerJobLimit": f" ({_WAITS})",
    "JobHeldUser": _HELD,
    "JobHeldAdmin": _HELD,
    "launch failed requeued held": _HELD,
    "job requeued in held state": _HELD,
}


def query_states(jobs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return each job's state: PENDING with its reason in parentheses, RUNNING, or how it ended in SLURM's words.

    ENDED means that only the run folder has details. UNKNOWN means that the job may be running: the scheduler does not
    answer, or the job is a process of another machine. Each SLURM cluster is asked once for all its jobs.
    """
    by_cluster: dict[str, list[tuple[str, str]]] = {}
    for job in jobs:
        if job["cluster"] == "slurm":
            by_cluster.setdefault(job.get("slurm_cluster", ""), []).append((job["id"], job["name"]))
    states = {cluster: slurm.query_states(ids, cluster) for cluster, ids in by_cluster.items()}
    return [
        states[job.get("slurm_cluster", "")][job["id"], job["name"]]
        if job["cluster"] == "slurm"
        else local_job.read_job_state(job)
        for job in jobs
    ]


def read_last_jobs(folders: Iterable[Path]) -> dict[Path, tuple[dict[str, Any], str]]:
    """Read the last job of each run folder in which the launcher started one, and its state (see `query_states`)."""
    files = {folder: folder / "launch" / "launch.json" for folder in folders}
    jobs = {folder: read_json(file)["jobs"][-1] for folder, file in files.items() if os.path.isfile(file)}
    return dict(zip(jobs, zip(jobs.values(), query_states(list(jobs.values())), strict=True), strict=True))


def read_settled_jobs(folders: Iterable[Path]) -> dict[Path, tuple[dict[str, Any], str]]:
    """Read the last jobs as `read_last_jobs` does, but wait for SLURM to end or requeue those that it is ending."""
    folders = list(folders)
    last_jobs = read_last_jobs(folders)
    for check in range(_ENDING_CHECKS):
        ending = [job["id"] for job, state in last_jobs.values() if state == slurm.ENDING]
        if not ending:
            break
        if check == 0:
            warn(f"waiting for SLURM to end {', '.join(ending)}")
        time.sleep(_ENDING_CHECK_S)
        last_jobs = read_last_jobs(folders)
    return last_jobs


def check_not_running(folder: Path, job: Mapping[str, Any], state: str) -> None:
    """Raise UserError if a job in the ``state`` of `query_states` may be writing to the run folder."""
    if state == slurm.ENDING:
        raise UserError(f"SLURM is still ending job {job['id']} in {folder}; try again in a moment")
    state = state.split()[0]
    if state in ("PENDING", "RUNNING"):
        remedy = f"wait for it, or: python tools/launch.py cancel {shlex.quote(str(folder))}"
        raise UserError(f"job {job['id']} ({state.lower()}) is already running in {folder}; {remedy}")
    if state == "UNKNOWN" and not is_finished(folder, job):
        remedy = f"if you know that it has ended: rm {shlex.quote(str(folder / 'launch' / 'launch.json'))}"
        raise UserError(f"job {job['id']} may still be running in {folder} ({explain_unknown(job)}); {remedy}")


def explain_unknown(job: Mapping[str, Any]) -> str:
    """Explain why the state of a job is UNKNOWN, and what to do."""
    return "SLURM does not answer; try again" if job["cluster"] == "slurm" else f"use {job['host']}, where it started"


def is_finished(folder: Path, job: Mapping[str, Any]) -> bool:
    """Return whether the run folder records that the job has ended for good."""
    return read_outcome(folder, job["logs"])["state"] in ("complete", "stopped", "failed")


def describe_unrecorded_exit(folder: Path) -> str:
    """Describe why a job may have ended without recording how."""
    if shutil.disk_usage(folder).free < 2**20:
        return f"it could not record how it ended: the disk of {folder} is full"
    return "it exited without reporting an error"


def describe_end(folder: Path, job: Mapping[str, Any], job_state: str) -> str:
    """Describe how a SLURM job ended that recorded nothing: SLURM's reason, and the last line of its output."""
    word, _, reason = job_state.partition(" ")
    reason = reason.strip("()")
    if word == "CANCELLED" and reason not in _MEANING:  # it is what the job was waiting for
        reason = ""
    parts = [explain_reason(reason)] if reason else []
    files = find_output(folder, job, 0)
    if files[1].exists():
        lines = files[1].read_text(errors="replace").splitlines()
        lines = [line for line in lines if line.strip() and not line.startswith(("submitit ", "Try "))]
        parts += ([line for line in lines if not line.startswith("srun: ")] or lines)[-1:]
    elif word == "FAILED":
        parts.append(f"it wrote nothing; can its nodes see {folder}?")
    return ": ".join(parts)


def explain_reason(reason: str) -> str:
    """Add to SLURM's reason what it means, if the word alone does not say it."""
    return f"{reason}{_MEANING.get(reason, '')}"


def find_output(folder: Path, job: Mapping[str, Any], rank: int) -> list[Path]:
    """Return the files of a rank's standard output and standard error."""
    moved = folder / "launch" / Path(job["logs"]).name  # with the run folder; an array's logs lie elsewhere
    logs = moved if moved.is_dir() else Path(job["logs"])
    if job["cluster"] == "slurm":
        return [logs / f"{job['id']}_{rank}_log.{kind}" for kind in ("out", "err")]
    return local_job.list_log_files(logs, rank)


def cancel(folder: Path, now: bool = False) -> None:
    """Stop every pending or running job of the folder.

    Args:
        now: leave no time for a checkpoint.

    Raises:
        UserError: a job cannot be ended from this machine, or SLURM refuses; the other jobs are still ended.
    """
    problems: list[str] = []
    # A pipeline's report may have two: that of a resumed pipeline waits for the earlier one.
    jobs = [(file.parents[1], job) for file in find_launch_files(folder) for job in read_json(file)["jobs"]]
    last_jobs = dict(jobs)
    signaled: set[int] = set()
    has_stopped = False
    for (stage, job), state in zip(jobs, query_states([job for _, job in jobs]), strict=True):
        if state == "UNKNOWN" and job is last_jobs[stage] and not is_finished(stage, job):
            problems.append(f"job {job['id']} of {stage} may still be running ({explain_unknown(job)})")
        # The launcher of a pipeline may be between two stages.
        is_next = job["cluster"] == "local" and stage != folder and local_job.find_launcher(job)
        if state.split()[0] not in ("PENDING", "RUNNING") and not is_next:
            continue
        try:
            if job["cluster"] == "slurm":
                slurm.cancel_job(job, now)
            else:
                local_job.stop(job, now, signaled)
        except UserError as error:
            problems.append(str(error))
            continue
        has_stopped = True
        if not is_next or state == "RUNNING":
            print(f"cancelled {job['cluster']} job {job['id']} ({stage})")
    if problems:
        raise UserError("; ".join(problems))
    if not has_stopped:
        print(f"no running jobs in {folder}")


def print_logs(folder: Path, rank: int, follow: bool) -> None:
    """Print the newest job's output of a rank, and the user's mistake that ended it, if any.

    Args:
        follow: continue until Ctrl-C.
    """
    job = read_json(folder / "launch" / "launch.json")["jobs"][-1]
    paths = find_output(folder, job, rank)
    if not any(path.exists() for path in paths):
        state = query_states([job])[0]
        word = state.split()[0]
        if word not in ("PENDING", "RUNNING", "UNKNOWN"):
            why = describe_end(folder, job, state) or describe_unrecorded_exit(folder)
            raise UserError(f"rank {rank} of job {job['id']} has ended without output ({word.lower()}): {why}")
        if not follow:
            raise UserError(f"rank {rank} of job {job['id']} has no output yet ({state.lower()}); add --follow to wait")
    command = ["tail", "-q", "-n", "+1", *(["-F"] if follow else []), "--", *map(str, paths)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as tail:
        for line in tail.stdout or ():
            print(local_job.strip_control(line.rstrip("\n")), flush=True)
    failure = read_outcome(folder, job["logs"])["failure"]
    if failure.get("user_error"):  # its one line is in no rank's output
        print(escape_control(f"error: {failure['error']}"), file=sys.stderr)
