"""A sweep file: settings of one recipe, as a grid or one by one, which become a pipeline, a table and a plot.

PRETRAIN: configs/pretrain/jcl_R18_IN100_100ep.yaml
GRID: {METHOD.NUM_KEYS: [1, 2, 4, 6, 8]}         # every combination; one key: a curve, two: a heat map
POINTS:                                          # instead of GRID: settings whose values belong together
- {SOLVER.IMS_PER_BATCH: 128, SOLVER.BASE_LR: 0.1}
SEEDS: [0, 1, 2]                                 # each setting once per seed; the table shows mean and 95% interval
LINEAR: configs/linear/R18_IN100_100ep.yaml      # the score is its top-1 (own: by the recipe's own LINEAR keys);
                                                 # without LINEAR it is kNN's after pretraining
OVERRIDES: []
OUTPUT_DIR: runs/sweeps/jcl_num_keys
"""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

from tabulate import tabulate

from pretrain.common.errors import UserError
from pretrain.common.run_folder import atomic_write, read_json
from tools.reporting.seeds import mean_and_interval

from . import pipeline, stages
from .graph import Graph
from .spec import read_record

_DEFAULTS: dict[str, Any] = {
    "OUTPUT_DIR": "", "PRETRAIN": "", "GRID": {}, "POINTS": [], "SEEDS": [0], "LINEAR": "", "OVERRIDES": [],
}  # fmt: skip
Setting = dict[str, Any]  # config key -> value


def load(path: str, output: str = "") -> Graph:
    """Reads a sweep file as a pipeline with a branch per setting and seed.

    Raises:
        UserError: unknown key, no settings, a grid of more than two keys, a value a config refuses.
    """
    plan = pipeline.read_plan(path, _DEFAULTS)
    if not plan["PRETRAIN"]:
        raise UserError(f"{path} has no PRETRAIN; name the recipe that the sweep varies")
    settings = _settings(plan["GRID"], plan["POINTS"], path)
    seeds = pipeline.split_words(plan["SEEDS"])
    if not seeds:
        raise UserError(f"SEEDS in {path} is empty; name at least one")
    folder = Path(output or plan["OUTPUT_DIR"] or f"runs/sweeps/{Path(path).stem}").absolute()
    branches: dict[str, dict[str, Any]] = {}
    points: list[dict[str, Any]] = []
    for setting, seed in itertools.product(settings, seeds):
        pairs = [*((key.split(".")[-1].lower(), value) for key, value in setting.items()), ("seed", seed)]
        name = "_".join(f"{key}={re.sub(r'[^A-Za-z0-9.+-]', '_', str(value))}" for key, value in pairs)
        if name in branches:
            raise UserError(f"two settings in {path} would share {folder / name}; remove one of them")
        words = [str(word) for pair in setting.items() for word in pair]
        branches[name] = {"PRETRAIN": plan["PRETRAIN"], "OVERRIDES": [*words, "SEED", seed]}
        scored = folder / name / ("linear" if plan["LINEAR"] else "pretrain")
        points.append({"name": name, "setting": setting, "seed": seed, "folder": str(scored)})
    linear = [plan["LINEAR"]] if plan["LINEAR"] else []
    generated = {**pipeline.DEFAULTS, "BRANCHES": branches, "OVERRIDES": plan["OVERRIDES"], "LINEAR": linear}
    report = stages.report(folder, "tools.launcher.sweep:draw", [str(folder)], "sweep.md")
    score = "top1" if plan["LINEAR"] else "knn_top1"
    facts = {"grid": plan["GRID"], "settings": settings, "points": points, "score": score}
    nodes = pipeline.nodes_of(generated, folder, path)
    return Graph("sweep", str(folder), nodes, report, str(Path(path).absolute()), facts)


def _settings(grid: dict[str, Any], points: Any, path: str) -> list[Setting]:
    """Every combination of ``grid``, or ``points``, of which exactly one is given."""
    if bool(grid) == bool(points):
        raise UserError(f"{path} needs GRID (every combination of values) or POINTS (a list of settings), and not both")
    if points:
        if not isinstance(points, list) or not all(_is_setting(point) for point in points):
            raise UserError(f"POINTS in {path} is {points!r}; write a list of settings, each KEY: value")
        return points
    if len(grid) > 2:
        raise UserError(f"GRID in {path} has {len(grid)} keys; a table and a plot take 1 or 2")
    for key, values in grid.items():
        if not isinstance(key, str) or not isinstance(values, list) or not values:
            raise UserError(f"GRID {key} in {path} is {values!r}; write a list of values")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _is_setting(point: Any) -> bool:
    return isinstance(point, dict) and bool(point) and all(isinstance(key, str) for key in point)


def draw(folder: str) -> Path:
    """Table (sweep.md) and plot (sweep.png) of the points that are done; missing points are named."""
    record = Path(folder) / "launch" / "sweep.json"
    data = read_json(record)
    if not {"grid", "settings", "points", "score"} <= data.keys():
        raise UserError(f"{record} is no record of a sweep; run the sweep's command again")
    keys = list(dict.fromkeys(key for setting in data["settings"] for key in setting))
    scores: dict[tuple[str, ...], list[float]] = {}
    published: dict[tuple[str, ...], float | None] = {}
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
            cells = tuple(str(point["setting"].get(key, "-")) for key in keys)
            scores.setdefault(cells, []).append(float(value))
            if cells not in published and data["score"] == "top1":
                published[cells] = _published(Path(point["folder"]) / "config.yaml")
    rows = []
    for setting, values in scores.items():
        mean, half = mean_and_interval(values)
        rows.append([*setting, f"{mean:.2f}", "-" if half is None else f"± {half:.2f}", str(len(values))])
        if any(published.values()):
            paper = published[setting]
            rows[-1] += ["-", "-"] if paper is None else [f"{paper:.2f}", f"{mean - paper:+.2f}"]
    head = [
        *keys,
        data["score"],
        "95% interval",
        "seeds",
        *(["paper", "difference"] if any(published.values()) else []),
    ]
    table = tabulate(rows, head, "pipe", disable_numparse=True, colalign=["right"] * len(head) if rows else None)
    text = "\n".join([table, "", *absent]).rstrip()
    target = Path(folder) / "sweep.md"
    atomic_write(target, text + "\n")
    print(text)
    if scores:
        grid = {key: [str(value) for value in values] for key, values in data["grid"].items()}
        _plot(grid, scores, data["score"], Path(folder) / "sweep.png")
    return target


def _published(config_file: Path) -> float | None:
    """The paper's number for the recipe and probe in a linear probe's ``config_file``; None if it cannot be read."""
    from pretrain.config import from_yaml_text
    from tools.reporting.papers import published_top1

    try:
        return published_top1(from_yaml_text(config_file.read_text(encoding="utf-8"), str(config_file)))
    except (OSError, UnicodeDecodeError, UserError):  # the scores are shown all the same
        return None


def _plot(grid: dict[str, list[str]], scores: dict[tuple[str, ...], list[float]], name: str, path: Path) -> None:
    """A heat map of a grid of two keys; else a point per setting, with its interval."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    keys = list(grid)
    if len(keys) != 2:
        means, halves = zip(*(mean_and_interval(values) for values in scores.values()), strict=True)
        labels = ["\n".join(setting) for setting in scores]
        axes.errorbar(labels, means, yerr=[half or 0 for half in halves], marker="o", capsize=3, ls="-" if grid else "")
        axes.set_xlabel(keys[0] if keys else "setting")
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
