"""Published tables next to the runs whose configs are those of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from .document import Table
from .paper_tables import TASKS, Verdict, find_published, read_rows
from .runs import Score
from .seeds import format_mean
from .tables import TASK_NAMES

_METRICS = ("top1", "top5", "AP", "AP50", "AP75")  # columns of the published tables


def build_tables(scores: Sequence[Score]) -> Iterable[Table]:
    """Yield a table, with all its rows, for each published table and engine that has a comparable run."""
    groups: dict[tuple[str, str], list[tuple[Verdict, Score]]] = {}
    for score in scores:
        verdict = find_published(score)
        if verdict.row:
            groups.setdefault((verdict.table, score.engine), []).append((verdict, score))
    for (name, engine), group in groups.items():
        yield _build_table(name, engine, group)


def _build_table(name: str, engine: str, group: Sequence[tuple[Verdict, Score]]) -> Table:
    published_rows = read_rows(name)
    metrics = [metric for metric in _METRICS if metric in published_rows[0]]
    head = ["published row"]
    for metric in metrics:
        head += [f"paper's {metric}", f"our {metric}", "difference"]
    rows = []
    for published in published_rows:
        scores = [score for verdict, score in group if verdict.row == published]
        cells = [_label(published)]
        for metric in metrics:
            ours = _average_checkpoints(scores, metric)
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


def _average_checkpoints(scores: Iterable[Score], metric: str) -> list[float]:
    """Return the mean of each checkpoint; a detector from random weights counts by itself."""
    values: dict[str, list[float]] = {}
    for score in scores:
        value = score.metrics.get(f"{TASKS[score.detector]}/{metric}" if score.detector else metric)
        if value is not None:
            values.setdefault(score.origin.sha256 or str(score.folder), []).append(value)
    return list(map(fmean, values.values()))


def _label(row: Mapping[str, str]) -> str:
    if "init" in row:
        return f"{TASK_NAMES[row['task']]}: {row['init']}"
    return ", ".join(filter(None, (row["name"], Path(row["pretrain"]).stem, row["overrides"])))
