"""Asks SLURM through its own programs; where they do not answer, nothing is assumed to have ended."""

from __future__ import annotations

import re
import shutil
import subprocess

from pretrain.common.errors import UserError

_TIMEOUT_S = 60.0  # for a scheduler under load
_MEANING = {"COMPLETING": "RUNNING", "CONFIGURING": "RUNNING", "REQUEUED": "PENDING", "SUSPENDED": "RUNNING"}


def is_here() -> bool:
    """True if sbatch is installed and the scheduler answers."""
    return shutil.which("sbatch") is not None and _run(["sinfo", "-h"], 20) is not None


def partitions() -> tuple[dict[str, tuple[str, int]], str]:
    """Time limit and number of nodes per partition, and the default partition; nothing where sinfo does not answer."""
    found: dict[str, tuple[str, int]] = {}
    default = ""
    for line in (_run(["sinfo", "-h", "-o", "%P|%l|%D"], 20) or "").splitlines():
        name, limit, nodes = line.split("|")
        if name.endswith("*"):
            default = name = name[:-1]
        found[name] = (limit, int(nodes) + found.get(name, ("", 0))[1])
    return found, default


def state(job_id: str, name: str) -> str:
    """PENDING, RUNNING, or SLURM's name for how a job ended; ENDED: SLURM has no record of it; UNKNOWN: no answer.

    A job of the same id and another name is another job: a new cluster counts from 1 again.
    """
    queue = _listed(["squeue", "-h", "--states=all", "--array", "-j", job_id, "-o", "%T|%j"])
    found = (queue or {}).get(name)
    if not found:
        history = _listed(["sacct", "-n", "-X", "-P", "-o", "State,JobName", "-j", job_id])
        found = (history or {}).get(name) or ("UNKNOWN" if queue is None else "ENDED")
    found = found.split()[0]  # of "CANCELLED by 1000"
    return _MEANING.get(found, found)


def has_ended(job_id: str) -> bool:
    """Asked inside the job: whether SLURM ends it for good. Uses scontrol, which a requeue needs, too."""
    found = re.search(r"\bJobState=(\w+)", _run(["scontrol", "show", "job", "-o", job_id]) or "")
    return found is not None and found[1] != "RUNNING"  # a scheduler that does not answer has not ended anything


def cancel(job_id: str, now: bool) -> None:
    """Raises UserError where scancel refuses, is missing or does not answer."""
    command = ["scancel", *(["--signal=KILL"] if now else []), job_id]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        raise UserError(f"scancel {job_id} failed: {' '.join(str(reason).split())}; try again") from error


def _listed(command: list[str]) -> dict[str, str] | None:
    """Job names and their states; None where the program is missing, does not answer, or fails by itself."""
    text = _run(command)
    rows = (line.partition("|") for line in (text or "").splitlines())
    return None if text is None else {name: state for state, _, name in rows if state}


def _run(command: list[str], timeout: float = _TIMEOUT_S) -> str | None:
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if asked.returncode and "Invalid job id" not in asked.stderr:  # also an answer: the job ended long ago
        return None
    return asked.stdout
