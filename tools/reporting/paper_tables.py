"""Published results next to comparable runs, whose configs must be those of the recipes of a row."""

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fvcore.common.config import CfgNode

from pretrain import config as pretraining
from pretrain.common.config.keys import Change, compare
from pretrain.common.config.yaml_io import flatten, merge
from pretrain.keys import list_keys
from pretrain.probe.protocol import build_linear_protocol
from tools import ROOT
from tools.launcher.graphs.paper_pipeline import FOLDER, read_table
from tools.stages.completion import find_recorded_kind
from transfer.config import load_config

from .document import Table
from .origins import Origin
from .protocols import normalize_detector_protocol, normalize_protocol
from .runs import TASK_NAMES, DetectorScore, Score
from .seeds.statistics import format_mean

TASKS = {"faster": "bbox", "mask": "segm", "keypoint": "keypoints"}  # detector -> task that Table 2 reports
_METRICS = ("top1", "top5", "AP", "AP50", "AP75")  # columns of the published tables
Candidate = tuple[str, Mapping[str, str], list[str]]  # table, row, and how a score differs from its recipes


class Verdict(NamedTuple):
    """The comparison of a run with a published result.

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
    candidates = list(find_recorded_kind(score.stage).compare_with_papers(score))
    if not candidates:
        return Verdict()
    table, row, reasons = min(candidates, key=lambda candidate: len(candidate[2]))
    more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return Verdict(table, "; ".join(reasons[:3]) + more, None if reasons else row)


def compare_with_linear_rows(score: Score) -> Iterator[Candidate]:
    """Yield the rows of the score's method, architecture and data."""
    config = score.origin.config
    for table, row in _list_rows("linear"):
        if not (row["pretrain"] and row["top1"]):
            continue
        recipe = _load_pretrain_recipe(row["pretrain"], row["overrides"])
        if any(config.get(key) != recipe[key] for key in ("METHOD.NAME", "MODEL.ARCH", "DATA.TRAIN")):
            continue
        test, protocol = _load_probe_recipe(row["pretrain"], row["overrides"], row["linear"])
        reasons = _list_pretraining_differences(score.origin, recipe)
        settings = {"scored on": score.test, **score.protocol}
        yield table, row, reasons + _list_differences(settings, {"scored on": test, **protocol}, "linear ")


def compare_with_detection_rows(score: DetectorScore) -> Iterator[Candidate]:
    """Yield the rows of the score's initialization, backbone and data, and of the task reported for its detector."""
    for table, row in _list_rows("recipe"):
        is_task = row["AP"] and row["task"] == TASKS[score.detector]
        if not is_task or not _is_initialized_from(score.origin, row["pretrain"]):
            continue
        recipe, test = _load_transfer_recipe(row["recipe"], row["overrides"])
        if any(score.protocol.get(key) != recipe[key] for key in ("MODEL.RESNETS.DEPTH", "DATASETS.TRAIN")):
            continue
        pretraining_recipe = _load_pretrain_recipe(row["pretrain"]) if row["pretrain"].endswith(".yaml") else {}
        reasons = _list_pretraining_differences(score.origin, pretraining_recipe)
        yield table, row, reasons + _list_differences({"test": score.test, **score.protocol}, {"test": test, **recipe})


def read_rows(name: str) -> list[dict[str, str]]:
    """Return all rows of the published table with this name, as they are in verdicts."""
    return [row for table, row in _list_rows() if table == name]


def _is_initialized_from(origin: Origin, pretrain: str) -> bool:
    if not pretrain.endswith(".yaml"):
        return origin.method == pretrain
    return origin.config.get("METHOD.NAME") == _load_pretrain_recipe(pretrain)["METHOD.NAME"]


def _list_pretraining_differences(origin: Origin, recipe: Mapping[str, Any]) -> list[str]:
    """Return why a backbone is not the result of a recipe, or ({}) of any finished pretraining."""
    changes = compare(list_keys(), recipe and origin.config, recipe, pretraining.SAME_TRAINING)
    differences = [_describe_difference(change) for change in changes if change.key != "SEED"]
    return ([origin.altered] if origin.altered else []) + differences


def _list_differences(settings: Mapping[str, Any], recipe: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return ``SOLVER.EPOCHS 100 (recipe: 200)`` for each value of ``recipe`` that differs in ``settings``."""
    changes = compare({}, {key: settings[key] for key in recipe if key in settings}, recipe)
    return [prefix + _describe_difference(change) for change in changes]


def _describe_difference(change: Change) -> str:
    actual = "not set" if change.earlier is None else _format_value(change.earlier)
    return f"{change.key} {actual} (recipe: {_format_value(change.current)})"


def _format_value(value: Any) -> str:
    return str(value) if isinstance(value, str) and value else json.dumps(value)


def _list_rows(column: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each row with the table's name of the published tables that have a ``column`` (default: of all)."""
    for table, rows in map(read_table, sorted(FOLDER.glob("*.csv"))):
        yield from ((table, row) for row in rows if not column or column in row)


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
        merge(cfg, list_keys(), ROOT / linear)
    return normalize_protocol("linear", build_linear_protocol(cfg), cfg.LINEAR.ENCODER)


@functools.cache
def _load_transfer_recipe(path: str, overrides: str) -> tuple[dict[str, Any], str]:
    recipe = _flatten_config(load_config(ROOT / path, overrides.split()))
    return normalize_detector_protocol(recipe), recipe["DATASETS.TEST"][0]


def _flatten_config(cfg: Any) -> dict[str, Any]:
    """Return keys and values as a config.yaml has them, with lists instead of tuples."""
    return json.loads(json.dumps(dict(flatten(cfg))))


def build_tables(scores: Sequence[Score]) -> Iterable[Table]:
    """Yield a table, with all its rows, for each published table and engine that has a comparable run."""
    groups: dict[tuple[str, str], list[tuple[Verdict, Score]]] = {}
    for score in scores:
        verdict = find_published(score)
        if verdict.row:
            engine = score.engine if isinstance(score, DetectorScore) else ""
            groups.setdefault((verdict.table, engine), []).append((verdict, score))
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
        cells = [_describe_row(published)]
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
    return Table(f"Published: {name}{f', engine {engine}' if engine else ''}", [], head, rows, notes)


def _average_checkpoints(scores: Iterable[Score], metric: str) -> list[float]:
    """Return the mean of each checkpoint; a detector from random weights counts by itself."""
    values: dict[str, list[float]] = {}
    for score in scores:
        name = f"{TASKS[score.detector]}/{metric}" if isinstance(score, DetectorScore) else metric
        value = score.metrics.get(name)
        if value is not None:
            values.setdefault(score.origin.sha256 or str(score.folder), []).append(value)
    return list(map(fmean, values.values()))


def _describe_row(row: Mapping[str, str]) -> str:
    if "init" in row:
        return f"{TASK_NAMES[row['task']]}: {row['init']}"
    return ", ".join(filter(None, (row["name"], Path(row["pretrain"]).stem, row["overrides"])))
