"""The tables of a report: scores share a table only if they are of the same data, a column only by one protocol."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import paper_tables
from .document import Table
from .runs import Detection, Item, Origin, Pretraining, Probe, Protocol, differing, words

TASK_NAMES = {"bbox": "box", "segm": "mask", "keypoints": "keypoint"}
_METRICS = ("AP", "AP50", "AP75")
_SCORES = {"kNN": ("top1",), "linear": ("top1", "top5")}
_ABOUT = ["run", "method", "backbone", "pretrained on", "epochs", "seed"]


@dataclass
class Row:
    """One backbone: a pretraining with its probes, or probes of the same weights from elsewhere.

    Attributes:
        folder: what the row is named after.
        pretraining: None where the weights came from elsewhere.
    """

    folder: Path
    origin: Origin
    probes: list[Probe] = field(default_factory=list)
    pretraining: Pretraining | None = None


def rows_of(items: Sequence[Item], given: Sequence[Path]) -> list[Row]:
    """A row per pretraining, with the probes of its final weights, and a row per other probed weights."""
    rows: list[Row] = []
    for item in items:
        if isinstance(item, Pretraining):
            folder = item.folder.parent if item.folder.name == "pretrain" else item.folder  # a pipeline's branch
            probes = [item.probe] if item.probe else []
            rows.append(Row(folder, item.origin, probes, item))
    others: dict[tuple[Path, str], Row] = {}
    for probe in (item for item in items if isinstance(item, Probe)):
        owner = next((row for row in rows if probe.origin.sha256 == row.origin.sha256), None)
        if owner is None:
            parent = probe.folder.parent
            is_branch = not any(folder.is_relative_to(parent) for folder in given)
            folder, weights = parent if is_branch else probe.folder, probe.origin.sha256 or str(probe.origin)
            owner = others.setdefault((folder, weights), Row(folder, probe.origin))
        owner.probes.append(probe)
    for row in others.values():  # several weights were probed in one folder
        if sum(other.folder == row.folder for other in (*rows, *others.values())) > 1:
            row.folder = row.probes[0].folder
    position = {item.folder: place for place, item in enumerate(items)}
    return sorted((*rows, *others.values()), key=lambda row: position[(row.pretraining or row.probes[0]).folder])


def probe_tables(rows: Sequence[Row], names: dict[Path, str]) -> Iterable[Table]:
    """Yields one table per data set that was scored, and one of the pretrainings without a score."""
    for scored_on in dict.fromkeys(probe.scored_on for row in rows for probe in row.probes):
        scored = [replace(row, probes=[p for p in row.probes if p.scored_on == scored_on]) for row in rows]
        yield _probe_table(scored_on, [row for row in scored if row.probes], names)
    unscored = [_about(row, names) for row in rows if not row.probes]
    if unscored:
        why = "Their data have no labels, or no val split; DATA.PROBE_TRAIN and DATA.VAL name others."
        yield _table("Pretraining without scores", [why], _ABOUT, unscored)


def _about(row: Row, names: dict[Path, str]) -> list[str]:
    o = row.origin
    return [cell or "-" for cell in (names[row.folder], o.method or o.source, o.arch, o.data, o.epochs, o.seed)]


def _probe_table(scored_on: str, rows: Sequence[Row], names: dict[Path, str]) -> Table:
    """A row per backbone, a column per protocol and score; a heading names what distinguishes its protocol."""
    head, notes, lines = list(_ABOUT), [], [_about(row, names) for row in rows]
    for kind, scores in _SCORES.items():
        protocols = _distinct(probe.protocol for row in rows for probe in row.probes if probe.kind == kind)
        different = differing(protocols)
        if protocols:
            notes.append(f"{kind}: {words(protocols[0], [name for name in protocols[0] if name not in different])}.")
        for protocol in protocols:
            for score in scores:
                which = f" ({words(protocol, different)})" if different else ""
                head.append(f"{kind} {score.replace('top', 'top-')}{which}")
                for line, row in zip(lines, rows, strict=True):
                    probes = [probe for probe in row.probes if (probe.kind, probe.protocol) == (kind, protocol)]
                    line.append(_numbers([probe.scores.get(score) for probe in probes]))
    verdicts = [(names[row.folder], paper_tables.linear_result(probe)) for row in rows for probe in row.probes]
    title = f"Accuracy on the validation images of {scored_on}, in percent"
    return _table(title, [*notes, *_refusals(verdicts)], head, lines)


def detection_tables(runs: Sequence[Detection], names: dict[Path, str]) -> Iterable[Table]:
    """Yields one table per protocol; protocols with the same headline are distinguished by the keys that differ."""
    for headline in dict.fromkeys(run.headline for run in runs):
        alike = [run for run in runs if run.headline == headline]
        protocols = _distinct(run.protocol for run in alike)
        different = differing(protocols)
        for protocol in protocols:
            detail = words(protocol, different) if different else ""
            yield _detection_table([run for run in alike if run.protocol == protocol], detail, names)


def _detection_table(runs: Sequence[Detection], detail: str, names: dict[Path, str]) -> Table:
    detector, *protocol = runs[0].headline
    tasks = [task for task in TASK_NAMES if any(task in run.metrics for run in runs)]
    head = ["run", "method", "pretrained on", "epochs", "seed"]
    head += [f"{TASK_NAMES[task]} {name}" for task in tasks for name in _METRICS]
    lines = []
    for run in runs:
        o = run.origin
        cells = [names[run.folder] + " (evaluation only)" * run.evaluated_only]
        cells += [cell or "-" for cell in (o.method, o.data, o.epochs, o.seed)]
        cells += [_numbers([run.metrics.get(task, {}).get(metric)]) for task in tasks for metric in _METRICS]
        lines.append(cells)
    notes = [f"{'; '.join(protocol)}{f'; {detail}' if detail else ''}. AP from 0 to 100."]
    weights = [f"{names[run.folder]}: {run.origin.source}" for run in runs if run.origin.source]
    notes += [f"Weights: {'; '.join(weights)}."] if weights else []
    notes += _refusals([(names[run.folder], paper_tables.detection_result(run)) for run in runs])
    return _table(f"{detector[0].upper()}{detector[1:]}", notes, head, lines)


def _refusals(verdicts: Iterable[tuple[str, paper_tables.Verdict]]) -> list[str]:
    refused: dict[tuple[str, str], dict[str, None]] = {}
    for run, verdict in verdicts:
        if verdict.reason:
            refused.setdefault((verdict.table, verdict.reason), {})[run] = None
    return [f"Not compared with {table}: {', '.join(runs)}: {why}." for (table, why), runs in refused.items()]


def _distinct(protocols: Iterable[Protocol]) -> list[Protocol]:
    distinct: list[Protocol] = []
    for protocol in protocols:
        if protocol not in distinct:
            distinct.append(protocol)
    return distinct


def _table(title: str, notes: Sequence[str], head: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """What is the same for every pretraining is a note instead of a column."""
    dropped: dict[int, set[str]] = {}
    for place, name in enumerate(head):
        values = {line[place] for line in lines if (line[1], line[place]) != ("random", "-")}
        if name in _ABOUT[2:] and len(values) < 2:
            dropped[place] = values
    shared = [f"{head[place]} {value}" for place, values in dropped.items() for value in values if value != "-"]
    notes = [*([f"Every pretraining: {', '.join(shared)}."] if shared else []), *notes]
    cells = [[cell for place, cell in enumerate(line) if place not in dropped] for line in (head, *lines)]
    return Table(title, notes, cells[0], cells[1:])


def _numbers(values: Sequence[float | None]) -> str:
    """One number, or several if a run was probed more than once by one protocol; ``-`` for none."""
    return " / ".join(dict.fromkeys(f"{value:.1f}" for value in values if value is not None)) or "-"
