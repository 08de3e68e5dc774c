"""Published tables next to the runs whose configs are those of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from . import paper_tables
from .document import Table
from .runs import Detection, Item, Probe
from .seeds import format_mean
from .tables import TASK_NAMES


class _Measurement(NamedTuple):
    """A run that is comparable to a row of a paper.

    Attributes:
        sample: the run's checkpoint, because all runs of a checkpoint count once, with their mean; a detector from
            random weights counts itself.
        engine: name of the engine of a detector, else empty.
    """

    verdict: paper_tables.Verdict
    scores: Mapping[str, float | None]
    sample: str
    engine: str


def build_tables(items: Sequence[Item]) -> Iterable[Table]:
    """Yield a table, with all its rows, for each published table and engine that has a comparable run."""
    measurements = []
    for item in items:
        sample = item.origin.sha256 or str(item.folder)
        if isinstance(item, Probe):
            verdict = paper_tables.find_linear_result(item)
            measurements.append(_Measurement(verdict, item.scores, sample, ""))
        elif isinstance(item, Detection):
            verdict = paper_tables.find_detection_result(item)
            scores = item.metrics.get(paper_tables.TASKS[item.detector], {})
            measurements.append(_Measurement(verdict, scores, sample, item.engine))
    groups: dict[tuple[str, str], list[_Measurement]] = {}
    for measurement in measurements:
        if measurement.verdict.numbers:
            groups.setdefault((measurement.verdict.table, measurement.engine), []).append(measurement)
    for (name, engine), group in groups.items():
        yield _build_table(name, engine, group)


def _build_table(name: str, engine: str, measurements: Sequence[_Measurement]) -> Table:
    metrics = list(measurements[0].verdict.numbers or {})
    head = ["published row"]
    for metric in metrics:
        head += [f"paper's {metric}", f"our {metric}", "difference"]
    rows = []
    for published in paper_tables.read_rows(name):
        cells = [_label(published)]
        for metric in metrics:
            samples: dict[str, list[float]] = {}
            for run in measurements:
                if run.verdict.row == published and (score := run.scores.get(metric)) is not None:
                    samples.setdefault(run.sample, []).append(score)
            ours = list(map(fmean, samples.values()))
            count = f" [n {len(ours)}]" if len(ours) > 1 else ""
            difference = f"{fmean(ours) - float(published[metric]):+.1f}" if published[metric] and ours else "-"
            cells += [published[metric] or "-", f"{format_mean(ours)}{count}" if ours else "-", difference]
        rows.append(cells)
    notes = [
        "Ours: the mean ± 95% interval (Student's t) over checkpoints whose configs are those of the row's recipes; "
        "several runs of one checkpoint are one sample, their mean. 0.3 AP is ordinary variation."
    ]
    if engine not in ("", "detectron2"):
        notes.append(f"The paper used Detectron2; these runs used {engine}.")
    return Table(f"Published: {name}{f', engine {engine}' if engine else ''}", notes, head, rows)


def _label(row: Mapping[str, str]) -> str:
    if "init" in row:
        return f"{TASK_NAMES[row['task']]}: {row['init']}"
    return ", ".join(filter(None, (row["name"], Path(row["pretrain"]).stem, row["overrides"])))
