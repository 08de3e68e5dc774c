"""Scores of pipelines and sweeps over seeds: the mean of each branch and its 95% interval (Student's t)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from pretrain.common.run.state import read_record
from tools.stages.base import find_kind, is_made_from

from .document import Table
from .drawing.panels import build_panels
from .runs import TASK_NAMES

_PROBES = ("kNN top-1", "linear top-1")
_PRETRAINING_KNN = "kNN top-1 after pretraining"
_RANKME = "RankMe"
_COLUMNS = 4  # panels side by side
_BySeed = Mapping[str, float]  # seed -> score


def compute_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and half the width of its 95% interval (Student's t), which is None for a single value."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, None
    return mean, _compute_half(variance(values) / len(values), len(values) - 1)


def format_mean(values: Sequence[float], digits: int = 1) -> str:
    """Return ``44.1 ± 2.0``, the mean with its interval, or ``44.1`` for a single value."""
    mean, half = compute_interval(values)
    return f"{mean:.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")


@dataclass(frozen=True)
class Study:
    """Scores of a pipeline with SEEDS, or of a sweep.

    Attributes:
        baseline: the branch that others are compared with; empty if there is none.
        seeds: all seeds that the file lists, complete or not.
        scores: name of the score -> branch -> seed -> value.
        folders: run folders with a score.
    """

    name: str
    baseline: str
    seeds: list[str]
    scores: dict[str, dict[str, dict[str, float]]]
    folders: list[Path] = field(default_factory=list)


def read_study(folder: Path) -> Study | None:
    """Return the available scores of the pipeline or sweep in ``folder``, or None if it has no SEEDS."""
    record = read_record(folder / "launch" / "pipeline.json")
    plan = record.get("study")
    if not plan:
        return None
    branches = {name: (branch, seed) for branch, names in plan["branches"].items() for seed, name in names.items()}
    study = Study(folder.name, plan["baseline"], list(dict.fromkeys(seed for _, seed in branches.values())), {})
    for key in (stage["key"] for stage in record["stages"]):
        name, _, stage = key.partition("/")
        if name not in branches:
            continue
        branch, seed = branches[name]
        results = read_record(folder / key / "results.json")
        if not is_made_from(results, folder / name / "pretrain"):  # but from an intermediate checkpoint
            continue
        scores = dict(find_kind(results.get("stage", "")).list_columns(stage, results))
        if scores:
            study.folders.append(folder / key)
        for column, value in scores.items():
            study.scores.setdefault(column, {}).setdefault(branch, {})[seed] = value
    if "kNN top-1" in study.scores:
        study.scores.pop(_PRETRAINING_KNN, None)
    kinds = [*_PROBES, _RANKME, *(f"{task} AP" for task in TASK_NAMES.values())]
    for column in sorted(study.scores, key=lambda column: [*(kind in column for kind in kinds), True].index(True)):
        study.scores[column] = study.scores.pop(column)
    return study


@dataclass(frozen=True)
class Difference:
    """A mean difference, half its 95% interval, and the p-value of no difference.

    Interval and p-value are None if there are too few runs.
    """

    mean: float
    half: float | None = None
    p: float | None = None

    def text(self, digits: int) -> str:
        """Return ``+3.5 ± 2.6``, or ``+3.5`` without an interval."""
        return f"{self.mean:+.{digits}f}" + ("" if self.half is None else f" ± {self.half:.{digits}f}")


def compare_means(scores: _BySeed, baseline: _BySeed, paired: bool = False) -> Difference | None:
    """Return ``scores`` minus ``baseline`` with Welch's test, or None if one of them is empty.

    Args:
        paired: compare the scores of each seed (one backbone, two detectors), with Student's t-test of their
            differences; None is returned if no seed has both scores.
    """
    if paired:
        seeds = [seed for seed in scores if seed in baseline]
        scores = {seed: scores[seed] for seed in seeds}
        baseline = {seed: baseline[seed] for seed in seeds}
    if not scores or not baseline:
        return None
    a = list(scores.values())
    b = list(baseline.values())
    mean = fmean(x - y for x, y in zip(a, b, strict=True)) if paired else fmean(a) - fmean(b)
    if min(len(a), len(b)) == 1:
        return Difference(mean)
    if paired:
        squared_error = variance(x - y for x, y in zip(a, b, strict=True)) / len(a)
        freedom = len(a) - 1.0
    else:
        parts = [(variance(values) / len(values), len(values) - 1) for values in (a, b)]
        squared_error = sum(part for part, _ in parts)
        # Equal scores, such as those of fixed weights, have no variance.
        freedom = squared_error**2 / sum(part**2 / n for part, n in parts) if squared_error else 1.0
    if not squared_error:
        return Difference(mean, 0.0, 0.0 if mean else 1.0)
    from scipy.special import stdtr  # scipy.stats takes a second to import

    p = 2.0 * float(stdtr(freedom, -abs(mean) / math.sqrt(squared_error)))
    return Difference(mean, _compute_half(squared_error, freedom), p)


def _compute_half(squared_error: float, freedom: float) -> float:
    """Return half the width of the 95% interval of Student's t with this squared standard error of the mean."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975)) * math.sqrt(squared_error)


def build_table(study: Study, columns: Iterable[str] = ()) -> Table:
    """Build a row per branch and a column per score (``columns``, or all of them)."""
    columns = list(columns) or list(study.scores)
    names = dict.fromkeys(name for column in columns for name in study.scores[column])
    rows = [[name, *(_format_cell(study, column, name) for column in columns)] for name in names]
    if len(study.seeds) == 1:
        text = f"Seed {study.seeds[0]} alone, so without an interval"
    else:
        text = f"Mean ± 95% interval (Student's t) over seeds {', '.join(study.seeds)}"
    if study.baseline:
        text += f"; in parentheses, the difference from {study.baseline} and its interval (Welch)"
    counts = {len(seeds) for branches in study.scores.values() for seeds in branches.values()}
    text += ". A cell with fewer seeds says how many (n)." if counts - {len(study.seeds)} else "."
    return Table(study.name, [text], ["", *columns], rows)


def _format_cell(study: Study, column: str, name: str) -> str:
    branches = study.scores[column]
    if name not in branches:
        return "-"
    digits = count_decimals(branches)
    text = format_mean(list(branches[name].values()), digits)
    if len(branches[name]) < len(study.seeds):
        text += f" [n {len(branches[name])}]"
    change = compare_means(branches[name], branches.get(study.baseline, {}))
    if name != study.baseline and change:
        text += f" ({change.text(digits)})"
    return text


def count_decimals(branches: Mapping[str, _BySeed]) -> int:
    """Return the decimals of a score: one for percentages and AP; four significant digits for values below 1."""
    largest = max(abs(value) for seeds in branches.values() for value in seeds.values())
    return 1 if largest >= 1 or not largest else 3 - math.floor(math.log10(largest))


def draw_scores(study: Study) -> Any:
    """Draw a panel per score: one point per seed, and for each branch the mean with its 95% interval."""
    names = list(dict.fromkeys(name for branches in study.scores.values() for name in branches))
    columns = min(_COLUMNS, len(study.scores))
    width = 2.4 + 1.2 / columns
    figure, panels = build_panels(len(study.scores), columns, width, 0.9 + 0.26 * len(names), sharey=True)
    for panel, (score, branches) in zip(panels, study.scores.items(), strict=True):
        for y, name in enumerate(names):
            values = list(branches.get(name, {}).values())
            if values:
                mean, half = compute_interval(values)
                panel.plot(values, [y] * len(values), ".", color="tab:gray", markersize=4, alpha=0.6)
                panel.errorbar(mean, y, xerr=half, fmt="o", color="tab:blue", capsize=3, markersize=5)
        if study.baseline in branches:
            panel.axvline(fmean(branches[study.baseline].values()), color="tab:gray", lw=0.8, ls=":")
        panel.set_title(score, fontsize=9)
        panel.tick_params(labelsize=8)
        panel.grid(axis="x", alpha=0.3)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    return figure
