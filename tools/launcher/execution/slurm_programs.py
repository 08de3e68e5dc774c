"""Runs SLURM's programs, whatever variables of the shell, keys of the terminal and wrappers of the site there are."""

import os
import subprocess
from typing import Any

from pretrain.common.errors import UserError

TIMEOUT_S = 60.0  # for a scheduler under load
# Variables of the shell that would have the programs ask another cluster, show or cancel some of the jobs only, or ask
# before they do.
_HIDDEN = ("SLURM_CLUSTERS", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SCONTROL_")
# No Ctrl-C of the terminal ends them, and no wrapper of the site waits for an answer.
DETACHED: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "start_new_session": True}
NO_INPUT: dict[str, Any] = {"stdin": subprocess.DEVNULL}


def try_program(command: list[str], cluster: str = "") -> str | None:
    """Return what one of SLURM's programs prints, or None if it does not answer."""
    try:
        return run_program(command, cluster).stdout
    except UserError as error:
        is_answer = "Invalid job id" in str(error)  # that job ended long ago
        return getattr(error.__cause__, "stdout", "") if is_answer else None


def run_program(command: list[str], cluster: str = "", **more: Any) -> subprocess.CompletedProcess[str]:
    """Run one of SLURM's programs; raise UserError with its words if it is missing, fails or does not answer."""
    visible = {name: value for name, value in os.environ.items() if not name.startswith(_HIDDEN)}
    options = {**DETACHED, "timeout": TIMEOUT_S, "env": visible, **({} if "input" in more else NO_INPUT), **more}
    try:
        return subprocess.run([command[0], *(["-M", cluster] if cluster else []), *command[1:]], check=True, **options)
    except subprocess.CalledProcessError as error:
        raise UserError(" ".join((error.stderr or error.stdout or str(error)).split())) from error
    except (OSError, subprocess.TimeoutExpired) as error:  # what was printed before a time-out does not say so
        raise UserError(str(error)) from error
