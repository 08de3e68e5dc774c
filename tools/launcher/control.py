"""A run folder's jobs: whether they are active, by their scheduler or system, and how they are cancelled."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

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
    found = [own] if own.is_file() else files_below(folder, "launch/launch.json")
    if required and not found:
        raise UserError(f"nothing was started in {folder} (no launch/launch.json there or below)")
    return found


def files_below(folder: Path, name: str) -> list[Path]:
    """The files of this name in and below ``folder``, without those in a job's copy of the code."""
    found = sorted(folder.glob(f"**/{name}"))
    return [path for path in found if not _IN_SNAPSHOT.search(path.relative_to(folder).as_posix())]


def read_launch(file: Path) -> dict[str, Any]:
    """Reads a launch.json and checks that it has the keys that the commands need.

    Raises:
        UserError: it is damaged.
    """
    data = read_json(file)
    jobs = data.get("jobs")
    kinds = {"id": str, "cluster": str, "name": str, "logs": str, "host": str, "tasks": int}
    if not isinstance(data.get("spec"), dict) or not isinstance(jobs, list) or not jobs:
        raise UserError(f"{file} names no job; it is damaged or the wrong file")
    if not all(isinstance(job, dict) and all(isinstance(job.get(key), kinds[key]) for key in kinds) for job in jobs):
        names = ", ".join(sorted(kinds))
        raise UserError(f"{file} lacks one of {names}, or has another kind of value; it is damaged or the wrong file")
    return data


def job_state(job: dict[str, Any]) -> str:
    """PENDING, RUNNING, SLURM's name for how it ended (ENDED where only the folder tells more), or UNKNOWN.

    UNKNOWN is a scheduler that does not answer, or a process of another machine: it may be running.
    """
    if job["cluster"] == "slurm":
        return slurm.states([(job["id"], job["name"])])[job["id"], job["name"]].split()[0]
    if job["host"] != socket.gethostname():
        return "UNKNOWN"
    return "RUNNING" if local_job.is_running(job) else "ENDED"


def is_finished(folder: Path, job: dict[str, Any]) -> bool:
    """True if the run folder records that the job has ended for good."""
    tries = attempts(folder, job["id"])
    return bool(tries) and tries[-1]["state"] in ("done", "stopped", "failed")


def silent_end(folder: Path) -> str:
    """Why a job may have ended without recording how."""
    if shutil.disk_usage(folder).free < 2**20:
        return f"it could not record how it ended: the disk of {folder} is full"
    return "it exited without reporting an error"


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
