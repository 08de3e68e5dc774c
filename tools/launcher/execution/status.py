"""The status of every stage below a folder, from state.json, launch.json and one query of SLURM."""

import contextlib
import datetime
import json
import os
import shlex
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tabulate import tabulate

from pretrain.common.errors import UserError, count_noun, escape_control
from pretrain.common.run import file_names, metrics
from pretrain.common.run.folder import read_stage
from pretrain.common.run.lease import find_owner
from pretrain.common.run.state import is_end_recorded, read_outcome

from ..graphs.graph import find_record
from ..record_formats import LAUNCH_FILE, PIPELINE_FILE, LaunchRecord, read_launch, read_pipeline
from .job import Job, describe_unrecorded_exit, explain_reason, read_last_jobs
from .records import find_files, find_launch_files, format_original_command, format_resume_command, read_imports
from .slurm import JobState

_COLUMNS = ("stage", "state", "job", "attempt", "started", "host", "progress", "folder")
_WELL = ("complete", "running", "finishing", "pending", "not started")  # states that need no action
# States that are no failure; SLURM has many that are, such as out_of_memory and node_fail.
_NOT_FAILED = (*_WELL, "stopped", "cancelled", "unknown")
_NOBODY = "nobody will start it, because its launcher has ended"
_NOT_IN_QUEUE = "it was sent back to the queue, and is no longer there (cancelled?)"
_METRICS = {
    "loss": "loss {:.4g}",
    "total_loss": "total_loss {:.4g}",
    "bbox/AP": "box AP {:.1f}",
    "images_per_second": "{:.0f} images/s",
}


def print_status(folder: Path, failed: bool = False, as_json: bool = False) -> int:
    """Print a line per stage, and below them why stages wait, stopped or failed; return 1 if one failed, else 0.

    Args:
        failed: print only stages that failed.
        as_json: print a list of objects instead.
    """
    entries = collect(folder)
    stages = [entry for entry in entries if not failed or entry["state"] not in _NOT_FAILED]
    if as_json:
        print(json.dumps(stages, default=str, indent=2))
    else:
        counts = Counter(entry["state"] for entry in entries)
        lines = [", ".join(f"{count} {state}" for state, count in counts.most_common())]
        abandoned = [entry for entry in stages if entry["reason"] == _NOBODY]
        named = [entry for entry in stages if _needs_action(entry) and entry not in abandoned]
        lines += [f"{entry['state']}: {_explain(entry)}" for entry in named]
        if abandoned:
            stages_left = count_noun(len(abandoned), "stage")
            lines.append(f"not started: {stages_left}, which nobody will start, because the launcher has ended")
        if lines[1:] and find_record(folder):
            lines.append(_describe_remedy(folder, stages))
        lines.append(tabulate([_build_row(entry) for entry in stages], _COLUMNS, "plain", disable_numparse=True))
        lines += [_explain(entry) for entry in stages if not _needs_action(entry) and _find_reason(entry)]
        print(escape_control("\n".join(lines)))
    return int(any(entry["state"] not in _NOT_FAILED for entry in stages))


def find_stage_to_show(folder: Path) -> Path:
    """Return the run folder whose output `logs` shows: ``folder``, or that of one of the stages below it.

    This is a stage that is running, else the one that failed last, else the last one; standard error names it.
    """
    if folder / LAUNCH_FILE in find_launch_files(folder):
        return folder
    entry = max((entry for entry in collect(folder) if "logs" in entry["job"]), key=_rank_for_logs)
    print(
        f"{entry['folder']}: {entry['state']} (all stages: launch.py status {shlex.quote(str(folder))})",
        file=sys.stderr,
    )
    return entry["folder"]


def _rank_for_logs(entry: dict[str, Any]) -> tuple[bool, bool, float]:
    last = {"started": 0.0, **entry["record"], **entry["failure"]}
    return entry["state"] == "running", entry["state"] not in _NOT_FAILED, last.get("ended", last["started"])


def collect(folder: Path) -> list[dict[str, Any]]:
    """Return every stage below a folder in the order of its pipeline, including those that have not started.

    Each has its job, state, reason, folder, progress, ``record`` (the state.json that its last job wrote), and
    ``failure``, the first failing rank's record.

    Raises:
        UserError: nothing was started in ``folder``, or a launch.json is damaged.
    """
    files = find_files(folder, file_names.STATE, str(LAUNCH_FILE), str(PIPELINE_FILE))
    if not files:
        raise UserError(f"nothing was started in {folder}, or below it; pass the folder of a run or pipeline")
    plans: dict[Path, dict[str, Any]] = {}
    abandoned: set[Path] = set()  # stages of pipelines whose launcher has ended
    launched: dict[Path, LaunchRecord | None] = {}  # None for a run without the launcher
    for file in files:
        if file.name == PIPELINE_FILE.name:
            stages = {file.parents[1] / stage["key"]: stage for stage in read_pipeline(file).stages}
            plans |= stages
            abandoned |= set() if find_owner(file.parents[1]) else stages.keys()
        elif file.name == LAUNCH_FILE.name:
            launched[file.parents[1]] = read_launch(file.parents[1])
        else:
            launched.setdefault(file.parent, None)
    jobs = read_last_jobs(launched)
    entries = []
    for run_folder in dict.fromkeys([*plans, *launched]):
        plan = plans.get(run_folder, {})
        record = launched.get(run_folder)
        stage = (record.spec if record else plan).get("stage") or read_stage(run_folder)
        key = plan.get("key", os.path.relpath(run_folder, folder))
        entry = {"key": key, "stage": stage, "folder": run_folder, "waits_for": plan.get("parents", [])}
        entry |= _describe_state(run_folder, *jobs.get(run_folder, (None, JobState(""))))
        if entry["state"] == "not started" and run_folder in abandoned:
            entry["reason"] = _NOBODY
        entry["progress"] = _describe_progress(run_folder, is_running=entry["state"] == "running")
        entries.append(entry)
    complete = {entry["key"] for entry in entries if entry["state"] == "complete"}
    for entry in entries:
        is_waiting = entry["state"] in ("not started", "pending")
        entry["waits_for"] = [parent for parent in entry["waits_for"] if is_waiting and parent not in complete]
    return entries


def _describe_state(folder: Path, job: Job | None, job_state: JobState) -> dict[str, Any]:
    """Return a stage's job, state, reason, record and failure.

    Args:
        job: the last job of launch.json; None if the launcher has started none.
    """
    outcome = job.read_outcome() if job else read_outcome(folder)
    record = job.to_record() if job else {}
    by_command = read_outcome(folder)  # for a stage that its own command started, such as train_net.py
    if by_command.get("started", 0.0) > record.get("submitted", 0.0):
        outcome = by_command
        job = None
        is_running = outcome["state"] == "running" and find_owner(folder)
        record = {"cluster": "process", "id": str(outcome["pid"])} if is_running else {}
        job_state = JobState("RUNNING" if is_running else "ENDED")
    state, reason = _choose_state(folder, job, job_state, outcome)
    return {"job": record, "state": state, "reason": reason, "record": outcome, "failure": outcome["failure"]}


def _choose_state(folder: Path, job: Job | None, job_state: JobState, outcome: dict[str, Any]) -> tuple[str, str]:
    """Choose between what the job recorded and the scheduler's word for it; return the state and its reason."""
    state = outcome["state"]
    reason = outcome["reason"]
    if not job_state.word:
        return "not started", ""
    if job and job.may_be_running(job_state):
        return "unknown", job.explain_unknown()
    if job_state.word == "PENDING":
        return "pending", explain_reason(job_state.reason) or reason
    if job_state.is_active:
        return job_state.word.lower(), job_state.reason or reason
    end = job.describe_end(job_state) if job else ""
    if state != "complete" and job_state.word not in ("ENDED", "UNKNOWN", "COMPLETED", "FAILED"):
        return job_state.word.lower(), reason or end
    if is_end_recorded(outcome):
        return state, reason
    if not end:
        end = _NOT_IN_QUEUE if state == "requeued" else describe_unrecorded_exit(folder)
    return "failed" if job_state.word == "FAILED" else "lost", end


def _describe_progress(folder: Path, is_running: bool) -> str:
    """Describe the newest values in metrics.json; only a running stage has an ETA."""
    values: dict[str, Any] = {}
    with contextlib.suppress(OSError), open(folder / file_names.METRICS, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 16384))
        for line in file.read().decode(errors="replace").splitlines():
            values |= metrics.parse(line) or {}  # the last line may be an evaluation's, without a loss
    words = [f"step {values['iteration'] + 1}"] if values else []
    words += [form.format(values[name]) for name, form in _METRICS.items() if values.get(name) is not None]
    if is_running and values.get("eta_seconds") is not None:
        words.append(f"eta {datetime.timedelta(seconds=int(values['eta_seconds']))}")
    return "  ".join(words)


def _describe_remedy(folder: Path, entries: list[dict[str, Any]]) -> str:
    """Return the one command that continues: the original one after a failure that ``resume`` would only repeat."""
    repeated = [entry["folder"] for entry in entries if _fails_again(entry)]
    if repeated:
        remedy = "correct that, then run the original command (resume would use the recorded options and config)"
        return f"to continue: {remedy}: {format_original_command(repeated[0])}"
    imports = read_imports(entry["folder"] for entry in entries)
    return f"to continue: {format_resume_command(str(folder), imports)}"


def _fails_again(entry: dict[str, Any]) -> bool:
    """Return whether a stage failed because of its options, its config or what they name."""
    if entry["failure"]:
        return entry["failure"]["user_error"]
    return entry["state"] in ("failed", "out_of_memory") and "logs" in entry["job"]


def _needs_action(entry: dict[str, Any]) -> bool:
    return entry["state"] not in _WELL or entry["reason"] == _NOBODY


def _build_row(entry: dict[str, Any]) -> list[str]:
    """Build a stage's row, with its newest attempt."""
    job = f"{entry['job']['cluster']} {entry['job']['id']}" if entry["job"] else ""
    record = entry["record"]
    start = ["", "", ""]
    if "started" in record:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["started"]))
        start = [str(record["attempt"] + 1), started, record["host"]]
    return [entry["stage"], entry["state"], job, *start, entry["progress"], str(entry["folder"])]


def _explain(entry: dict[str, Any]) -> str:
    return f"{entry['folder']}: {_find_reason(entry)}".rstrip(": ")


def _find_reason(entry: dict[str, Any]) -> str:
    """Return why a stage is in its state."""
    failure = entry["failure"]
    if failure:
        return f"rank {failure['rank']} on {failure['host']}: {failure['error']}"
    waits = f"waits for {', '.join(entry['waits_for'])}" if entry["waits_for"] else ""
    return "; ".join(filter(None, [waits, entry["reason"]]))
