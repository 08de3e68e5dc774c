"""Published results, and whether a run is comparable to one: its config must be that of the recipes of the row."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fvcore.common.config import CfgNode

from pretrain import config as pretraining
from pretrain.common.config.yaml_io import flatten, merge_file
from pretrain.probe.protocol import build_protocol
from tools import ROOT
from tools.launcher.paper_pipeline import read_table
from transfer.config import load_config

from .runs import FREE_IN_TRANSFER, Origin, Score, normalize_protocol

FOLDER = ROOT / "configs" / "papers"
TASKS = {"faster": "bbox", "mask": "segm", "keypoint": "keypoints"}  # detector -> task that Table 2 reports
_DETECTION = (FOLDER / "jcl_table2_coco_1x.csv", FOLDER / "moco_voc.csv")
_Candidate = tuple[str, Mapping[str, str], list[str]]  # table, row, and how a score differs from its recipes


class Verdict(NamedTuple):
    """Whether a run is comparable to a published result.

    Attributes:
        table: ``JCL (Cai et al. 2020), Table 1``; empty if the run is unrelated to any row.
        reason: why the run is not comparable to the row that it differs least from.
        row: the row of the table, with the paper's numbers, if the run is comparable.
    """

    table: str = ""
    reason: str = ""
    row: Mapping[str, str] | None = None


def find_published(score: Score) -> Verdict:
    """Find the row of a published table that a linear probe or a detector differs least from."""
    candidates: list[_Candidate] = []
    if score.stage == "linear":
        candidates += _compare_with_linear_rows(score)
    elif score.stage == "transfer" and not score.evaluated_only:
        candidates += _compare_with_detection_rows(score)
    if not candidates:
        return Verdict()
    table, row, reasons = min(candidates, key=lambda candidate: len(candidate[2]))
    more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return Verdict(table, "; ".join(reasons[:3]) + more, None if reasons else row)


def _compare_with_linear_rows(score: Score) -> Iterator[_Candidate]:
    """Yield the rows of the score's method, architecture and data."""
    config = score.origin.config
    for table, row in _list_rows(FOLDER.glob("*_linear.csv")):
        if not (row["pretrain"] and row["top1"]):
            continue
        recipe = _load_pretrain_recipe(row["pretrain"], row["overrides"])
        if any(config.get(key) != recipe[key] for key in ("METHOD.NAME", "MODEL.ARCH", "DATA.TRAIN")):
            continue
        test, protocol = _load_probe_recipe(row["pretrain"], row["overrides"], row["linear"])
        reasons = _list_pretraining_differences(score.origin, recipe)
        settings = {"scored on": score.test, **score.protocol}
        yield table, row, reasons + _list_differences(settings, {"scored on": test, **protocol}, "linear ")


def _compare_with_detection_rows(score: Score) -> Iterator[_Candidate]:
    """Yield the rows of the score's initialization, backbone and data, and of the task reported for its detector."""
    for table, row in _list_rows(_DETECTION):
        is_task = row["AP"] and row["task"] == TASKS[score.detector]
        if not is_task or not _is_initialized_from(score.origin, row["pretrain"]):
            continue
        recipe, test = _load_transfer_recipe(row["recipe"], row["overrides"])
        if any(score.protocol.get(key) != recipe[key] for key in ("MODEL.RESNETS.DEPTH", "DATASETS.TRAIN")):
            continue
        is_recipe = row["pretrain"].endswith(".yaml")
        reasons = _list_pretraining_differences(
            score.origin, _load_pretrain_recipe(row["pretrain"]) if is_recipe else {}
        )
        settings = {"test": score.test, **score.protocol}
        yield table, row, reasons + _list_differences(settings, {"test": test, **recipe})


def read_rows(name: str) -> list[dict[str, str]]:
    """Return all rows of the published table with this name, as they are in verdicts."""
    return [row for table, row in _list_rows(FOLDER.glob("*.csv")) if table == name]


def _is_initialized_from(origin: Origin, pretrain: str) -> bool:
    if not pretrain.endswith(".yaml"):
        return origin.method == pretrain
    return origin.config.get("METHOD.NAME") == _load_pretrain_recipe(pretrain)["METHOD.NAME"]


def _list_pretraining_differences(origin: Origin, recipe: Mapping[str, Any]) -> list[str]:
    """Return why a backbone is not the result of a recipe, or ({}) of any finished pretraining."""
    free = (*pretraining.FREE_ON_RESUME, "SEED")
    fixed = {key: value for key, value in recipe.items() if not key.startswith(free)}
    return ([origin.altered] if origin.altered else []) + _list_differences(origin.config, fixed)


def _list_differences(settings: Mapping[str, Any], recipe: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return ``SOLVER.EPOCHS 100 (recipe: 200)`` for each value of ``recipe`` that differs in ``settings``."""
    differences = []
    for key, value in recipe.items():
        if key not in settings or settings[key] != value:
            actual = _format_value(settings[key]) if key in settings else "not set"
            differences.append(f"{prefix}{key} {actual} (recipe: {_format_value(value)})")
    return differences


def _format_value(value: Any) -> str:
    return str(value) if isinstance(value, str) and value else json.dumps(value)


def _list_rows(files: Iterable[Path]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each row of published tables with the table's name."""
    for table, rows in map(read_table, sorted(files)):
        yield from ((table, row) for row in rows)


@functools.cache
def _load_pretrain_config(path: str, overrides: str = "") -> CfgNode:
    return pretraining.load_config(ROOT / path, overrides.split())


@functools.cache
def _load_pretrain_recipe(path: str, overrides: str = "") -> dict[str, Any]:
    return _flatten_config(_load_pretrain_config(path, overrides))


@functools.cache
def _load_probe_recipe(pretrain: str, overrides: str, linear: str) -> tuple[str, dict[str, Any]]:
    """Load a linear probe's config: its own file over the pretraining run's config, as in tools/launch.py linear."""
    cfg = _load_pretrain_config(pretrain, overrides).clone()
    if linear != "own":
        cfg.defrost()
        merge_file(cfg, ROOT / linear)
    return normalize_protocol("linear", build_protocol(cfg, "linear"), cfg.LINEAR.ENCODER)


@functools.cache
def _load_transfer_recipe(path: str, overrides: str) -> tuple[dict[str, Any], str]:
    recipe = _flatten_config(load_config(ROOT / path, overrides.split()))
    settings = {key: value for key, value in recipe.items() if not key.startswith(FREE_IN_TRANSFER)}
    return settings, recipe["DATASETS.TEST"][0]


def _flatten_config(cfg: Any) -> dict[str, Any]:
    """Return keys and values as a config.yaml has them, with lists instead of tuples."""
    return json.loads(json.dumps(dict(flatten(cfg))))
