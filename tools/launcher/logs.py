"""The output of a job's ranks."""

from __future__ import annotations

import contextlib
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError, printable

from . import local
from .jobs import is_finished, job_states
from .launch_file import launch_files, read_launch
from .ranks import attempts


def print_logs(folder: Path, rank: int, follow: bool) -> None:
    """The newest job's output of a rank; with ``follow`` until the job ends.

    Raises:
        UserError: no such rank, or nothing written yet and not following.
    """
    files = launch_files(folder, required=not (folder / "log.txt").is_file())
    if files[:1] != [folder / "launch" / "launch.json"] and (folder / "log.txt").is_file():
        raise UserError(f"{folder} was not started by this command; its output is in {folder / 'log.txt'}")
    if len(files) > 1:
        below = ", ".join(str(file.parents[1]) for file in files)
        raise UserError(f"{folder} holds several stages; name one of {below}")
    job = read_launch(files[0])["jobs"][-1]
    if not 0 <= rank < job["tasks"]:
        raise UserError(f"--rank {rank}, but the job has ranks 0 to {job['tasks'] - 1}")
    paths = log_paths(job, rank)
    if not follow and not any(path.exists() for path in paths):
        raise UserError(
            f"job {job['id']} has written nothing yet ({job_states([job])[0].lower()}); add --follow to wait for it"
        )
    tail, asked_at, period_s = Tail(paths), -math.inf, 30.0 if job["cluster"] == "slurm" else 0.0
    while True:
        if time.monotonic() >= asked_at + period_s:
            state, asked_at = job_states([job])[0].split()[0], time.monotonic()
            is_over = state not in ("PENDING", "RUNNING", "UNKNOWN")
            is_over |= state == "UNKNOWN" and is_finished(files[0].parents[1], job)
        tail.copy()
        if is_over or not follow:
            _print_mistake(files[0].parents[1], job)
            return
        time.sleep(0.3)


def _print_mistake(folder: Path, job: dict[str, Any]) -> None:
    """The one line of a user's mistake, which the launcher shows in place of the ranks; other errors are in the output.

    It is the one that ended the job's newest attempt.
    """
    failure = next(iter(attempts(folder, job)[-1:]), {}).get("failure", {})
    if failure.get("user_error"):
        print(printable(f"error: {failure['error']}"), file=sys.stderr)


def log_paths(job: dict[str, Any], rank: int) -> list[Path]:
    """Standard output and standard error of a rank."""
    if job["cluster"] != "slurm":
        return local.log_paths(Path(job["logs"]), rank)
    return [Path(job["logs"]) / f"{job['id']}_{rank}_log.{kind}" for kind in ("out", "err")]


def _shown(line: str) -> str:
    """A line without what would move the cursor, retitle the window and the like; colors stay."""
    return "".join(part if part.startswith("\x1b[") else printable(part) for part in re.split(r"(\x1b\[[\d;]*m)", line))


class Tail:
    """Copies what is new in a job's files to this process's output, without submitit's own lines.

    Args:
        prefix: before every line.
    """

    def __init__(self, paths: list[Path], prefix: str = "") -> None:
        self._offsets, self._prefix = dict.fromkeys(paths, 0), prefix

    def copy(self) -> None:
        """Copies the complete lines that came since the last call."""
        for path, offset in self._offsets.items():
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                file.seek(offset)
                data = file.read()
                lines = data[: data.rfind(b"\n") + 1]
                self._offsets[path] = offset + len(lines)
                stream = sys.stderr if path.suffix == ".err" else sys.stdout
                for line in lines.decode(errors="replace").splitlines():
                    if not line.startswith("submitit "):
                        print(f"{self._prefix}{_shown(line)}", file=stream, flush=True)
