"""Queries of SLURM through its own programs; if they do not answer, no job is assumed to have ended."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from submitit.slurm.slurm import SlurmParseException, _parse_node_list

from pretrain.common.errors import UserError

_CHOOSE = "add --cluster slurm to submit, or --cluster local to run on this machine"
_TIMEOUT_S = 60.0  # for a scheduler under load
# Variables of the shell that would have SLURM's programs ask another cluster, or show some of the jobs only.
_HIDDEN = ("SLURM_CLUSTERS", "SQUEUE_")
_MEANING = {"COMPLETING": "RUNNING", "CONFIGURING": "RUNNING", "REQUEUED": "PENDING", "SUSPENDED": "RUNNING"}


def cluster_here() -> str:
    """Resolve ``--cluster auto``: slurm where it answers; local without it, and on a node of the current allocation.

    Raises:
        UserError: SLURM does not answer, or the allocation in the environment is elsewhere.
    """
    if "SLURM_JOB_ID" in os.environ:
        _check_allocated(os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_JOB_NODELIST", ""))
        return "local"
    if shutil.which("sbatch") is None:
        return "local"
    try:
        _ask(["sinfo", "-h"], os.environ.get("SLURM_CLUSTERS", ""), 20).check_returncode()
        return "slurm"
    except (OSError, subprocess.SubprocessError) as error:
        reason = " ".join(str(getattr(error, "stderr", "") or error).split())
    if "Could not establish a configuration source" not in reason:
        raise UserError(f"sbatch is installed, but SLURM does not answer ({reason}); try again, or {_CHOOSE}")
    print("sbatch is installed, but no cluster is configured here; running on this machine", file=sys.stderr)
    return "local"


def _check_allocated(job_id: str, nodes: str) -> None:
    host = socket.gethostname()
    names = {os.environ.get("SLURMD_NODENAME"), host, host.partition(".")[0]}  # a node may not be named after its host
    try:
        allocated = _parse_node_list(nodes)
    except SlurmParseException:
        allocated = [nodes]
    if names.isdisjoint({*allocated, *(node.partition(".")[0] for node in allocated)}):
        what = f"SLURM_JOB_ID is {job_id}, but {host} is not one of that allocation's nodes ({nodes or 'none'})"
        raise UserError(f"{what}; start this by srun, or {_CHOOSE}")
    print(f"inside allocation {job_id}; running on this machine ({host})", file=sys.stderr)


def states(jobs: Sequence[tuple[str, str]], cluster: str = "") -> dict[tuple[str, str], str]:
    """Return by id and name: PENDING with its reason in parentheses, RUNNING, or SLURM's name for how the job ended.

    ENDED means that SLURM has no record of the job, UNKNOWN that it does not answer. A job with the same id and another
    name is another job: ids repeat after a reset of SLURM. The queue is asked once for all jobs, and the accounting
    once for those not in it.

    Args:
        cluster: cluster of these jobs (default: SLURM's default cluster).
    """
    ids = ",".join(job_id for job_id, _ in jobs)
    queue = _query(["squeue", "-h", "--states=all", "--array", "-j", ids, "-o", "%i|%T|%r|%j"], cluster)
    known = {job: queue[job] for job in jobs if queue and job in queue}
    absent = [job for job in jobs if job not in known]
    if absent:
        ids = ",".join(job_id for job_id, _ in absent)
        history = _query(["sacct", "-n", "-X", "-P", "-o", "JobID,State,Reason,JobName", "-j", ids], cluster) or {}
        known |= {job: history.get(job) or ("UNKNOWN" if queue is None else "ENDED") for job in absent}
    return known


def has_ended(job_id: str) -> bool:
    """Return whether SLURM is ending this process's job for good; scontrol, which requeues too, answers in a job."""
    state = re.search(r"\bJobState=(\w+)", _run(["scontrol", "show", "job", "-o", job_id]) or "")
    return state is not None and state[1] != "RUNNING"  # a scheduler that does not answer has not ended anything


def cancel(job: Mapping[str, Any], now: bool = False) -> None:
    """Cancel a job of launch.json; UserError if scancel fails, is missing or does not answer."""
    try:
        command = ["scancel", *(["--signal=KILL"] if now else []), job["id"]]
        _ask(command, job.get("slurm_cluster", "")).check_returncode()
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        raise UserError(f"scancel {job['id']} failed: {' '.join(str(reason).split())}; try again") from error


def _query(command: list[str], cluster: str) -> dict[tuple[str, str], str] | None:
    """Return states by id and name; None if the program is missing, does not answer, fails, or prints garbage."""
    text = _run(command, cluster)
    if text is None:
        return None
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("CLUSTER: ")]
    job_states: dict[tuple[str, str], str] = {}
    for job_id, state, reason, name in (line.split("|", 3) for line in lines if line.count("|") >= 3):
        state = state.partition(" ")[0]  # of "CANCELLED by 1000"
        state = _MEANING.get(state, state)
        job_states[job_id, name] = f"PENDING ({reason})" if state == "PENDING" else state
    return job_states if job_states or not lines else None


def _run(command: list[str], cluster: str = "", timeout: float = _TIMEOUT_S) -> str | None:
    try:
        asked = _ask(command, cluster, timeout)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if asked.returncode and "Invalid job id" not in asked.stderr:  # also an answer: the job ended long ago
        return None
    return asked.stdout


def _ask(command: list[str], cluster: str, timeout: float = _TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    command[1:1] = ["-M", cluster] if cluster else []
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_HIDDEN)}
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout, env=environment)
