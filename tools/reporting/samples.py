"""Groups that no pipeline names: detectors on shares of the labels, and the papers' rows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from . import papers
from .document import Table
from .groups import Samples, counted
from .runs import Detection, Item, Probe
from .tables import TASK_NAMES

_SUBSET = re.compile(r"(?:^|[/:])([\d.]+)pct_fold(\d+)\.json(?::|$)")
_SCHEDULE = ("SOLVER.STEPS", "SOLVER.MAX_ITER", "SOLVER.WARMUP_ITERS")  # which may depend on the share


# Shares of the labels, by `make_data.py subset`


def shares(runs: Sequence[Detection]) -> Iterable[Table]:
    """Yields one table per detector, test set and protocol that was trained on at least two shares."""
    groups: dict[str, list[tuple[float, str, Detection]]] = {}
    for run in runs:
        train = run.protocol["DATASETS.TRAIN"]  # may be empty in an evaluation
        if len(train) == 1 and (match := _SUBSET.search(train[0])) and not run.evaluated_only:
            by_share = ("DATASETS.TRAIN", *_SCHEDULE)
            protocol = sorted((key, value) for key, value in run.protocol.items() if key not in by_share)
            member = (float(match[1]), match[2], run)
            groups.setdefault(repr((run.headline[0], run.test, protocol)), []).append(member)
    for members in groups.values():
        if len({share for share, *_ in members}) > 1:
            yield _shares_of(sorted(members, key=lambda member: member[0]))


def _shares_of(members: Sequence[tuple[float, str, Detection]]) -> Table:
    """A row per initialization and a column per share and schedule."""
    first = members[0][-1]
    task, columns = papers.TASKS[first.detector], dict[str, str]()
    rows: dict[tuple[str, str], dict[str, Samples]] = {}
    for share, fold, run in members:
        origin, column = run.origin, repr([share, *(run.protocol[key] for key in _SCHEDULE)])
        columns[column] = f"{share:g}%, {run.protocol['SOLVER.MAX_ITER']} iterations"
        start = ", ".join(filter(None, (origin.method or origin.source, origin.data, origin.epochs, origin.altered)))
        config = {key: value for key, value in origin.config.items() if key not in ("SEED", "OUTPUT_DIR")}
        row = rows.setdefault((start, repr(sorted(config.items()))), {})
        if (ap := run.metrics.get(task, {}).get("AP")) is not None:
            row.setdefault(column, {}).setdefault(fold, []).append(ap)
    note = (
        f"{first.headline[0]}, tested on {first.test}: {TASK_NAMES[task]} AP (from 0 to 100), mean and 95% interval "
        "(Student's t) over folds (n); the seeds of a fold count by their mean. A share is one of the training images, "
        "with their labels."
    )
    lines, configs = [], Counter[str]()
    for (start, _), row in rows.items():
        configs[start] += 1
        name = f"{start} (config {configs[start]})" if configs[start] > 1 else start
        lines.append([name, *(counted(row.get(column, {})) for column in columns)])
    title = f"AP over the share of labels: {first.detector}"
    return Table(title, [note], ["initialization", *columns.values()], lines)


# The papers' tables


class _Measured(NamedTuple):
    """A run of ours that is comparable to a row of a paper.

    Attributes:
        sample: its checkpoint, whose runs count once, by their mean; a detector from random weights counts itself.
        engine: of a detector, else empty.
    """

    verdict: papers.Verdict
    scores: Mapping[str, float | None]
    sample: str
    engine: str


def published(items: Sequence[Item]) -> Iterable[Table]:
    """A table per published one that has a row with a comparable run, in whole, and per engine of ours."""
    measured = []
    for item in items:
        sample = item.origin.sha256 or str(item.folder)
        if isinstance(item, Probe):
            measured.append(_Measured(papers.linear_result(item), item.scores, sample, ""))
        elif isinstance(item, Detection):
            scores = item.metrics.get(papers.TASKS[item.detector], {})
            measured.append(_Measured(papers.detection_result(item), scores, sample, item.engine))
    measured = [run for run in measured if run.verdict.numbers]
    for name, engine in dict.fromkeys((run.verdict.table, run.engine) for run in measured):
        yield _published(name, engine, [run for run in measured if (run.verdict.table, run.engine) == (name, engine)])


def _published(name: str, engine: str, measured: Sequence[_Measured]) -> Table:
    head, cells = ["published row"], []
    metrics = list(measured[0].verdict.numbers or {})
    for metric in metrics:
        head += [f"paper's {metric}", f"our {metric}", "difference"]
    for row in papers.rows_of(name):
        cells.append([_label(row)])
        for metric in metrics:
            samples: Samples = {}
            for run in measured:
                if run.verdict.row == row and (value := run.scores.get(metric)) is not None:
                    samples.setdefault(run.sample, []).append(value)
            ours = fmean(map(fmean, samples.values())) if samples else None
            difference = f"{ours - float(row[metric]):+.1f}" if row[metric] and ours is not None else "-"
            cells[-1] += [row[metric] or "-", counted(samples), difference]
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
