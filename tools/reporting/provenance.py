"""Checkpoint, time, machine and commit of each run."""

from .document import Report, Table
from .files import read_environment, shorten_names
from .runs import BackboneScore

_HEAD = ["run", "stage", "made from", "last start", "host", "devices", "torch", "commit"]


def build_table(report: Report) -> Table:
    """Build a row per run; a checkpoint is named by its SHA-256, and by the run of this report that wrote it."""
    runs = report.collection.runs
    origins = {score.folder: score.origin for score in report.scores}
    names = shorten_names([run.folder for run in runs])
    backbones = [score for score in report.scores if isinstance(score, BackboneScore)]
    pretrainings = [score for score in backbones if score.is_of_pretraining]
    writers = {score.origin.sha256: names[score.folder] for score in pretrainings if score.origin.sha256}
    writing_folders = {score.folder for score in pretrainings}
    rows = []
    for run in runs:
        environment = read_environment(run.folder)[-1]
        origin = origins.get(run.folder)
        source = "" if origin is None or run.folder in writing_folders else origin.source or origin.method
        if source and origin and origin.sha256 in writers:
            source = f"{writers[origin.sha256]} ({origin.sha256[:8]})"
        host = environment.get("host", "").partition(" (")[0]
        commit = environment.get("git", "")[:12]
        lines = (environment.get("started"), host, environment.get("devices"), environment.get("torch"), commit)
        rows.append([names[run.folder], str(run.results.get("stage")), *(cell or "-" for cell in (source, *lines))])
    return Table("Provenance", [], _HEAD, rows, folders={names[run.folder]: run.folder for run in runs})
