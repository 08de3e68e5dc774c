"""The papers' tables, with the runs whose configs are those of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from . import paper_tables
from .document import Table
from .runs import Detection, Item, Probe
from .seeds import with_interval
from .tables import TASK_NAMES


class _Measured(NamedTuple):
    """A run of ours that is comparable to a row of a paper.

    Attributes:
        sample: its checkpoint, whose runs count once, by their mean; a detector from random weights counts itself.
        engine: of a detector, else empty.
    """

    verdict: paper_tables.Verdict
    scores: Mapping[str, float | None]
    sample: str
    engine: str


def tables(items: Sequence[Item]) -> Iterable[Table]:
    """A table per published one that has a row with a comparable run, in whole, and per engine of ours."""
    measured = []
    for item in items:
        sample = item.origin.sha256 or str(item.folder)
        if isinstance(item, Probe):
            measured.append(_Measured(paper_tables.linear_result(item), item.scores, sample, ""))
        elif isinstance(item, Detection):
            scores = item.metrics.get(paper_tables.TASKS[item.detector], {})
            measured.append(_Measured(paper_tables.detection_result(item), scores, sample, item.engine))
    measured = [run for run in measured if run.verdict.numbers]
    for name, engine in dict.fromkeys((run.verdict.table, run.engine) for run in measured):
        yield _table(name, engine, [run for run in measured if (run.verdict.table, run.engine) == (name, engine)])


def _table(name: str, engine: str, measured: Sequence[_Measured]) -> Table:
    head, cells = ["published row"], []
    metrics = list(measured[0].verdict.numbers or {})
    for metric in metrics:
        head += [f"paper's {metric}", f"our {metric}", "difference"]
    for row in paper_tables.rows_of(name):
        cells.append([_label(row)])
        for metric in metrics:
            samples: dict[str, list[float]] = {}
            for run in measured:
                if run.verdict.row == row and (value := run.scores.get(metric)) is not None:
                    samples.setdefault(run.sample, []).append(value)
            ours = list(map(fmean, samples.values()))
            count = f" [n {len(ours)}]" if len(ours) > 1 else ""
            difference = f"{fmean(ours) - float(row[metric]):+.1f}" if row[metric] and ours else "-"
            cells[-1] += [row[metric] or "-", f"{with_interval(ours)}{count}" if ours else "-", difference]
    notes = [
        "Ours: the mean ± 95% interval (Student's t) over checkpoints whose configs are those of the row's recipes; "
        "several runs of one checkpoint are one sample, their mean. 0.3 AP is ordinary variation."
    ]
    if engine not in ("", "detectron2"):
        notes.append("The paper's engine is Detectron2, this table's is not.")
    return Table(f"Published: {name}{f', engine {engine}' if engine else ''}", notes, head, cells)


def _label(row: Mapping[str, str]) -> str:
    if "init" in row:
        return f"{TASK_NAMES[row['task']]}: {row['init']}"
    return ", ".join(filter(None, (row["name"], Path(row["pretrain"]).stem, row["overrides"])))
