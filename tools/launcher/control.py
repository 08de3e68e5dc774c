"""What became of a run: status, logs, cancel. It is read from the run folder; only a job's state is asked for."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError

from .ranks import attempts
from .spec import StageSpec, read_json

_FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "ENDED"}


def launch_files(folder: Path) -> list[Path]:
    """The launch.json of a run folder, or of all stages below a pipeline's or sweep's folder.

    Raises:
        UserError: nothing was started there.
    """
    own = folder / "launch" / "launch.json"
    found = [own] if own.is_file() else sorted(folder.glob("**/launch/launch.json"))
    if not found:
        raise UserError(f"nothing was started in {folder} (no launch/launch.json there or below)")
    return found


def job_state(job: dict[str, Any]) -> str:
    """PENDING, RUNNING, or how it ended in SLURM's words (ENDED where only the folder knows more)."""
    if job["cluster"] == "slurm":
        state = _slurm_state(job)
        return {"COMPLETING": "RUNNING", "CONFIGURING": "RUNNING", "REQUEUED": "PENDING", "SUSPENDED": "RUNNING"}.get(
            state, state
        )
    if job["host"] != socket.gethostname():
        return "UNKNOWN"
    return "RUNNING" if _local_controller(job) else "ENDED"


def summary(launch_file: Path) -> dict[str, Any]:
    """What `status` prints of one stage: job, state, attempts, place, and the first failing rank's error."""
    data = read_json(launch_file)
    folder = launch_file.parents[1]
    job = data["jobs"][-1]
    tries = attempts(folder, job["id"])
    last = tries[-1] if tries else {}
    spec = StageSpec.from_json(data["spec"])
    complete = (folder / "launch" / "complete.json").is_file() and (folder / spec.produces).exists()
    state = job_state(job)
    if state in ("ENDED", "UNKNOWN", "COMPLETED", "FAILED"):  # the ranks' own words say more
        state = "done" if complete else last.get("state", state.lower())
        if state == "running":  # it never said how it ended
            state = "killed"
    return {
        "stage": spec.stage, "folder": folder, "job": job, "state": state.lower(), "attempts": tries,
        "progress": progress(folder), "failure": last.get("failure", {}), "reason": last.get("reason", ""),
    }  # fmt: skip


def progress(folder: Path) -> str:
    """The newest line of metrics.json in words, or an empty string."""
    import json

    try:
        with open(folder / "metrics.json", "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16384))
            lines = file.read().decode(errors="replace").splitlines()
        values = json.loads(lines[-1])
    except (OSError, IndexError, ValueError):
        return ""
    words = [f"step {values['iteration'] + 1}"] if "iteration" in values else []
    for name, form in (("loss", "{:.4g}"), ("total_loss", "{:.4g}"), ("images_per_second", "{:.0f} images/s")):
        if isinstance(values.get(name), (int, float)):
            words.append(("" if "images" in name else f"{name} ") + form.format(values[name]))
    if isinstance(values.get("eta_seconds"), (int, float)):
        words.append(f"eta {time.strftime('%H:%M:%S', time.gmtime(values['eta_seconds']))}")
    return "  ".join(words)


def print_status(folder: Path) -> None:
    """One block a stage: state, job, attempts with their reasons, place, error."""
    for file in launch_files(folder):
        one = summary(file)
        job = one["job"]
        print(f"{one['stage']:<12} {one['state']:<10} {one['folder']}  ({job['cluster']} job {job['id']})")
        for tried in one["attempts"]:
            started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(tried["started"]))
            reason = f": {tried['reason']}" if tried.get("reason") else ""
            print(f"    attempt {tried['attempt'] + 1}  {started} on {tried['host']}  {tried['state']}{reason}")
        if one["progress"]:
            print(f"    {one['progress']}")
        if one["failure"]:
            print(f"    rank {one['failure']['rank']} on {one['failure']['host']}: {one['failure']['error']}")


def print_logs(folder: Path, rank: int, follow: bool) -> None:
    """The newest job's output of a rank; with ``follow`` until the job ends.

    Raises:
        UserError: no such rank, or nothing written yet and not following.
    """
    files = launch_files(folder)
    if len(files) > 1:
        below = ", ".join(str(file.parents[1]) for file in files)
        raise UserError(f"{folder} holds several stages; name one of {below}")
    job = read_json(files[0])["jobs"][-1]
    if not 0 <= rank < job["tasks"]:
        raise UserError(f"--rank {rank}, but the job has ranks 0 to {job['tasks'] - 1}")
    paths = log_paths(job, rank)
    if not follow and not any(path.exists() for path in paths):
        raise UserError(
            f"job {job['id']} has written nothing yet ({job_state(job).lower()}); add --follow to wait for it"
        )
    tail = Tail(paths)
    while True:
        state = job_state(job)
        tail.copy()
        if not follow or state not in ("PENDING", "RUNNING"):
            return
        time.sleep(2 if job["cluster"] == "slurm" else 0.3)


def log_paths(job: dict[str, Any], rank: int) -> list[Path]:
    """Standard output and standard error of a rank."""
    return [Path(job["logs"]) / f"{job['id']}_{rank}_log.{kind}" for kind in ("out", "err")]


class Tail:
    """Copies what is new in a job's files to this process's output, without submitit's own lines."""

    def __init__(self, paths: list[Path]) -> None:
        self._places = dict.fromkeys(paths, 0)

    def copy(self) -> bool:
        """Copies what came since the last call; True if there was anything."""
        anything = False
        for path, place in self._places.items():
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                file.seek(place)
                data = file.read()
                whole = data[: data.rfind(b"\n") + 1]
                self._places[path] = place + len(whole)
                stream = sys.stdout if path.suffix == ".out" else sys.stderr
                for line in whole.decode(errors="replace").splitlines():
                    if not line.startswith("submitit "):
                        print(line, file=stream, flush=True)
                        anything = True
        return anything


def cancel(folder: Path, now: bool = False) -> None:
    """Ends every job of the folder that still runs or waits, and no other; ``now`` leaves no time for a checkpoint."""
    ended = 0
    for file in launch_files(folder):
        for job in read_json(file)["jobs"]:
            if job_state(job) not in ("PENDING", "RUNNING"):
                continue
            ended += 1
            if job["cluster"] == "slurm":
                how = ["--signal=KILL"] if now else []
                subprocess.run(["scancel", *how, job["id"]], check=True)
            else:
                _end_local(job, signal.SIGKILL if now else signal.SIGTERM)
            print(f"cancelled {job['cluster']} job {job['id']} ({file.parents[1]})")
    if not ended:
        print(f"nothing runs in {folder}")


def _end_local(job: dict[str, Any], number: signal.Signals) -> None:
    controller = int(job["id"])
    if number == signal.SIGKILL:
        for pid in children(controller):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    os.kill(controller, number)  # submitit's controller hands SIGTERM on to every rank


def children(pid: int) -> list[int]:
    """Processes whose parent is ``pid``."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def _local_controller(job: dict[str, Any]) -> bool:
    """Does the process live, and is it still this job's (ids are used again)?"""
    try:
        command = Path(f"/proc/{job['id']}/cmdline").read_bytes().decode(errors="replace")
        state = Path(f"/proc/{job['id']}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return job["logs"] in command and state != "Z"


def _slurm_state(job: dict[str, Any]) -> str:
    for state, name in _squeue(job["id"]):
        if name == job["name"]:  # else the cluster has started its ids anew, and this one is another's
            return state
    sacct = ["sacct", "-n", "-X", "-P", "-o", "State,JobName", "-j", job["id"]]
    with contextlib.suppress(OSError):
        asked = subprocess.run(sacct, capture_output=True, text=True)
        for line in asked.stdout.splitlines() if asked.returncode == 0 else ():
            state, _, name = line.partition("|")
            if name == job["name"]:
                return state.split()[0]
    return "ENDED"


def _squeue(job_id: str) -> Iterator[tuple[str, str]]:
    command = ["squeue", "-h", "--states=all", "--array", "-j", job_id, "-o", "%T|%j"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"job {job_id} is SLURM's, but squeue is not here ({error}); ask from a login node") from error
    for line in asked.stdout.splitlines() if asked.returncode == 0 else ():
        state, _, name = line.partition("|")
        yield state, name


def follow_command(folder: Path) -> str:
    """What to type to see a detached job's output."""
    return f"python tools/launch.py logs --follow {shlex.quote(str(folder))}"
