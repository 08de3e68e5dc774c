"""What became of a run: status, logs, cancel. It is read from the run folder; only a job's state is asked for."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError
from pretrain.common.lock import start_of
from pretrain.common.run_folder import read_json

from . import local_job, slurm
from .ranks import attempts

_IN_SNAPSHOT = re.compile(r"(^|/)launch/[^/]+/code/")  # a job's copy of the code, with whatever lay in configs/


def launch_files(folder: Path) -> list[Path]:
    """The launch.json of a run folder, or of all stages below a pipeline's or sweep's folder.

    Raises:
        UserError: nothing was started there.
    """
    found = _launch_files(folder)
    if not found:
        raise UserError(f"nothing was started in {folder} (no launch/launch.json there or below)")
    return found


def _launch_files(folder: Path) -> list[Path]:
    own = folder / "launch" / "launch.json"
    if own.is_file():
        return [own]
    found = sorted(folder.glob("**/launch/launch.json"))
    return [path for path in found if not _IN_SNAPSHOT.search(path.relative_to(folder).as_posix())]


def read_launch(file: Path) -> dict[str, Any]:
    """A launch.json with all that the commands need.

    Raises:
        UserError: it is damaged.
    """
    data = read_json(file)
    jobs = data.get("jobs")
    keys = {"id", "cluster", "name", "logs", "host", "tasks"}
    if not isinstance(data.get("spec"), dict) or not isinstance(jobs, list) or not jobs:
        raise UserError(f"{file} names no job; it is damaged, or another file")
    if not all(isinstance(job, dict) and keys <= job.keys() for job in jobs):
        raise UserError(f"{file} lacks one of {', '.join(sorted(keys))}; it is damaged, or another file")
    return data


def job_state(job: dict[str, Any]) -> str:
    """PENDING, RUNNING, how it ended in SLURM's words (ENDED where only the folder knows more), or UNKNOWN.

    UNKNOWN is a scheduler that does not answer, or a process of another machine: it may well be running.
    """
    if job["cluster"] == "slurm":
        return slurm.state(job["id"], job["name"])
    if job["host"] != socket.gethostname():
        return "UNKNOWN"
    return "RUNNING" if local_job.is_running(job) else "ENDED"


def is_over(folder: Path, job: dict[str, Any]) -> bool:
    """Does the run folder itself say that the job has ended for good?"""
    tries = attempts(folder, job["id"])
    return bool(tries) and tries[-1]["state"] in ("done", "stopped", "failed")


def summary(launch_file: Path) -> dict[str, Any]:
    """What `status` prints of one stage: job, state, attempts, place, and the first failing rank's error."""
    data = read_launch(launch_file)
    folder = launch_file.parents[1]
    job = data["jobs"][-1]
    tries = attempts(folder, job["id"])
    last = tries[-1] if tries else {}
    produces = folder / str(data["spec"].get("produces", ""))
    complete = (folder / "launch" / "complete.json").is_file() and produces.exists()
    state, reason = job_state(job), last.get("reason", "")
    if state == "UNKNOWN" and not is_over(folder, job):
        reason = f"{'SLURM does not answer' if job['cluster'] == 'slurm' else 'ask on ' + job['host']}"
    elif state in ("ENDED", "UNKNOWN", "COMPLETED", "FAILED"):  # the ranks' own words say more
        state = "done" if complete else last.get("state", state.lower())
        by = job.get("ended_by")
        if state == "running" or (state == "ended" and by):  # it never said how it ended
            state, reason = ("stopped", f"it was ended by {by}") if by else ("killed", silent_end(folder))
            tries[-1:] = [{**last, "state": state}] if last else []
    return {
        "stage": data["spec"].get("stage", "?"), "folder": folder, "job": job, "state": state.lower(),
        "attempts": tries, "progress": progress(folder), "failure": last.get("failure", {}), "reason": reason,
    }  # fmt: skip


def silent_end(folder: Path) -> str:
    """What is to be said of a job that did not say how it ended."""
    if shutil.disk_usage(folder).free < 2**20:
        return f"it could not write how it ended: the disk of {folder} is full"
    return "it ended without saying why"


def progress(folder: Path) -> str:
    """The newest line of metrics.json in words, or an empty string."""
    try:
        with open(folder / "metrics.json", "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16384))
            lines = file.read().decode(errors="replace").splitlines()
        values = json.loads(lines[-1])
    except (OSError, IndexError, ValueError, RecursionError):
        return ""
    if not isinstance(values, dict):
        return ""
    words = [f"step {values['iteration'] + 1}"] if isinstance(values.get("iteration"), int) else []
    for name, form in (("loss", "{:.4g}"), ("total_loss", "{:.4g}"), ("images_per_second", "{:.0f} images/s")):
        if isinstance(values.get(name), (int, float)):
            words.append(("" if "images" in name else f"{name} ") + form.format(values[name]))
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
        words.append(f"eta {datetime.timedelta(seconds=int(values['eta_seconds']))}")
    return "  ".join(words)


def print_status(folder: Path) -> None:
    """One block for each stage: state, job, attempts with their reasons, place, error."""
    damaged = []
    for file in launch_files(folder):
        try:
            one = summary(file)
        except UserError as error:
            damaged.append(error)
            continue
        job = one["job"]
        print(f"{one['stage']:<12} {one['state']:<10} {one['folder']}  ({job['cluster']} job {job['id']})")
        for tried in one["attempts"]:
            started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(tried["started"]))
            reason = f": {tried['reason']}" if tried.get("reason") else ""
            print(f"    attempt {tried['attempt'] + 1}  {started} on {tried['host']}  {tried['state']}{reason}")
        if one["reason"] and one["reason"] not in [tried.get("reason") for tried in one["attempts"]]:
            print(f"    {one['reason']}")
        if one["progress"]:
            print(f"    {one['progress']}")
        if one["failure"]:
            print(f"    rank {one['failure']['rank']} on {one['failure']['host']}: {one['failure']['error']}")
    if damaged:
        raise UserError("; ".join(map(str, damaged)))


def print_logs(folder: Path, rank: int, follow: bool) -> None:
    """The newest job's output of a rank; with ``follow`` until the job ends.

    Raises:
        UserError: no such rank, or nothing written yet and not following.
    """
    files = launch_files(folder)
    if len(files) > 1:
        below = ", ".join(str(file.parents[1]) for file in files)
        raise UserError(f"{folder} holds several stages; name one of {below}")
    job = read_launch(files[0])["jobs"][-1]
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
        if not follow or state not in ("PENDING", "RUNNING", "UNKNOWN"):
            return
        if state == "UNKNOWN" and is_over(files[0].parents[1], job):
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
    """Ends every job of the folder that still runs or waits, and no other; ``now`` leaves no time for a checkpoint.

    Raises:
        UserError: a job cannot be ended from here, or SLURM refuses; the others are ended all the same.
    """
    ended, problems = _end_runner(folder)
    for file in _launch_files(folder) if ended else launch_files(folder):
        try:
            jobs = read_launch(file)["jobs"]
        except UserError as error:
            problems.append(str(error))
            continue
        for job in jobs:
            state = job_state(job)
            if state == "UNKNOWN" and job is jobs[-1] and not is_over(file.parents[1], job):
                problems.append(_out_of_reach(file.parents[1], job))
            if state not in ("PENDING", "RUNNING"):
                continue
            try:
                _end(file.parents[1], job, now)
            except UserError as error:
                problems.append(str(error))
                continue
            ended = True
            print(f"cancelled {job['cluster']} job {job['id']} ({file.parents[1]})")
    if problems:
        raise UserError("; ".join(problems))
    if not ended:
        print(f"nothing runs in {folder}")


def _end_runner(folder: Path) -> tuple[bool, list[str]]:
    """Ends the launcher that runs a pipeline or sweep on this machine: it would start the next stage."""
    found, problems = False, []
    for kind in ("pipeline", "sweep"):
        file = folder / "launch" / f"{kind}.json"
        try:
            runner = read_json(file).get("runner") if file.is_file() else None
        except UserError as error:  # the stages' own records may be whole
            problems.append(str(error))
            continue
        if not isinstance(runner, dict) or not isinstance(runner.get("pid"), int):
            continue
        if runner.get("host") != socket.gethostname():
            problems.append(
                f"process {runner['pid']} on {runner.get('host')} runs the {kind} in {folder}, as far as can be seen "
                f"from here; there: python tools/launch.py cancel {shlex.quote(str(folder))}"
            )
        elif start_of(runner["pid"]) == runner.get("started"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(runner["pid"], signal.SIGTERM)
                print(f"cancelled the {kind} in {folder} (process {runner['pid']})")
                found = True
    return found, problems


def _out_of_reach(folder: Path, job: dict[str, Any]) -> str:
    if job["cluster"] == "slurm":
        return f"SLURM does not answer about job {job['id']} of {folder}; try again, or: scancel {job['id']}"
    return (
        f"job {job['id']} of {folder} runs on {job['host']}, as far as can be seen from here; "
        f"there: python tools/launch.py cancel {shlex.quote(str(folder))}"
    )


def _end(folder: Path, job: dict[str, Any], now: bool) -> None:
    if job["cluster"] == "slurm":
        slurm.cancel(job["id"], now)
        return
    local_job.note_end(folder, job["logs"], "launch.py cancel --now" if now else "launch.py cancel")
    if now:
        local_job.kill(folder, int(job["id"]))
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(job["id"]), signal.SIGTERM)  # the controller hands it on to every rank


def follow_command(folder: Path) -> str:
    """What to type to see a detached job's output."""
    return f"python tools/launch.py logs --follow {shlex.quote(str(folder))}"
