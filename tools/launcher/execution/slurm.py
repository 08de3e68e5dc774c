"""Queries of SLURM through its own programs; if they do not answer, no job is assumed to have ended."""

import functools
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmParseException, _parse_node_list

from pretrain.common.errors import UserError

_CHOOSE = "add --cluster slurm to submit, or --cluster local to run on this machine"
_TIMEOUT_S = 60.0  # for a scheduler under load
# Variables of the shell that would have SLURM's programs ask another cluster, or show some of the jobs only.
_HIDDEN = ("SLURM_CLUSTERS", "SQUEUE_")
ENDING = "RUNNING (finishing)"  # the state of a job whose processes SLURM is ending; it may be requeued
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY")
_ENDED += ("PREEMPTED", "REVOKED", "TIMEOUT")
_BUSY = "timed out|unable to contact|connection refused|not connected|standby|zero bytes|temporarily|try again"
_RETRIES, _RETRY_S = 3, 20.0  # when a busy controller does not answer sbatch
_LIMIT = "SubmitJob|Invalid job array specification"


class SubmissionUnknown(UserError):
    """Nobody knows whether sbatch has submitted the job."""


class TooManyJobs(UserError):
    """SLURM accepts no more jobs of this user for now, or no array of this size."""


def choose_cluster() -> str:
    """Resolve ``--cluster auto``: slurm where it answers; local without it, and on a node of the current allocation.

    Raises:
        UserError: SLURM does not answer, or the allocation in the environment is elsewhere.
    """
    if os.environ.get("SLURM_JOB_ID"):
        _check_allocated(os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_JOB_NODELIST", ""))
        return "local"
    if shutil.which("sbatch") is None:
        return "local"
    try:
        _ask(["sinfo", "-h"], os.environ.get("SLURM_CLUSTERS", ""), timeout=20)
        return "slurm"
    except UserError as error:
        if "Could not establish a configuration source" not in str(error):
            problem = f"sbatch is installed, but SLURM does not answer ({error})"
            raise UserError(f"{problem}; try again, or {_CHOOSE}") from error
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
        problem = f"SLURM_JOB_ID is {job_id}, but {host} is not one of that allocation's nodes ({nodes or 'none'})"
        raise UserError(f"{problem}; run this command with srun, or {_CHOOSE}")
    print(f"inside allocation {job_id}; running on this machine ({host})", file=sys.stderr)


def submit_script(script: Path, name: str, environment: dict[str, str], cluster: str) -> str:
    """Submit a script once and return the job's id, also if SLURM has lost its answer; print what sbatch warns of.

    Raises:
        SubmissionUnknown: the job may be queued.
        TooManyJobs: it is not, because of the number of jobs.
        UserError: it is not.
    """
    if shutil.which("sbatch") is None:
        raise UserError("--cluster slurm needs sbatch, which this machine does not have; run this on a login node")
    for _ in range(_RETRIES + 1):
        answer = _run_sbatch(script, environment)
        accepted_id = _read_job_id(answer)
        if accepted_id:
            print(answer.stderr, end="", file=sys.stderr)
            return accepted_id
        reason = " ".join((answer.stderr or answer.stdout).split()) or f"exit status {answer.returncode}"
        if answer.returncode and not re.search(_BUSY, reason, re.IGNORECASE):
            kind = TooManyJobs if re.search(_LIMIT, reason) else UserError
            raise kind(f"sbatch refused {name}: {reason}")
        print(f"sbatch: {reason}; looking for {name} in the queue in {_RETRY_S:.0f} s", file=sys.stderr)
        job_id = _find_job(script, cluster)
        if job_id:
            return job_id
        if job_id is None or answer.returncode == 0:
            raise SubmissionUnknown(f"sbatch: {reason}; look for {name} in squeue before you submit again")
    raise UserError(f"sbatch did not submit {name} in {_RETRIES + 1} attempts: {reason}; try again later")


def _run_sbatch(script: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run sbatch where no Ctrl-C of the terminal ends it, and no wrapper of the site waits for an answer."""
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "start_new_session": True}
    return subprocess.run(["sbatch", str(script)], env=environment, text=True, errors="replace", **options)


def _read_job_id(answer: subprocess.CompletedProcess[str]) -> str:
    """Return the id of the job that sbatch submitted, or "" if it did not; wrappers of sites print more or less."""
    sbatch_line = re.search(r"Submitted batch job (\d+)", answer.stdout)
    if sbatch_line or answer.returncode:
        return sbatch_line[1] if sbatch_line else ""
    wrapper_line = re.search(r"\bjob (\d+)|^(\d+)(?:;\S+)?\s*\Z", answer.stdout, re.MULTILINE)
    return (wrapper_line[1] or wrapper_line[2]) if wrapper_line else ""


def ask_start_time(script: str, environment: dict[str, str]) -> str:
    """Ask sbatch when it would start a script, without submitting it; raise UserError if it would refuse it."""
    try:
        answer = _ask(["sbatch", "--test-only"], env=environment, input=script)
    except UserError as error:
        raise UserError(f"sbatch --test-only: {error}") from error
    return " ".join((answer.stderr or answer.stdout).split())


@functools.cache
def read_max_cores(partition: str, cluster: str) -> int:
    """Return the number of cores of the largest node of a partition (default: of any), or 0 if SLURM does not say."""
    output = _try(["sinfo", "-h", "-e", "-o", "%c", *(["-p", partition] if partition else [])], cluster)
    return max(map(int, re.findall(r"^\d+", output or "", re.MULTILINE)), default=0)


@functools.cache
def read_max_array(cluster: str) -> int:
    """Return how many jobs an array may have; any number if SLURM does not say."""
    output = _try(["scontrol", "show", "config"], cluster) or ""
    limits = re.findall(r"(?:MaxArraySize *= |max_array_tasks=)(\d+)", output)
    return max(1, min(map(int, limits), default=sys.maxsize))


def read_max_jobs(account: str, cluster: str) -> int:
    """Return how many jobs this user may have in the queue; any number if the accounting does not say."""
    filters = {"user": os.environ.get("USER", "nobody"), "account": account, "cluster": cluster}
    words = [f"{name}={value}" for name, value in filters.items() if value]
    output = _try(["sacctmgr", "-nP", "show", "assoc", *words, "format=MaxSubmitJobs"]) or ""
    return max((int(limit) if limit.isdecimal() else sys.maxsize for limit in output.splitlines()), default=sys.maxsize)


def asks_for_gpus(key: str, value: str) -> bool:
    """Return whether an option of sbatch is for GPUs."""
    return "gpu" in (f"{key}={value}" if key.startswith(("gres", "tres")) else key)


def _find_job(script: Path, cluster: str) -> str | None:
    """Return the id of the job that runs ``script``, as no other does; empty if there is none, None if unknown."""
    command = ["squeue", "-h", "--states=all", "-u", str(os.getuid()), "-o", "%F|%o"]
    for _ in range(_RETRIES):
        time.sleep(_RETRY_S)
        output = _try(command, cluster)
        if output is not None:
            return next((line.partition("|")[0] for line in output.splitlines() if line.endswith(f"|{script}")), "")
    return None


def query_states(jobs: Sequence[tuple[str, str]], cluster: str = "") -> dict[tuple[str, str], str]:
    """Return by id and name: PENDING, RUNNING, or SLURM's word for how the job ended; SLURM's reason in parentheses.

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
    state = re.search(r"\bJobState=(\w+)", _try(["scontrol", "show", "job", "-o", job_id]) or "")
    return state is not None and state[1] != "RUNNING"  # a scheduler that does not answer has not ended anything


def requeue(job_id: str) -> None:
    """Send a running job back to the queue; raise UserError with SLURM's words if it refuses."""
    _ask(["scontrol", "requeue", job_id])


def cancel_job(job: Mapping[str, Any], now: bool = False) -> None:
    """Cancel a job of launch.json; UserError if scancel fails, is missing or does not answer."""
    try:
        _ask(["scancel", *(["--signal=KILL"] if now else []), job["id"]], job.get("slurm_cluster", ""))
    except UserError as error:
        raise UserError(f"scancel {job['id']} failed: {error}; try again") from error


def _query(command: list[str], cluster: str) -> dict[tuple[str, str], str] | None:
    """Return states by id and name; None if the program is missing, does not answer, fails, or prints garbage."""
    text = _try(command, cluster)
    if text is None:
        return None
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("CLUSTER: ")]
    states: dict[tuple[str, str], str] = {}
    for job_id, state, reason, name in (line.split("|", 3) for line in lines if line.count("|") >= 3):
        state = state.partition(" ")[0]  # of "CANCELLED by 1000"
        if state.endswith("+"):  # a column of sacct was too narrow
            state = next((word for word in _ENDED if word.startswith(state[:-1])), state)
        if state == "COMPLETING":
            state = ENDING
        elif state not in _ENDED:  # SLURM has many more words for a job that is alive
            state = "PENDING" if state in _WAITING else "RUNNING"
        has_reason = not state.startswith("RUNNING") and reason not in ("", "None")
        states[job_id, name] = f"{state} ({reason})" if has_reason else state
    return states if states or not lines else None


def _try(command: list[str], cluster: str = "") -> str | None:
    """Return what one of SLURM's programs prints, or None if it does not answer."""
    try:
        return _ask(command, cluster).stdout
    except UserError as error:
        is_answer = "Invalid job id" in str(error)  # that job ended long ago
        return getattr(error.__cause__, "stdout", "") if is_answer else None


def _ask(command: list[str], cluster: str = "", **more: Any) -> subprocess.CompletedProcess[str]:
    """Run one of SLURM's programs; raise UserError with its words if it is missing, fails or does not answer."""
    visible = {name: value for name, value in os.environ.items() if not name.startswith(_HIDDEN)}
    options = {"capture_output": True, "text": True, "errors": "replace", "timeout": _TIMEOUT_S, "env": visible, **more}
    try:
        return subprocess.run([command[0], *(["-M", cluster] if cluster else []), *command[1:]], check=True, **options)
    except subprocess.CalledProcessError as error:
        raise UserError(" ".join((error.stderr or error.stdout or str(error)).split())) from error
    except (OSError, subprocess.TimeoutExpired) as error:  # what was printed before a time-out does not say so
        raise UserError(str(error)) from error
