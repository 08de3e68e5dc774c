"""Checkpoint, time, machine and commit of each run."""

from __future__ import annotations

from .compare import read_environment
from .document import Report, Table
from .files import shorten_names
from .runs import Pretraining

_HEAD = ["run", "stage", "made from", "last start", "host", "devices", "torch", "commit"]


def build_table(report: Report) -> Table:
    """Build a row per run; a checkpoint is named by its SHA-256, and by the run of this report that wrote it."""
    runs = report.collection.runs
    origins = {item.folder: item.origin for item in report.items}
    names = shorten_names([run.folder for run in runs])
    pretrainings = [item for item in report.items if isinstance(item, Pretraining) and item.origin.sha256]
    writers = {item.origin.sha256: names[item.folder] for item in pretrainings}
    rows = []
    for run in runs:
        environment = read_environment(run.folder)
        origin = origins.get(run.folder)
        source = "" if origin is None or run.results.get("stage") == "pretrain" else origin.source or origin.method
        if source and origin and origin.sha256 in writers:
            source = f"{writers[origin.sha256]} ({origin.sha256[:8]})"
        host = environment.get("host", "").partition(" (")[0]
        commit = environment.get("git", "")[:12]
        lines = (environment.get("started"), host, environment.get("devices"), environment.get("torch"), commit)
        rows.append([names[run.folder], str(run.results.get("stage")), *(cell or "-" for cell in (source, *lines))])
    return Table("Provenance", [], _HEAD, rows)
