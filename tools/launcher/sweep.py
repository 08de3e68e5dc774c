"""A sweep file: a grid of keys and values over one recipe, which becomes a pipeline, a table and a plot.

PRETRAIN: configs/pretrain/jcl_R18_IN100_100ep.yaml
GRID: {METHOD.NUM_KEYS: [1, 2, 4, 6, 8]}         # one key: a curve; two: a heat map
SEEDS: [0, 1, 2]                                 # each setting once per seed; the table shows mean and 95% interval
LINEAR: configs/linear/R18_IN100_100ep.yaml      # the score is its top-1; without it, kNN's after pretraining
OVERRIDES: []
OUTPUT_DIR: runs/sweeps/jcl_num_keys
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from pretrain.common.errors import UserError
from pretrain.common.run_folder import atomic_write, read_json

from . import pipeline, stages
from .graph import Graph
from .spec import read_record

_DEFAULTS: dict[str, Any] = {"OUTPUT_DIR": "", "PRETRAIN": "", "GRID": {}, "SEEDS": [0], "LINEAR": "", "OVERRIDES": []}


def load(path: str, output: str = "") -> Graph:
    """Reads a sweep file as a pipeline with a branch per setting and seed.

    Raises:
        UserError: unknown key, an empty grid or one of more than two keys, a value a config refuses.
    """
    plan = pipeline.read_plan(path, _DEFAULTS)
    grid: dict[str, list[Any]] = plan["GRID"]
    if not plan["PRETRAIN"]:
        raise UserError(f"{path} has no PRETRAIN; name the recipe that the grid varies")
    if not 1 <= len(grid) <= 2:
        raise UserError(f"GRID in {path} has {len(grid)} keys; a table and a plot take 1 or 2")
    for key, values in grid.items():
        if not isinstance(key, str) or not isinstance(values, list) or not values:
            raise UserError(f"GRID {key} in {path} is {values!r}; write a list of values")
    seeds = pipeline.split_words(plan["SEEDS"])
    if not seeds:
        raise UserError(f"SEEDS in {path} is empty; name at least one")
    folder = Path(output or plan["OUTPUT_DIR"] or f"runs/sweeps/{Path(path).stem}").absolute()
    branches: dict[str, dict[str, Any]] = {}
    points: list[dict[str, Any]] = []
    for *values, seed in itertools.product(*grid.values(), seeds):
        setting = dict(zip(grid, values, strict=True))
        pairs = [*((key.split(".")[-1].lower(), value) for key, value in setting.items()), ("seed", seed)]
        name = "_".join(f"{key}={re.sub(r'[^A-Za-z0-9.+-]', '_', str(value))}" for key, value in pairs)
        if name in branches:
            raise UserError(f"two points of GRID in {path} would share {folder / name}; remove one of them")
        words = [str(word) for pair in setting.items() for word in pair]
        branches[name] = {"PRETRAIN": plan["PRETRAIN"], "OVERRIDES": [*words, "SEED", seed]}
        scored = folder / name / ("linear" if plan["LINEAR"] else "pretrain")
        points.append({"name": name, "setting": setting, "seed": seed, "folder": str(scored)})
    linear = [plan["LINEAR"]] if plan["LINEAR"] else []
    generated = {**pipeline.DEFAULTS, "BRANCHES": branches, "OVERRIDES": plan["OVERRIDES"], "LINEAR": linear}
    report = stages.report(folder, "tools.launcher.sweep:draw", [str(folder)], "sweep.md")
    facts = {"grid": grid, "points": points, "score": "top1" if plan["LINEAR"] else "knn_top1"}
    nodes = pipeline.nodes_of(generated, folder, path)
    return Graph("sweep", str(folder), nodes, report, str(Path(path).absolute()), facts)


def draw(folder: str) -> Path:
    """Table (sweep.md) and plot (sweep.png) of the points that are done; missing points are named."""
    record = Path(folder) / "launch" / "sweep.json"
    data = read_json(record)
    if not {"grid", "points", "score"} <= data.keys():
        raise UserError(f"{record} is not a record of a sweep; run the sweep's command again")
    grid = {key: [str(value) for value in values] for key, values in data["grid"].items()}
    scores: dict[tuple[str, ...], list[float]] = {}
    absent = []
    for point in data["points"]:
        reason = ""
        try:
            value = read_record(Path(point["folder"]) / "results.json").get("metrics", {}).get(data["score"])
        except UserError as error:  # one damaged file must not cost the other points their table
            value, reason = None, f" ({error})"
        if value is None:
            absent.append(f"not done: {point['name']}{reason}")
        else:
            scores.setdefault(tuple(str(point["setting"][key]) for key in grid), []).append(float(value))
    rows = []
    for setting, values in scores.items():
        mean, half = mean_and_interval(values)
        rows.append([*setting, f"{mean:.2f}", "-" if half is None else f"± {half:.2f}", str(len(values))])
    head = [*grid, data["score"], "95% interval", "seeds"]
    table = tabulate(rows, head, "pipe", disable_numparse=True, colalign=["right"] * len(head) if rows else None)
    text = "\n".join([table, "", *absent]).rstrip()
    target = Path(folder) / "sweep.md"
    atomic_write(target, text + "\n")
    print(text)
    if scores:
        _plot(grid, scores, data["score"], Path(folder) / "sweep.png")
    return target


def mean_and_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and half the width of its 95% interval (Student's t); None for a single value."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, None
    from scipy.stats import sem, t  # slow to import

    return mean, float(t.ppf(0.975, len(values) - 1) * sem(values))


def _plot(grid: dict[str, list[str]], scores: dict[tuple[str, ...], list[float]], name: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    keys = list(grid)
    if len(keys) == 1:
        done = [value for value in grid[keys[0]] if (value,) in scores]
        means, halves = zip(*(mean_and_interval(scores[(value,)]) for value in done), strict=True)
        axes.errorbar(done, means, yerr=[half or 0 for half in halves], marker="o", capsize=3)
        axes.set_xlabel(keys[0])
        axes.set_ylabel(f"{name} (%)")
    else:
        rows, columns = grid[keys[0]], grid[keys[1]]
        table = [
            [mean_and_interval(scores[(r, c)])[0] if (r, c) in scores else math.nan for c in columns] for r in rows
        ]
        image = axes.imshow(table, aspect="auto")
        for (i, row), (j, _) in itertools.product(enumerate(table), enumerate(columns)):
            if not math.isnan(row[j]):
                axes.text(j, i, f"{row[j]:.1f}", ha="center", va="center", color="white")
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_xlabel(keys[1])
        axes.set_ylabel(keys[0])
        figure.colorbar(image, label=f"{name} (%)")
    figure.savefig(path, dpi=150)
