"""Detectors on shares of the labels (`make_data.py subset`): AP over the share, one line per initialization."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from statistics import mean
from typing import Any

from .document import Table
from .papers import TASKS
from .runs import Detection, Protocol
from .seeds import mean_and_interval, with_interval
from .tables import TASK_NAMES

_SUBSET = re.compile(r"(?:^|[/:])([\d.]+)pct_fold(\d+)\.json(?::|$)")
_BY_SHARE = ("train", "DATASETS.TRAIN", "SOLVER.STEPS", "SOLVER.MAX_ITER", "SOLVER.WARMUP_ITERS")
Scores = dict[str, dict[float, list[float]]]  # initialization -> share in percent -> AP of each fold


def tables(runs: Sequence[Detection]) -> Iterable[Table]:
    """Yields one table per detector, test set and protocol that was trained on at least two shares."""
    groups: dict[str, list[tuple[float, str, Detection]]] = {}
    for run in runs:
        match = _SUBSET.search(run.protocol["train"][0]) if len(run.protocol["train"]) == 1 else None
        if match and not run.evaluated_only:
            member = (float(match[1]), match[2], run)
            groups.setdefault(repr((run.headline[0], run.test, _kept(run.protocol))), []).append(member)
    for members in groups.values():
        yield from _tables_of(members)


def _tables_of(members: Sequence[tuple[float, str, Detection]]) -> Iterable[Table]:
    first = members[0][-1]
    task = TASKS[first.detector]
    starts = _starts([run for *_, run in members])
    schedules: dict[float, Any] = {}  # of each share, that of its first run
    by_fold: dict[str, dict[float, dict[str, list[float]]]] = {}
    left_out = 0
    for share, fold, run in members:
        images = ("train", "DATASETS.TRAIN")
        schedule = [(name, value) for name, value in run.protocol.items() if _follows(name) and name not in images]
        ap = run.metrics.get(task, {}).get("AP")
        if schedules.setdefault(share, schedule) != schedule:
            left_out += 1
        elif ap is not None:
            folds = by_fold.setdefault(starts[_identity(run)], {}).setdefault(share, {})
            folds.setdefault(fold, []).append(ap)
    scores = {
        start: {share: [mean(values) for values in folds.values()] for share, folds in line.items()}
        for start, line in by_fold.items()
    }
    if len({share for line in scores.values() for share in line}) > 1:
        yield _table(first, task, scores, left_out)


def _follows(name: str) -> bool:
    """True for what another share changes: the images, and the schedule that follows from their number."""
    return name in _BY_SHARE or name.startswith("schedule ")


def _kept(protocol: Protocol) -> list[tuple[str, Any]]:
    return sorted((name, value) for name, value in protocol.items() if not _follows(name))


def _identity(run: Detection) -> str:
    """What two runs share that began alike but for the seed."""
    origin = run.origin
    config = {key: value for key, value in origin.config.items() if key not in ("SEED", "OUTPUT_DIR")}
    return repr((origin.method or origin.source, origin.data, origin.epochs, origin.altered, sorted(config.items())))


def _starts(runs: Sequence[Detection]) -> dict[str, str]:
    """Identity -> the initialization in words; those that would read alike are numbered."""
    found: dict[str, str] = {}
    for run in runs:
        origin = run.origin
        words = [origin.method or origin.source, origin.data, origin.epochs, origin.altered]
        name = ", ".join(filter(None, words)) or "unknown"
        if (identity := _identity(run)) not in found:
            same = sum(other.partition(" (config ")[0] == name for other in found.values())
            found[identity] = f"{name} (config {same + 1})" if same else name
    return found


def _table(run: Detection, task: str, scores: Scores, left_out: int) -> Table:
    shares = sorted({share for line in scores.values() for share in line})
    rows = [[start, *(_cell(line.get(share, [])) for share in shares)] for start, line in scores.items()]
    notes = [
        f"{run.headline[0]}, tested on {run.test}: {TASK_NAMES[task]} AP (from 0 to 100), mean and 95% interval "
        "(Student's t) over folds, whose number is in brackets; the seeds of a fold count by their mean. A share is "
        "one of the training images, with their labels."
    ]
    if left_out:
        notes.append(f"Left out, because another run of their share has another schedule: {left_out}.")
    head = ["initialization", *(f"{share:g}%" for share in shares)]
    title = f"AP over the share of labels: {run.detector}"
    return Table(title, notes, head, rows, lambda: _figure(f"{TASK_NAMES[task]} AP", shares, scores))


def _cell(values: Sequence[float]) -> str:
    return f"{with_interval(values, 1, '')} [{len(values)}]" if values else "-"


def _figure(axis: str, shares: Sequence[float], scores: Scores) -> Any:
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(6, 4), layout="constrained")
    axes = drawn.add_subplot()
    for start, line in scores.items():
        known = [share for share in shares if share in line]
        means, halves = zip(*(mean_and_interval(line[share]) for share in known), strict=True)
        axes.errorbar(known, means, yerr=[half or 0 for half in halves], marker="o", capsize=3, label=start)
    axes.set_xscale("log")
    axes.set_xticks(shares, [f"{share:g}%" for share in shares])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("share of the training images")
    axes.set_ylabel(axis)
    axes.legend()
    return drawn
