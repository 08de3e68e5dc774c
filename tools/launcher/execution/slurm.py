"""Queries of SLURM through its own programs; if they do not answer, no job is assumed to have ended."""

from __future__ import annotations

import functools
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from pretrain.common.errors import UserError

from .slurm_programs import DETACHED, NO_INPUT, TIMEOUT_S, run_program, try_program

_CHOOSE = "add --cluster slurm to submit, or --cluster local to run on this machine"
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY")
_ENDED += ("PREEMPTED", "REVOKED", "TIMEOUT")
_BUSY = "timed out|unable to contact|connection refused|not connected|standby|zero bytes|temporarily|try again"
_RETRIES, _RETRY_S = 3, 20.0  # when a busy controller does not answer sbatch
_LIMIT = "SubmitJob|Invalid job array specification"


class JobState(NamedTuple):
    """The state of a job.

    Attributes:
        word: PENDING, RUNNING, FINISHING (SLURM is ending its processes, and may requeue it), or SLURM's word for how
            it ended. ENDED means that only the run folder has details. UNKNOWN means that the job may be running: the
            scheduler does not answer, or the job is a process of another machine.
        reason: SLURM's reason; empty if it has none.
    """

    word: str
    reason: str = ""

    @property
    def is_active(self) -> bool:
        return self.word in ("PENDING", "RUNNING", "FINISHING")

    def __str__(self) -> str:
        return f"{self.word.lower()} ({self.reason})" if self.reason else self.word.lower()


class Submitted(Protocol):
    """What SLURM knows a job by."""

    @property
    def id(self) -> str: ...
    @property
    def script(self) -> str: ...
    @property
    def name(self) -> str: ...


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
        run_program(["sinfo", "-h"], os.environ.get("SLURM_CLUSTERS", ""), timeout=20)
        return "slurm"
    except UserError as error:
        if "Could not establish a configuration source" not in str(error):
            problem = f"sbatch is installed, but SLURM does not answer ({error})"
            raise UserError(f"{problem}; try again, or {_CHOOSE}") from error
    print("sbatch is installed, but no cluster is configured here; running on this machine", file=sys.stderr)
    return "local"


def _check_allocated(job_id: str, nodes: str) -> None:
    from submitit.slurm.slurm import SlurmParseException, _parse_node_list  # slow to import

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
            error_type = TooManyJobs if re.search(_LIMIT, reason) else UserError
            raise error_type(f"sbatch refused {name}: {reason}")
        print(f"sbatch: {reason}; looking for {name} in the queue in {_RETRY_S:.0f} s", file=sys.stderr)
        job_id = _find_job(script, cluster)
        if job_id:
            return job_id
        if job_id is None or answer.returncode == 0:
            raise SubmissionUnknown(f"sbatch: {reason}; look for {name} in squeue before you submit again")
    raise UserError(f"sbatch did not submit {name} in {_RETRIES + 1} attempts: {reason}; try again later")


def _run_sbatch(script: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run sbatch, however long it takes: nobody would know whether it has submitted the script."""
    return subprocess.run(["sbatch", str(script)], env=environment, **NO_INPUT, **DETACHED)


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
        answer = run_program(["sbatch", "--test-only"], env=environment, input=script)
    except UserError as error:
        raise UserError(f"sbatch --test-only: {error}") from error
    return " ".join((answer.stderr or answer.stdout).split())


@functools.cache
def read_max_cores(partition: str, cluster: str) -> int:
    """Return the number of cores of the largest node of a partition (default: of any), or 0 if SLURM does not say."""
    output = try_program(["sinfo", "-h", "-e", "-o", "%c", *(["-p", partition] if partition else [])], cluster)
    return max(map(int, re.findall(r"^\d+", output or "", re.MULTILINE)), default=0)


@functools.cache
def read_max_array(cluster: str) -> int:
    """Return how many jobs an array may have; any number if SLURM does not say."""
    output = try_program(["scontrol", "show", "config"], cluster) or ""
    limits = re.findall(r"(?:MaxArraySize *= |max_array_tasks=)(\d+)", output)
    return max(1, min(map(int, limits), default=sys.maxsize))


def read_max_jobs(account: str, cluster: str) -> int:
    """Return how many jobs this user may have in the queue; any number if the accounting does not say."""
    filters = {"user": os.environ.get("USER", "nobody"), "account": account, "cluster": cluster}
    words = [f"{name}={value}" for name, value in filters.items() if value]
    output = try_program(["sacctmgr", "-nP", "show", "assoc", *words, "format=MaxSubmitJobs"]) or ""
    return max((int(limit) if limit.isdecimal() else sys.maxsize for limit in output.splitlines()), default=sys.maxsize)


def _find_job(script: Path, cluster: str) -> str | None:
    """Return the id of the job that runs ``script``, as no other does; empty if there is none, None if unknown."""
    command = ["squeue", "-h", "--states=all", "-u", str(os.getuid()), "-o", "%F|%o"]
    for _ in range(_RETRIES):
        time.sleep(_RETRY_S)
        output = try_program(command, cluster)
        if output is not None:
            return next((line.partition("|")[0] for line in output.splitlines() if line.endswith(f"|{script}")), "")
    return None


def find_waiting_job(scripts: Collection[str], cluster: str) -> str:
    """Return the id of a job in the queue that runs one of these scripts; "" if there is none, or SLURM is silent."""
    rows = _query(["squeue", "-h", "-u", str(os.getuid()), "-o", "%F|%T|%r|%j|%o"], cluster) or []
    return next((row.id for row in rows if row.state.is_active and row.source.endswith(tuple(scripts))), "")


def query_states(jobs: Sequence[Submitted], cluster: str = "") -> list[JobState]:
    """Return the state of each job. The queue is asked once for all jobs, and the accounting once for those not in it.

    Args:
        cluster: cluster of these jobs (default: SLURM's default cluster).
    """
    ids = ",".join(job.id for job in jobs)
    queue = _query(["squeue", "-h", "--states=all", "--array", "-j", ids, "-o", "%i|%T|%r|%j|%o"], cluster)
    states = [_find_row(job, queue or []) for job in jobs]
    absent = [job.id for job, state in zip(jobs, states, strict=True) if not state]
    history: list[_Row] = []
    if absent:
        columns = "JobID,State,Reason,JobName,SubmitLine"
        history = _query(["sacct", "-n", "-X", "-P", "-o", columns, "-j", ",".join(absent)], cluster) or []
    default = JobState("UNKNOWN" if queue is None else "ENDED")
    return [state or _find_row(job, history) or default for job, state in zip(jobs, states, strict=True)]


def _find_row(job: Submitted, rows: Sequence[_Row]) -> JobState | None:
    """Return the state of a job in ``rows``. Another job has the same id after a reset of SLURM, but another script.

    A wrapper of the site may have submitted a copy of the script; then its name counts.
    """
    for row in rows:
        is_own = row.source.endswith(job.script)
        is_copy = f"/{os.path.basename(job.script)}" not in row.source and f"{row.source}|".startswith(f"{job.name}|")
        if row.id == job.id and (is_own or is_copy):
            return row.state
    return None


def is_ending(job_id: str) -> bool:
    """Return whether SLURM ends this process's attempt, for good or to requeue the job; False if it does not answer.

    scontrol, which `requeue` needs, too, answers in a job.
    """
    state = re.search(r"\bJobState=(\w+)", try_program(["scontrol", "show", "job", "-o", job_id]) or "")
    return state is not None and state[1] != "RUNNING"


def requeue(job_id: str) -> None:
    """Send a running job back to the queue; raise UserError with SLURM's words if it refuses."""
    run_program(["scontrol", "requeue", job_id])


def cancel_job(job_id: str, cluster: str = "", now: bool = False, timeout_s: float = TIMEOUT_S) -> None:
    """Cancel a job, with ``now`` without time for a checkpoint; UserError if scancel fails, is missing or is silent."""
    try:
        run_program(["scancel", *(["--signal=KILL"] if now else []), job_id], cluster, timeout=timeout_s)
    except UserError as error:
        raise UserError(f"scancel {job_id} failed: {error}; try again") from error


class _Row(NamedTuple):
    """A job as SLURM lists it; ``source`` is its name, and the script or command line that it comes from."""

    id: str
    state: JobState
    source: str


def _query(command: list[str], cluster: str) -> list[_Row] | None:
    """Return the jobs listed; None if the program is missing, does not answer, fails, or prints garbage."""
    text = try_program(command, cluster)
    if text is None:
        return None
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("CLUSTER: ")]
    rows = []
    for job_id, word, reason, source in (line.split("|", 3) for line in lines if line.count("|") >= 3):
        word = word.partition(" ")[0]  # of "CANCELLED by 1000"
        if word.endswith("+"):  # a column of sacct was too narrow
            word = next((known for known in _ENDED if known.startswith(word[:-1])), word)
        reason = "" if reason == "None" else reason
        if word == "COMPLETING":
            word = "FINISHING"
            reason = ""
        elif word in _WAITING:
            word = "PENDING"
        elif word not in _ENDED:  # SLURM has many more words for a job that is alive, such as SUSPENDED
            reason = "" if word == "RUNNING" else word.lower()
            word = "RUNNING"
        rows.append(_Row(job_id, JobState(word, reason), source))
    return rows if rows or not lines else None
