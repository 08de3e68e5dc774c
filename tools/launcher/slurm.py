"""Asks SLURM through its own programs; where they do not answer, nothing is assumed to have ended."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence

from pretrain.common.errors import UserError

_TIMEOUT_S = 60.0  # for a scheduler under load
_MEANING = {"COMPLETING": "RUNNING", "CONFIGURING": "RUNNING", "REQUEUED": "PENDING", "SUSPENDED": "RUNNING"}


def is_here() -> bool:
    """True if sbatch is installed and the scheduler answers."""
    return shutil.which("sbatch") is not None and _run(["sinfo", "-h"], 20) is not None


def states(jobs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """By id and name: PENDING (and in parentheses why), RUNNING, or SLURM's name for how the job ended.

    ENDED: SLURM has no record of it; UNKNOWN: no answer. A job of the same id and another name is another job: a new
    cluster counts from 1 again. The queue is asked once for all jobs, and the accounting once for those not in it.
    """
    ids = ",".join(job_id for job_id, _ in jobs)
    queue = _listed(["squeue", "-h", "--states=all", "--array", "-j", ids, "-o", "%i|%T|%r|%j"])
    known = {job: queue[job] for job in jobs if queue and job in queue}
    absent = [job for job in jobs if job not in known]
    if absent:
        ids = ",".join(job_id for job_id, _ in absent)
        history = _listed(["sacct", "-n", "-X", "-P", "-o", "JobID,State,Reason,JobName", "-j", ids]) or {}
        known |= {job: history.get(job) or ("UNKNOWN" if queue is None else "ENDED") for job in absent}
    return known


def has_ended(job_id: str) -> bool:
    """Called inside the job: whether SLURM ends it for good. Uses scontrol, which a requeue needs, too."""
    state = re.search(r"\bJobState=(\w+)", _run(["scontrol", "show", "job", "-o", job_id]) or "")
    return state is not None and state[1] != "RUNNING"  # a scheduler that does not answer has not ended anything


def cancel(job_id: str, now: bool) -> None:
    """Raises UserError if scancel fails, is missing or does not answer."""
    command = ["scancel", *(["--signal=KILL"] if now else []), job_id]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        raise UserError(f"scancel {job_id} failed: {' '.join(str(reason).split())}; try again") from error


def _listed(command: list[str]) -> dict[tuple[str, str], str] | None:
    """States by id and name; None where the program is missing, does not answer, fails, or returns garbage."""
    text = _run(command)
    if text is None:
        return None
    listed: dict[tuple[str, str], str] = {}
    for job_id, state, reason, name in (line.split("|", 3) for line in text.splitlines() if line.count("|") >= 3):
        state = state.partition(" ")[0]  # of "CANCELLED by 1000"
        state = _MEANING.get(state, state)
        listed[job_id, name] = f"PENDING ({reason})" if state == "PENDING" else state
    return listed if listed or not text.strip() else None


def _run(command: list[str], timeout: float = _TIMEOUT_S) -> str | None:
    try:
        asked = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if asked.returncode and "Invalid job id" not in asked.stderr:  # also an answer: the job ended long ago
        return None
    return asked.stdout
