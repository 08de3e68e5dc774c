"""What each run was made from and with: checkpoint, time, machine and commit."""

from __future__ import annotations

from pathlib import Path

from pretrain.common.errors import UserError
from pretrain.common.run_folder import read_json

from .compare import environment
from .document import Report, Table
from .files import short_names
from .runs import Pretraining

_HEAD = ["run", "stage", "made from", "hours", "last start", "host", "devices", "torch", "commit"]


def table(report: Report) -> Table:
    """A row per run; a checkpoint is named by its SHA-256, and by the run of this report that wrote it."""
    runs, sources = report.found.runs, {item.folder: item.origin for item in report.items}
    names, total = short_names([run.folder for run in runs]), {"GPU": 0.0, "CPU": 0.0}
    trained = [item for item in report.items if isinstance(item, Pretraining) and item.origin.sha256]
    writers = {item.origin.sha256: names[item.folder] for item in trained}
    rows = []
    for run in runs:
        lines, hours, origin = environment(run.folder), process_hours(run.folder), sources.get(run.folder)
        total["CPU" if lines.get("devices", "cpu") == "cpu" else "GPU"] += hours or 0.0
        source = "" if origin is None or run.results.get("stage") == "pretrain" else origin.source or origin.method
        if source and origin and origin.sha256 in writers:
            source = f"{writers[origin.sha256]} ({origin.sha256[:8]})"
        host, commit = lines.get("host", "").partition(" (")[0], lines.get("git", "")[:12]
        cells = (lines.get("started"), host, lines.get("devices"), lines.get("torch"), commit)
        time = "-" if hours is None else f"{hours:.3f}"
        row = [names[run.folder], str(run.results.get("stage")), source or "-", time]
        rows.append([*row, *(cell or "-" for cell in cells)])
    sums = " and ".join(f"{hours:.3f} {what}-hours" for what, hours in total.items() if hours)
    note = f"Hours times processes, from the starts and ends that the launcher recorded: {sums or 'none'} in all."
    return Table("Provenance", [note], _HEAD, rows)


def process_hours(folder: Path) -> float | None:
    """Hours times processes over all starts of a run; None where the launcher did not start it.

    A process that was killed left no end, and counts for nothing.
    """
    hours: list[float] = []
    for path in sorted((folder / "launch" / "ranks").glob("*.json")):
        try:
            record = read_json(path)
        except UserError:
            continue
        started, ended = record.get("started"), record.get("ended")
        if isinstance(started, (int, float)) and isinstance(ended, (int, float)):
            hours.append(max(0.0, ended - started) / 3600)
    return sum(hours) if hours else None
