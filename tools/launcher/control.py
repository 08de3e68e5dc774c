"""Status and cancel, from the records in a run folder and, for whether a job is active, its scheduler or system."""

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
import time
from pathlib import Path
from typing import Any

from tabulate import tabulate

from pretrain.common.errors import UserError
from pretrain.common.lock import start_of
from pretrain.common.run_folder import read_json

from . import local_job, slurm
from .ranks import attempts

_IN_SNAPSHOT = re.compile(r"(^|/)launch/[^/]+/code/")  # a job's copy of the code


def launch_files(folder: Path, required: bool = True) -> list[Path]:
    """The launch.json of a run folder, or of all stages below the folder of a pipeline or sweep.

    Raises:
        UserError: nothing was started there, and something is ``required``.
    """
    own = folder / "launch" / "launch.json"
    found = [own] if own.is_file() else sorted(folder.glob("**/launch/launch.json"))
    found = [path for path in found if not _IN_SNAPSHOT.search(path.relative_to(folder).as_posix())]
    if required and not found:
        raise UserError(f"nothing was started in {folder} (no launch/launch.json there or below)")
    return found


def read_launch(file: Path) -> dict[str, Any]:
    """Reads a launch.json and checks that it has the keys that the commands need.

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
    """PENDING, RUNNING, SLURM's name for how it ended (ENDED where only the folder tells more), or UNKNOWN.

    UNKNOWN is a scheduler that does not answer, or a process of another machine: it may be running.
    """
    if job["cluster"] == "slurm":
        return slurm.state(job["id"], job["name"])
    if job["host"] != socket.gethostname():
        return "UNKNOWN"
    return "RUNNING" if local_job.is_running(job) else "ENDED"


def is_finished(folder: Path, job: dict[str, Any]) -> bool:
    """True if the run folder records that the job has ended for good."""
    tries = attempts(folder, job["id"])
    return bool(tries) and tries[-1]["state"] in ("done", "stopped", "failed")


def summary(launch_file: Path) -> dict[str, Any]:
    """What `status` shows of a stage: job, state, attempts, folder, and the first failing rank's error."""
    data = read_launch(launch_file)
    folder = launch_file.parents[1]
    job = data["jobs"][-1]
    tries = attempts(folder, job["id"])
    last = tries[-1] if tries else {}
    produces = folder / str(data["spec"].get("produces", ""))
    complete = (folder / "launch" / "complete.json").is_file() and produces.exists()
    state, reason = job_state(job), last.get("reason", "")
    if state == "UNKNOWN" and not is_finished(folder, job):
        reason = f"{'SLURM does not answer' if job['cluster'] == 'slurm' else 'run status on ' + job['host']}"
    elif state in ("ENDED", "UNKNOWN", "COMPLETED", "FAILED"):  # the ranks' own records say more
        state = "done" if complete else last.get("state", state.lower())
        by = job.get("ended_by")
        if state == "running" or (state == "ended" and by):  # it recorded no end
            state, reason = ("stopped", f"it was ended by {by}") if by else ("killed", silent_end(folder))
            tries[-1:] = [{**last, "state": state}] if last else []
    return {
        "stage": data["spec"].get("stage", "?"), "folder": folder, "job": job, "state": state.lower(),
        "attempts": tries, "progress": progress(folder), "failure": last.get("failure", {}), "reason": reason,
    }  # fmt: skip


def silent_end(folder: Path) -> str:
    """Why a job may have ended without recording how."""
    if shutil.disk_usage(folder).free < 2**20:
        return f"it could not record how it ended: the disk of {folder} is full"
    return "it exited without reporting an error"


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
    """A table with a row per attempt; below it, how stages failed."""
    head = ["stage", "state", "job", "attempt", "started", "host", "ended", "progress", "folder"]
    rows: list[list[str]] = []
    notes: list[str] = []
    damaged: list[str] = []
    for file in launch_files(folder):
        try:
            one = summary(file)
        except UserError as error:
            damaged.append(str(error))
            continue
        tries, failure = one["attempts"] or [{}], one["failure"]
        for tried in tries:
            stage = [one["stage"], one["state"], f"{one['job']['cluster']} {one['job']['id']}"]
            started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(tried["started"])) if tried else ""
            ended = ": ".join(filter(None, [tried.get("state"), tried.get("reason")]))
            is_last = tried is tries[-1]
            rows.append([
                *(stage if tried is tries[0] else [""] * 3), str(tried["attempt"] + 1) if tried else "", started,
                tried.get("host", ""), ended, one["progress"] if is_last else "", str(one["folder"]) if is_last else "",
            ])  # fmt: skip
        if one["reason"] and one["reason"] not in [tried.get("reason") for tried in tries]:
            notes.append(f"{one['folder']}: {one['reason']}")
        if failure:
            notes.append(f"{one['folder']}: rank {failure['rank']} on {failure['host']}: {failure['error']}")
    if rows:
        print("\n".join([tabulate(rows, head, "plain", disable_numparse=True), *notes]))
    if damaged:
        raise UserError("; ".join(damaged))


def cancel(folder: Path, now: bool = False) -> None:
    """Ends every pending or running job of the folder; ``now``: without time for a checkpoint.

    Raises:
        UserError: a job cannot be ended from this machine, or SLURM refuses; the other jobs are still ended.
    """
    has_ended, problems = _end_runner(folder)
    for file in launch_files(folder, required=not has_ended):
        stage = file.parents[1]
        try:
            jobs = read_launch(file)["jobs"]
        except UserError as error:
            problems.append(str(error))
            continue
        for job in jobs:
            state = job_state(job)
            if state == "UNKNOWN" and job is jobs[-1] and not is_finished(stage, job):
                if job["cluster"] == "slurm":
                    again = f"try again, or: scancel {job['id']}"
                    problems.append(f"SLURM does not answer about job {job['id']} of {stage}; {again}")
                else:
                    problems.append(_elsewhere(f"job {job['id']} of {stage} runs on {job['host']}", stage))
            if state not in ("PENDING", "RUNNING"):
                continue
            try:
                _end(stage, job, now)
            except UserError as error:
                problems.append(str(error))
                continue
            has_ended = True
            print(f"cancelled {job['cluster']} job {job['id']} ({stage})")
    if problems:
        raise UserError("; ".join(problems))
    if not has_ended:
        print(f"nothing runs in {folder}")


def _end_runner(folder: Path) -> tuple[bool, list[str]]:
    """Ends the launcher that runs a pipeline or sweep on this machine: it would start the next stage."""
    found, problems = False, []
    for kind in ("pipeline", "sweep"):
        file = folder / "launch" / f"{kind}.json"
        try:
            runner = read_json(file).get("runner") if file.is_file() else None
        except UserError as error:  # the stages' own records may be undamaged
            problems.append(str(error))
            continue
        if not isinstance(runner, dict) or not isinstance(runner.get("pid"), int):
            continue
        if runner.get("host") != socket.gethostname():
            what = f"process {runner['pid']} on {runner.get('host')} runs the {kind} in {folder}"
            problems.append(_elsewhere(what, folder))
        elif start_of(runner["pid"]) == runner.get("started"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(runner["pid"], signal.SIGTERM)
                print(f"cancelled the {kind} in {folder} (process {runner['pid']})")
                found = True
    return found, problems


def _elsewhere(what: str, folder: Path) -> str:
    place = shlex.quote(str(folder))
    return f"{what}, as far as this machine can tell; on that machine, run: python tools/launch.py cancel {place}"


def _end(folder: Path, job: dict[str, Any], now: bool) -> None:
    if job["cluster"] == "slurm":
        slurm.cancel(job["id"], now)
        return
    local_job.note_end(folder, job["logs"], "launch.py cancel --now" if now else "launch.py cancel")
    if now:
        local_job.kill(folder, int(job["id"]))
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(job["id"]), signal.SIGTERM)  # the controller forwards it to every rank
