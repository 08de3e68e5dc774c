"""What `status` shows: every stage below a folder, also those that have not started, from records and one query."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tabulate import tabulate

from pretrain.common.errors import UserError, printable
from pretrain.common.lock import holder
from pretrain.common.run_folder import FAILED, read_json, stage_of

from . import local
from .jobs import is_finished, job_states, silent_end
from .records import attempts, files_below, progress, read_launch

_PLANS = ("launch/pipeline.json", "launch/sweep.json")
_ALIVE = ("PENDING", "RUNNING")
_ACTIVE = ("pending", "running", "unknown")
_LONGEST_IN_TABLE = 40  # characters of a reason
_INTERVAL_S = {False: 2.0, True: 30.0}  # between two looks, by whether SLURM has to be asked


def follow(folder: Path, as_json: bool) -> None:
    """Shows the status again and again until nothing is pending or running.

    Raises:
        UserError: as `print_status`.
    """
    while True:
        stages = collect(folder)
        if sys.stdout.isatty() and not as_json:
            print("\x1b[H\x1b[2J", end="")  # to the top of an empty screen
        _show(stages, as_json)
        active = [entry for entry in stages if entry["state"] in _ACTIVE]
        if not active:
            return
        time.sleep(_INTERVAL_S[any(entry["job"].get("cluster") == "slurm" for entry in active)])


def print_status(folder: Path, as_json: bool = False) -> None:
    """A line per stage; below them, why stages wait, stopped or failed.

    Raises:
        UserError: nothing was started in ``folder``, or a record is damaged; the other stages are still shown.
    """
    _show(collect(folder), as_json)


def collect(folder: Path) -> list[dict[str, Any]]:
    """`summary` of every stage below a folder, in the order of its pipeline or sweep; not started ones, too.

    A damaged record is the ``reason`` of its stage, whose state is then damaged.
    """
    all_files = files_below(folder, "stage.txt", "launch/launch.json", *_PLANS)
    if not all_files:
        raise UserError(f"nothing was started in {folder}, or below it")
    planned = dict(_planned([path for path in all_files if path.name in ("pipeline.json", "sweep.json")]))
    without_launcher = [path.parent for path in all_files if path.name == "stage.txt"]
    files = [path for path in all_files if path.name == "launch.json"]
    order = {path: place for place, path in enumerate(planned)}
    files.sort(key=lambda file: order.get(file.parents[1], len(order)))
    records: dict[Path, dict[str, Any] | UserError] = {}
    for file in files:
        try:
            records[file.parents[1]] = read_launch(file)
        except UserError as error:
            records[file.parents[1]] = error
    jobs = {place: record["jobs"][-1] for place, record in records.items() if isinstance(record, dict)}
    states = dict(zip(jobs, job_states(list(jobs.values())), strict=True))
    entries: dict[Path, dict[str, Any]] = {}
    for stage_folder in dict.fromkeys([*planned, *records, *without_launcher]):
        record, plan = records.get(stage_folder), planned.get(stage_folder, {})
        if isinstance(record, UserError):
            entry = _blank(stage_folder, plan.get("stage", "?"), "damaged", str(record))
        elif record is None and stage_folder in without_launcher:
            entry = _without_launcher(stage_folder)
        elif record is None:
            entry = _blank(stage_folder, plan["stage"], "not started")
        else:
            entry = summary(stage_folder, record, states[stage_folder])
        entries[stage_folder] = entry | {"key": plan.get("key", os.path.relpath(stage_folder, folder))}
    done = {entry["key"] for entry in entries.values() if entry["state"] == "done"}
    for stage_folder, entry in entries.items():
        parents = planned.get(stage_folder, {}).get("parents", [])
        if entry["state"] in ("not started", "pending"):
            entry["waits_for"] = [parent for parent in parents if parent not in done]
    return list(entries.values())


def summary(folder: Path, data: dict[str, Any], state: str) -> dict[str, Any]:
    """A stage: job, state, attempts, folder, progress, and the first failing rank's error.

    Args:
        data: the content of its launch.json.
        state: of its last job, as `job_states` names it.
    """
    job = data["jobs"][-1]
    tries = attempts(folder, job)
    last = tries[-1] if tries else {}
    produces = folder / str(data["spec"].get("produces", ""))
    complete = os.path.isfile(folder / "launch" / "complete.json") and os.path.exists(produces)
    state, _, detail = state.partition(" ")
    reason = last.get("reason", "")
    if state == "UNKNOWN" and not is_finished(folder, job):
        reason = "SLURM does not answer" if job["cluster"] == "slurm" else f"run status on {job['host']}"
    elif state == "PENDING" and detail:
        reason = detail.strip("()")
    elif state not in _ALIVE:
        state, reason = _outcome(state, complete, last, local.ended_by(folder, Path(job["logs"])), folder)
        tries[-1:] = [{**last, "state": state}] if last else []
    stage = _blank(folder, data["spec"].get("stage", "?"), state.lower(), reason)
    return stage | {
        "job": job, "attempts": tries, "progress": progress(folder), "failure": last.get("failure", {}),
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
        return "killed", silent_end(folder)
    return recorded or state, last.get("reason", "")


def _without_launcher(folder: Path) -> dict[str, Any]:
    """A stage that was started by its own command line, such as train_net.py."""
    owner = holder(folder)
    state = "running" if owner else "done" if (folder / "results.json").is_file() else "stopped"
    job = {"cluster": "process", "id": str(owner.get("pid", "?"))} if owner else {}
    error = ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        error = (folder / FAILED).read_text().strip()
    state = "failed" if error and not owner else state
    return _blank(folder, stage_of(folder) or "?", state, error) | {"job": job, "progress": progress(folder)}


def _planned(files: list[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The stages that these records of pipelines list, by run folder."""
    for file in files:
        with contextlib.suppress(UserError, KeyError, TypeError):  # the stages have their own records
            for stage in read_json(file)["stages"]:
                beside = file.parents[1] / stage["key"]
                yield beside, {"stage": stage["stage"], "key": stage["key"], "parents": list(stage["parents"])}


def _blank(folder: Path, stage: str, state: str, reason: str = "") -> dict[str, Any]:
    return {
        "stage": stage, "folder": folder, "job": {}, "state": state, "attempts": [], "progress": "", "failure": {},
        "reason": reason, "waits_for": [],
    }  # fmt: skip


def _show(stages: list[dict[str, Any]], as_json: bool) -> None:
    damaged = [entry["reason"] for entry in stages if entry["state"] == "damaged"]
    if as_json:
        print(json.dumps(stages, indent=2, default=str))
    else:
        rows = [row for entry in stages for row in _rows(entry)]
        notes = [note for entry in stages if entry["state"] != "damaged" for note in _notes(entry)]
        head = ["stage", "state", "job", "attempt", "started", "host", "ended", "progress", "folder"]
        print(printable("\n".join([tabulate(rows, head, "plain", disable_numparse=True), *notes])))
    if damaged:
        raise UserError("; ".join(damaged))


def _rows(entry: dict[str, Any]) -> Iterator[list[str]]:
    """A line per attempt."""
    job, tries = entry["job"], entry["attempts"] or [{}]
    for tried in tries:
        stage = [entry["stage"], entry["state"], f"{job['cluster']} {job['id']}" if job else ""]
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(tried["started"])) if tried else ""
        ended = ": ".join(filter(None, [tried.get("state"), _short(tried.get("reason", ""))]))
        is_last = tried is tries[-1]
        yield [
            *(stage if tried is tries[0] else [""] * 3), str(tried["attempt"] + 1) if tried else "", started,
            tried.get("host", ""), ended, entry["progress"] if is_last else "", str(entry["folder"]) if is_last else "",
        ]  # fmt: skip


def _short(reason: str) -> str:
    """The reason if it fits into a table; `_notes` has the others."""
    return reason if len(reason) <= _LONGEST_IN_TABLE else ""


def _notes(entry: dict[str, Any]) -> Iterator[str]:
    failure, shown = entry["failure"], {_short(tried.get("reason", "")) for tried in entry["attempts"]}
    for reason in dict.fromkeys([*(tried.get("reason", "") for tried in entry["attempts"]), entry["reason"]]):
        if reason not in ("", failure.get("error"), *shown):
            yield f"{entry['folder']}: {reason}"
    if entry["waits_for"]:
        yield f"{entry['folder']}: waits for {', '.join(entry['waits_for'])}"
    if failure:
        yield f"{entry['folder']}: rank {failure['rank']} on {failure['host']}: {failure['error']}"
