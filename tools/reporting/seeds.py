"""A pipeline's results over seeds: mean and 95% interval per branch, and its paired difference to the baseline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError
from pretrain.common.run_folder import read_json

from .document import Table

_TASKS = {"bbox": "box AP", "segm": "mask AP", "keypoints": "keypoint AP"}
_PROBES = {"knn": "kNN top-1", "linear": "linear top-1"}
_COLUMNS = 4  # panels beside one another
_SPREAD = {"similarity_mean": "similarity of views", "variance_mean": "variance of views"}


@dataclass(frozen=True)
class Study:
    """Scores of a pipeline with SEEDS.

    Attributes:
        baseline: the branch that others are compared with; empty: none.
        seeds: all that the file names, done or not.
        scores: score's name -> branch -> seed -> value.
        folders: the run folders that gave a score.
    """

    name: str
    baseline: str
    seeds: list[str]
    scores: dict[str, dict[str, dict[str, float]]]
    folders: list[Path] = field(default_factory=list)


def read_study(folder: Path) -> Study | None:
    """The scores of the pipeline in ``folder`` that are there; None if it is no pipeline with SEEDS.

    Raises:
        UserError: launch/pipeline.json or a results.json is damaged.
    """
    file = folder / "launch" / "pipeline.json"
    if not file.is_file():
        return None
    data = read_json(file)
    if "branches" not in data:
        return None
    try:
        owners = {name: (branch, seed) for branch, names in data["branches"].items() for seed, name in names.items()}
        keys = [stage["key"] for stage in data["stages"]]
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{file} does not name its branches; start its pipeline again to rewrite it") from error
    scores: dict[str, dict[str, dict[str, float]]] = {}
    folders: list[Path] = []
    for key in keys:
        name, _, stage = key.partition("/")
        results = folder / key / "results.json"
        if name not in owners or not results.is_file():
            continue
        branch, seed = owners[name]
        try:
            found = dict(_scores(stage, read_json(results)))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{results} is not what a {stage} stage writes ({error!r}); run it again") from error
        folders += [results.parent] if found else []
        for column, value in found.items():
            scores.setdefault(column, {}).setdefault(branch, {})[seed] = value
    seeds = list(dict.fromkeys(seed for _, seed in owners.values()))
    ordered = dict(sorted(scores.items(), key=lambda item: _position(item[0])))
    return Study(folder.name, str(data.get("baseline", "")), seeds, ordered, folders)


def mean_and_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and half the width of its 95% interval (Student's t); None for a single value."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, None
    from scipy.stats import sem, t  # slow to import

    return mean, float(t.ppf(0.975, len(values) - 1) * sem(values))


def paired_differences(ours: Mapping[str, float], base: Mapping[str, float]) -> list[float]:
    """Ours minus the baseline's, for each seed that both have."""
    return [ours[seed] - base[seed] for seed in ours if seed in base]


def table(study: Study, columns: Iterable[str] = ()) -> Table:
    """A row per branch and a column per score (``columns``, or all of them)."""
    shown = list(columns) or list(study.scores)
    names = dict.fromkeys(name for column in shown for name in study.scores[column])
    rows = [[name, *(_cell(study, column, name) for column in shown)] for name in names]
    return Table(study.name, [_explanation(study)], ["", *shown], rows, lambda: figure(study))


def by_branch(study: Study) -> Study:
    """The study with branches and scores exchanged, so that `difference_table` compares two scores of each branch."""
    scores: dict[str, dict[str, dict[str, float]]] = {}
    for score, branches in study.scores.items():
        for branch, seeds in branches.items():
            scores.setdefault(branch, {})[score] = seeds
    return Study(study.name, "", study.seeds, scores)


def difference_table(study: Study, pairs: Iterable[tuple[str, str]]) -> Table:
    """A row per pair of branches and a column per score: first minus second, bold if its interval excludes zero."""
    rows = []
    for first, second in pairs:
        row = [f"{first} - {second}"]
        for branches in study.scores.values():
            values = paired_differences(branches.get(first, {}), branches.get(second, {}))
            text = with_interval(values, _digits(branches), "+") if values else "-"
            mean, half = mean_and_interval(values) if values else (0.0, None)
            row.append(f"**{text}**" if half is not None and abs(mean) > half else text)
        rows.append(row)
    note = (
        f"Mean difference ± 95% interval (Student's t) of runs of the same seed, over seeds {', '.join(study.seeds)}. "
        "Bold: zero is outside the interval."
    )
    return Table(study.name, [note], ["", *study.scores], rows)


def figure(study: Study) -> Any:
    """A panel per score: a point per seed, and per branch the mean with its 95% interval."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for branches in study.scores.values() for name in branches))
    columns = min(_COLUMNS, len(study.scores))
    rows = -(-len(study.scores) // columns)
    drawn = Figure(figsize=(1.2 + 2.4 * columns, rows * (0.9 + 0.26 * len(names))), layout="constrained")
    panels = drawn.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for panel, (score, branches) in zip(panels, study.scores.items(), strict=False):
        for place, name in enumerate(names):
            values = list(branches.get(name, {}).values())
            if values:
                mean, half = mean_and_interval(values)
                panel.plot(values, [place] * len(values), ".", color="tab:gray", markersize=4, alpha=0.6)
                panel.errorbar(mean, place, xerr=half, fmt="o", color="tab:blue", capsize=3, markersize=5)
        if study.baseline in branches:
            panel.axvline(
                mean_and_interval(list(branches[study.baseline].values()))[0], color="tab:gray", lw=0.8, ls=":"
            )
        panel.set_title(score, fontsize=9)
        panel.tick_params(labelsize=8)
        panel.grid(axis="x", alpha=0.3)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    for panel in panels[len(study.scores) :]:
        panel.set_visible(False)
    return drawn


def _explanation(study: Study) -> str:
    if len(study.seeds) == 1:
        text = f"Seed {study.seeds[0]} alone, so without an interval"
    else:
        text = f"Mean ± 95% interval (Student's t) over seeds {', '.join(study.seeds)}"
    if study.baseline:
        text += f"; in parentheses, the difference from {study.baseline} with the same seed, and its interval"
    counts = {len(seeds) for branches in study.scores.values() for seeds in branches.values()}
    return text + (". A cell with fewer seeds says how many (n)." if counts - {len(study.seeds)} else ".")


def _cell(study: Study, column: str, name: str) -> str:
    branches, baseline = study.scores[column], study.baseline
    if name not in branches:
        return "-"
    digits = _digits(branches)
    text = with_interval(list(branches[name].values()), digits, "")
    if len(branches[name]) < len(study.seeds):
        text += f" [n {len(branches[name])}]"
    differences = paired_differences(branches[name], branches.get(baseline, {}))
    if name != baseline and differences:
        text += f" ({with_interval(differences, digits, '+')})"
    return text


def _digits(branches: Mapping[str, Mapping[str, float]]) -> int:
    """Decimals that show a score: one for percents and AP, four significant digits of what is smaller than 1."""
    largest = max(abs(value) for seeds in branches.values() for value in seeds.values())
    return 1 if largest >= 1 or not largest else 3 - math.floor(math.log10(largest))


def with_interval(values: Sequence[float], digits: int, sign: str) -> str:
    """``44.1 ± 2.0``, or ``44.1`` of a single value; ``sign`` is + to show one, or empty."""
    mean, half = mean_and_interval(values)
    return f"{mean:{sign}.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")


def _scores(stage_folder: str, results: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """The scores in a results.json, by the names that they have in a table."""
    stage = results.get("stage")
    metrics = results.get("metrics", {})
    if stage in _PROBES:
        which = stage_folder.removeprefix(str(stage)).removeprefix("_")
        yield f"{_PROBES[stage]} {which}".strip(), float(metrics["top1"])
    elif stage == "distributions":
        (spread,) = results["runs"].values()
        for key, name in _SPREAD.items():
            yield name, float(spread[key])
    elif stage == "transfer":
        for task, name in _TASKS.items():
            if isinstance(value := metrics.get(task, {}).get("AP"), (int, float)):
                yield f"{stage_folder} {name}", float(value)


def _position(column: str) -> int:
    """Probes first, then box, mask and keypoint AP, each in the order of the detectors."""
    kinds = [*_PROBES.values(), *_SPREAD.values(), *_TASKS.values()]
    return next(place for place, kind in enumerate(kinds) if kind in column)
