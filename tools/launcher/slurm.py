"""What SLURM is asked, by its own programs, and what it means that they do not answer."""

from __future__ import annotations

import re
import subprocess

from pretrain.common.errors import UserError

_PATIENCE_S = 60.0  # with a scheduler under load
_MEANING = {"COMPLETING": "RUNNING", "CONFIGURING": "RUNNING", "REQUEUED": "PENDING", "SUSPENDED": "RUNNING"}


def state(job_id: str, name: str) -> str:
    """PENDING, RUNNING, or how a job ended in SLURM's words; ENDED: it knows nothing of it; UNKNOWN: it is silent.

    A job of the same id and another name is not meant: the cluster has started its ids anew.
    """
    queue = _listed(["squeue", "-h", "--states=all", "--array", "-j", job_id, "-o", "%T|%j"])
    found = (queue or {}).get(name)
    if not found:
        history = _listed(["sacct", "-n", "-X", "-P", "-o", "State,JobName", "-j", job_id])
        found = (history or {}).get(name) or ("UNKNOWN" if queue is None else "ENDED")
    found = found.split()[0]  # of "CANCELLED by 1000"
    return _MEANING.get(found, found)


def has_ended(job_id: str) -> bool:
    """Asked in the job itself: is it about to end for good? By scontrol, without which there is no requeue either."""
    try:
        asked = subprocess.run(
            ["scontrol", "show", "job", "-o", job_id], capture_output=True, text=True, timeout=_PATIENCE_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return False  # a scheduler that is silent has not ended anything
    found = re.search(r"\bJobState=(\w+)", asked.stdout)
    return found is not None and found[1] != "RUNNING"


def cancel(job_id: str, now: bool) -> None:
    """Raises UserError where scancel refuses, is missing or does not answer."""
    command = ["scancel", *(["--signal=KILL"] if now else []), job_id]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise UserError(f"scancel {job_id} failed: {' '.join(str(said).split())}; try again") from error


def _listed(command: list[str]) -> dict[str, str] | None:
    """Job names and their states; None where the program is missing, silent, or fails by itself."""
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if asked.returncode and "Invalid job id" not in asked.stderr:  # of a job that ended long ago: an answer too
        return None
    rows = (line.partition("|") for line in asked.stdout.splitlines())
    return {name: state for state, _, name in rows if state}
