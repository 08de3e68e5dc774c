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
import re
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError

from . import pipeline, stages
from .graph import Graph

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
    report = stages.report(folder, "tools.reporting.sweeps:draw", [str(folder)], "sweep.md")
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
