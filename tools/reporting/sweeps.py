"""A sweep's table (sweep.md) and plot (sweep.png)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError
from pretrain.common.run_folder import atomic_write, read_json

from .document import Table, grid
from .seeds import mean_and_interval

_SCORES = {"top1": "top-1 of the linear probe", "knn_top1": "kNN top-1 after pretraining"}
Setting = tuple[str, ...]  # a value per key


@dataclass(frozen=True)
class Sweep:
    """The points of a sweep that are done.

    Attributes:
        keys: config keys that are varied.
        grid: key -> its values; empty: settings were listed one by one.
        score: top1 | knn_top1.
        scores: setting -> a value per seed.
        published: setting -> the paper's number.
        absent: a line per point that is not done.
    """

    name: str
    keys: list[str]
    grid: dict[str, list[str]]
    score: str
    scores: dict[Setting, list[float]] = field(default_factory=dict)
    published: dict[Setting, float | None] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)


def draw(folder: str) -> Path:
    """Writes table and plot of the points that are done; missing points are named."""
    sweep = read_sweep(Path(folder))
    text = "\n".join([grid(table(sweep)), "", *sweep.absent]).rstrip()
    target = Path(folder) / "sweep.md"
    atomic_write(target, text + "\n")
    print(text)
    if sweep.scores:
        figure(sweep).savefig(Path(folder) / "sweep.png", dpi=150)
    return target


def read_sweep(folder: Path) -> Sweep:
    """The sweep in ``folder``.

    Raises:
        UserError: launch/sweep.json is damaged.
    """
    record = folder / "launch" / "sweep.json"
    data = read_json(record)
    if not {"grid", "settings", "points", "score"} <= data.keys():
        raise UserError(f"{record} is no record of a sweep; run the sweep's command again")
    try:
        keys = list(dict.fromkeys(key for setting in data["settings"] for key in setting))
        values = {key: [str(value) for value in values] for key, values in data["grid"].items()}
        points = [(str(point["name"]), dict(point["setting"]), Path(point["folder"]).name) for point in data["points"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{record} does not list its points; run the sweep's command again") from error
    sweep = Sweep(folder.name, keys, values, str(data["score"]))
    for name, setting, stage in points:
        run = folder / name / stage  # beside the record, wherever the sweep is now
        try:
            value = _score(run, sweep.score)
        except UserError as error:  # one damaged file must not cost the other points their table
            sweep.absent.append(f"not done: {name} ({error})")
            continue
        if value is None:
            sweep.absent.append(f"not done: {name}")
            continue
        cells = tuple(str(setting.get(key, "-")) for key in keys)
        sweep.scores.setdefault(cells, []).append(value)
        if cells not in sweep.published and sweep.score == "top1":
            sweep.published[cells] = _published(run / "config.yaml")
    return sweep


def table(sweep: Sweep) -> Table:
    """A row per setting: mean and 95% interval over seeds, beside the paper's number where there is one."""
    is_compared = any(sweep.published.values())
    rows = []
    for setting, values in sweep.scores.items():
        mean, half = mean_and_interval(values)
        rows.append([*setting, f"{mean:.2f}", "-" if half is None else f"± {half:.2f}", str(len(values))])
        if is_compared:
            paper = sweep.published[setting]
            rows[-1] += ["-", "-"] if paper is None else [f"{paper:.2f}", f"{mean - paper:+.2f}"]
    head = [*sweep.keys, sweep.score, "95% interval", "seeds", *(["paper", "difference"] if is_compared else [])]
    note = f"Score: {_SCORES.get(sweep.score, sweep.score)}, in percent; the mean over seeds."
    return Table(f"Sweep {sweep.name}", [note], head, rows, (lambda: figure(sweep)) if sweep.scores else None)


def figure(sweep: Sweep) -> Any:
    """A heat map of a grid of two keys; else a point per setting, with its interval."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(6, 4), layout="constrained")
    axes = drawn.add_subplot()
    keys, scores = list(sweep.grid), sweep.scores
    if len(keys) != 2:
        means, halves = zip(*(mean_and_interval(values) for values in scores.values()), strict=True)
        labels = ["\n".join(setting) for setting in scores]
        errors = [half or 0 for half in halves]
        axes.errorbar(labels, means, yerr=errors, marker="o", capsize=3, ls="-" if keys else "")
        axes.set_xlabel(keys[0] if keys else "setting")
        axes.set_ylabel(f"{sweep.score} (%)")
        return drawn
    rows, columns = sweep.grid[keys[0]], sweep.grid[keys[1]]
    values = [[mean_and_interval(scores[(r, c)])[0] if (r, c) in scores else math.nan for c in columns] for r in rows]
    image = axes.imshow(values, aspect="auto")
    known = [value for row in values for value in row if not math.isnan(value)]
    bright = min(known) + 0.6 * (max(known) - min(known))  # above, the colors are too light for white
    for (i, row), (j, _) in itertools.product(enumerate(values), enumerate(columns)):
        if not math.isnan(row[j]):
            color = "white" if row[j] < bright else "black"
            axes.text(j, i, f"{row[j]:.1f}", ha="center", va="center", color=color)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel(keys[1])
    axes.set_ylabel(keys[0])
    drawn.colorbar(image, label=f"{sweep.score} (%)")
    return drawn


def _score(run: Path, name: str) -> float | None:
    """The score in a run's results.json; None where there is no file, or no such number in it."""
    results = run / "results.json"
    metrics = read_json(results).get("metrics", {}) if results.is_file() else {}
    value = metrics.get(name) if isinstance(metrics, dict) else None
    return float(value) if isinstance(value, (int, float)) else None


def _published(config_file: Path) -> float | None:
    """The paper's number for the recipe and probe in a linear probe's ``config_file``; None if it cannot be read."""
    from pretrain.config import from_yaml_text

    from .papers import published_top1

    try:
        return published_top1(from_yaml_text(config_file.read_text(encoding="utf-8"), str(config_file)))
    except (OSError, UnicodeDecodeError, UserError):  # the scores are shown all the same
        return None
