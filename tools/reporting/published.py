"""The papers' tables, each row with the mean of our comparable runs beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from . import papers
from .document import Table
from .runs import Detection
from .seeds import with_interval
from .tables import Row, linear_result

_TASKS = {"bbox": "box", "segm": "mask", "keypoints": "keypoint"}
Scores = Mapping[str, float | None]


class _Measured(NamedTuple):
    """A run of ours that is comparable to a row of a paper.

    Attributes:
        sample: its checkpoint, whose runs count once, by their mean; a detector from random weights counts itself.
        engine: of a detector, else empty.
    """

    verdict: papers.Verdict
    scores: Scores
    sample: str
    engine: str


def tables(rows: Sequence[Row], runs: Sequence[Detection]) -> Iterable[Table]:
    """A table per published one that has a row with a comparable run, in whole, and per engine of ours."""
    measured = []
    for row in rows:
        for probe in row.probes:
            sample = probe.origin.sha256 or str(row.folder)
            measured.append(_Measured(linear_result(row, [probe]), probe.scores, sample, ""))
    for run in runs:
        scores = run.metrics.get(papers.TASKS[run.detector], {})
        sample = run.origin.sha256 or str(run.folder)
        measured.append(_Measured(papers.detection_result(run), scores, sample, run.engine))
    measured = [one for one in measured if one.verdict.numbers]
    for name, engine in dict.fromkeys((one.verdict.table, one.engine) for one in measured):
        yield _table(name, engine, [one for one in measured if (one.verdict.table, one.engine) == (name, engine)])


def _table(name: str, engine: str, measured: Sequence[_Measured]) -> Table:
    head, lines = ["published row"], []
    metrics = list(measured[0].verdict.numbers or {})
    for metric in metrics:
        head += [f"paper's {metric}", f"our {metric}", "difference"]
    for row in papers.rows_of(name):
        line = [_label(row)]
        for metric in metrics:
            samples: dict[str, list[float]] = {}
            for one in measured:
                if one.verdict.row is row and (value := one.scores.get(metric)) is not None:
                    samples.setdefault(one.sample, []).append(value)
            line += [row[metric] or "-", *_beside([mean(values) for values in samples.values()], row[metric])]
        lines.append(line)
    notes = [
        "Ours: the mean ± 95% interval (Student's t) over checkpoints whose configs are those of the row's recipes; "
        "several runs of one checkpoint are one sample, their mean."
    ]
    if engine not in ("", "detectron2"):
        notes.append("The paper's engine is Detectron2, this table's is not.")
    return Table(f"Published: {name}{f', engine {engine}' if engine else ''}", notes, head, lines)


def _label(row: Mapping[str, str]) -> str:
    if "init" in row:
        return f"{_TASKS[row['task']]}: {row['init']}"
    return ", ".join(filter(None, (row["name"], Path(row["pretrain"]).stem, row["overrides"])))


def _beside(ours: Sequence[float], paper: str) -> list[str]:
    if not ours:
        return ["-", "-"]
    count = f" [n {len(ours)}]" if len(ours) > 1 else ""
    difference = f"{sum(ours) / len(ours) - float(paper):+.1f}" if paper else "-"
    return [f"{with_interval(ours, 1, '')}{count}", difference]
