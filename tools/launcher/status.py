"""What `status` shows: every stage below a folder, also those that have not started, from records and one query."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tabulate import tabulate

from pretrain.common.errors import UserError, printable
from pretrain.common.files import read_json
from pretrain.common.run import metrics
from pretrain.common.run.folder import FAILED, stage_of
from pretrain.common.run.lock import holder

from . import local_job
from .jobs import describe_unrecorded_exit, is_finished, job_states, why_unknown
from .records import attempts, files_below, launch_files

_PLANS = ("pipeline.json",)
_HEAD = ("stage", "state", "job", "attempt", "started", "host", "progress", "folder")
# States that are no failure; SLURM has many that are, such as out_of_memory and node_fail.
_NOT_FAILED = ("done", "running", "pending", "requeued", "not started", "stopped", "cancelled", "unknown")


def print_status(folder: Path, failed: bool = False, as_json: bool = False) -> int:
    """Print a line per stage, and below them why stages wait, stopped or failed; return 1 if one failed, else 0.

    Args:
        failed: print only stages that failed.
        as_json: print a list of objects instead.
    """
    stages = collect(folder)
    stages = [entry for entry in stages if not failed or entry["state"] not in _NOT_FAILED]
    if as_json:
        print(json.dumps(stages, default=str, indent=2))
        return int(any(entry["state"] not in _NOT_FAILED for entry in stages))
    notes = [f"{entry['folder']}: {note}" for entry in stages for note in _notes(entry)]
    table = tabulate([_row(entry) for entry in stages], _HEAD, "plain", disable_numparse=True)
    print(printable("\n".join([table, *notes])))
    return int(any(entry["state"] not in _NOT_FAILED for entry in stages))


def stage_to_show(folder: Path) -> Path:
    """Returns the run folder whose output `logs` shows: ``folder``, or that of one of the stages below it.

    This is a stage that is running, else the one that failed last, else the last one; standard error names it.
    """
    if folder / "launch" / "launch.json" in launch_files(folder):
        return folder

    def rank(entry: dict[str, Any]) -> tuple[bool, bool, float]:
        last = {"started": 0.0, **dict(*entry["attempts"][-1:]), **entry["failure"]}
        return entry["state"] == "running", entry["state"] not in _NOT_FAILED, last.get("ended", last["started"])

    shown = max((entry for entry in collect(folder) if "logs" in entry["job"]), key=rank)
    print(f"{shown['folder']}: {shown['state']} (all stages: launch.py status {folder})", file=sys.stderr)
    return shown["folder"]


def collect(folder: Path) -> list[dict[str, Any]]:
    """Every stage below a folder, in the order of its pipeline or sweep; not started ones, too.

    Each has its job, state, attempts, folder, progress, and the first failing rank's error.

    Raises:
        UserError: nothing was started in ``folder``, or a launch.json is damaged.
    """
    files = files_below(folder, "stage.txt", "launch/launch.json", *(f"launch/{name}" for name in _PLANS))
    if not files:
        raise UserError(f"nothing was started in {folder}, or below it")
    planned: dict[Path, dict[str, Any]] = {}
    records: dict[Path, dict[str, Any] | None] = {}
    for file in files:
        if file.name in _PLANS:
            planned |= {file.parents[1] / stage["key"]: stage for stage in read_json(file)["stages"]}
        elif file.name == "launch.json":
            records[file.parents[1]] = read_json(file)
        else:
            records.setdefault(file.parent, None)
    jobs = {place: record["jobs"][-1] for place, record in records.items() if record}
    states = dict(zip(jobs, job_states(list(jobs.values())), strict=True))
    entries = []
    for place in dict.fromkeys([*planned, *records]):
        plan = planned.get(place, {})
        entry = {
            "key": plan.get("key", os.path.relpath(place, folder)), "stage": plan.get("stage") or stage_of(place),
            "folder": place, "job": {}, "state": "not started", "attempts": [], "progress": "",
            "failure": {}, "reason": "", "waits_for": plan.get("parents", []),
        }  # fmt: skip
        record = records.get(place)
        if record:
            entry |= _of_job(place, record, states[place])
        elif place in records:
            entry |= _without_launcher(place)
        entry["progress"] = _progress(place, is_running=entry["state"] == "running")
        entries.append(entry)
    done = {entry["key"] for entry in entries if entry["state"] == "done"}
    for entry in entries:
        is_waiting = entry["state"] in ("not started", "pending")
        entry["waits_for"] = [parent for parent in entry["waits_for"] if is_waiting and parent not in done]
    return entries


def _of_job(folder: Path, record: dict[str, Any], state: str) -> dict[str, Any]:
    """What a launch.json, its ranks and the ``state`` of its last job, as `job_states` names it, tell of a stage."""
    job = record["jobs"][-1]
    tries = attempts(folder, job)
    last = tries[-1] if tries else {}
    is_complete = (folder / "launch" / "complete.json").is_file() and (folder / record["spec"]["produces"]).exists()
    state, _, detail = state.partition(" ")
    reason = last.get("reason", "")
    if state == "UNKNOWN" and not is_finished(folder, job):
        reason = why_unknown(job)
    elif state == "PENDING":
        reason = detail.strip("()") or reason
    elif state != "RUNNING":
        state, reason = _outcome(state, is_complete, last, local_job.stopped_by(folder, Path(job["logs"])), folder)
        tries[-1:] = [{**last, "state": state}] if last else []
    return {
        "stage": record["spec"]["stage"], "job": job, "state": state.lower(), "reason": reason, "attempts": tries,
        "failure": last.get("failure", {}),
    }  # fmt: skip


def _outcome(state: str, is_complete: bool, last: dict[str, Any], by: str, folder: Path) -> tuple[str, str]:
    """How a job ended, and why: from its product, the ``last`` record of its ranks, and SLURM's word for it."""
    recorded = last.get("state", "")
    if is_complete:  # perhaps it hung at its exit
        return "done", last.get("reason", "")
    if by and recorded in ("", "running"):
        return "stopped", f"it was ended by {by}"
    if state not in ("ENDED", "UNKNOWN", "COMPLETED", "FAILED"):
        return state, last.get("reason", "")
    if recorded == "running":
        return "killed", describe_unrecorded_exit(folder)
    return recorded or state, last.get("reason", "")


def _without_launcher(folder: Path) -> dict[str, Any]:
    """A stage that was started by its own command line, such as train_net.py."""
    if owner := holder(folder):
        return {"state": "running", "job": {"cluster": "process", "id": str(owner.get("pid", "?"))}}
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if error := (folder / FAILED).read_text().strip():
            return {"state": "failed", "reason": error}
    return {"state": "done" if (folder / "results.json").is_file() else "stopped"}


def _progress(folder: Path, is_running: bool) -> str:
    """The newest values in metrics.json in words, or an empty string; only what is running has an ETA."""
    values: dict[str, Any] = {}
    with contextlib.suppress(OSError), open(folder / "metrics.json", "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 16384))
        for line in file.read().decode(errors="replace").splitlines():
            values |= metrics.parse(line) or {}  # the last line may be an evaluation's, without a loss
    words = [f"step {values['iteration'] + 1}"] if values else []
    forms = {"loss": "loss {:.4g}", "total_loss": "total_loss {:.4g}", "images_per_second": "{:.0f} images/s"}
    words += [form.format(values[name]) for name, form in forms.items() if values.get(name) is not None]
    if is_running and values.get("eta_seconds") is not None:
        words.append(f"eta {datetime.timedelta(seconds=int(values['eta_seconds']))}")
    return "  ".join(words)


def _row(entry: dict[str, Any]) -> list[str]:
    """A stage with its newest attempt."""
    job, last = entry["job"], entry["attempts"][-1] if entry["attempts"] else {}
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last["started"])) if last else ""
    return [
        entry["stage"], entry["state"], f"{job['cluster']} {job['id']}" if job else "",
        str(last["attempt"] + 1) if last else "", started, last.get("host", ""), entry["progress"],
        str(entry["folder"]),
    ]  # fmt: skip


def _notes(entry: dict[str, Any]) -> list[str]:
    """Why it is in its state."""
    if entry["waits_for"]:
        return [f"waits for {', '.join(entry['waits_for'])}"]
    if failure := entry["failure"]:
        return [f"rank {failure['rank']} on {failure['host']}: {failure['error']}"]
    return [entry["reason"]] if entry["reason"] else []
