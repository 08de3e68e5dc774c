"""What each run was made from and with: checkpoint, time, machine and commit."""

from __future__ import annotations

from .compare import environment
from .document import Report, Table
from .files import short_names
from .runs import Pretraining

_HEAD = ["run", "stage", "made from", "last start", "host", "devices", "torch", "commit"]


def table(report: Report) -> Table:
    """A row per run; a checkpoint is named by its SHA-256, and by the run of this report that wrote it."""
    runs, sources = report.found.runs, {item.folder: item.origin for item in report.items}
    names = short_names([run.folder for run in runs])
    trained = [item for item in report.items if isinstance(item, Pretraining) and item.origin.sha256]
    writers = {item.origin.sha256: names[item.folder] for item in trained}
    rows = []
    for run in runs:
        lines, origin = environment(run.folder), sources.get(run.folder)
        source = "" if origin is None or run.results.get("stage") == "pretrain" else origin.source or origin.method
        if source and origin and origin.sha256 in writers:
            source = f"{writers[origin.sha256]} ({origin.sha256[:8]})"
        host, commit = lines.get("host", "").partition(" (")[0], lines.get("git", "")[:12]
        cells = (source, lines.get("started"), host, lines.get("devices"), lines.get("torch"), commit)
        rows.append([names[run.folder], str(run.results.get("stage")), *(cell or "-" for cell in cells)])
    return Table("Provenance", [], _HEAD, rows)
