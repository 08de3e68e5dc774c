"""Published results, and whether a run is comparable to one: only if its config is that of the row's recipes."""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pretrain.common.config_io import flatten, merge_file

from .runs import FREE_IN_TRANSFER, Detection, Origin, Probe, as_recorded, probe_protocol

ROOT = Path(__file__).resolve().parents[2]
TASKS = {"faster": "bbox", "mask": "segm", "keypoint": "keypoints"}  # what Table 2 reports of each detector
Numbers = dict[str, float | None]
# The paper's numbers, or None and why they are not comparable; an empty reason: the run is unrelated to any row.
Verdict = tuple[Numbers | None, str]


def table_1(origin: Origin, probe: Probe) -> Verdict:
    """JCL's Table 1: top1 and top5 of a linear probe on ImageNet-1K."""
    config = origin.config
    for row in _rows("jcl_table1_linear.csv"):
        if not row["pretrain"]:
            continue
        recipe = _pretrain_recipe(row["pretrain"])
        if any(config.get(key) != recipe[key] for key in ("METHOD.NAME", "MODEL.ARCH", "DATA.TRAIN")):
            continue
        scored_on, protocol = _probe_recipe(row["pretrain"], row["linear"])
        reasons = [origin.altered] if origin.altered else []
        reasons += _pretraining_differences(config, recipe)
        reasons += _differences({"scored on": probe.scored_on}, {"scored on": scored_on}, "linear ")
        reasons += _differences(probe.protocol, protocol, "linear ")
        return _verdict(row, ("top1", "top5"), reasons)
    return None, ""


def table_2(run: Detection) -> Verdict:
    """JCL's Table 2: AP, AP50, AP75 of the task that the paper reports for this detector."""
    rows = [] if run.evaluated_only else _rows("jcl_table2_coco_1x.csv")
    for row in rows:
        if row["task"] != TASKS[run.detector] or not _starts_from(run.origin, row["pretrain"]):
            continue
        recipe, test = _transfer_recipe(row["recipe"])
        if any(run.protocol.get(key) != recipe[key] for key in ("MODEL.RESNETS.DEPTH", "DATASETS.TRAIN")):
            continue
        reasons = [origin] if (origin := run.origin.altered) else []
        if row["pretrain"].endswith(".yaml"):
            reasons += _pretraining_differences(run.origin.config, _pretrain_recipe(row["pretrain"]))
        reasons += _differences({"test": run.test}, {"test": test}) + _differences(run.protocol, recipe)
        return _verdict(row, ("AP", "AP50", "AP75"), reasons)
    return None, ""


def _verdict(row: Mapping[str, str], names: Iterable[str], reasons: list[str]) -> Verdict:
    if not reasons:
        return {name: float(row[name]) if row[name] else None for name in names}, ""
    more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return None, "; ".join(reasons[:3]) + more


def _starts_from(origin: Origin, pretrain: str) -> bool:
    if pretrain.startswith("sha256:"):
        return origin.sha256.startswith(pretrain.removeprefix("sha256:"))
    if pretrain == "random":
        return origin.method == "random"
    return origin.config.get("METHOD.NAME") == _pretrain_recipe(pretrain)["METHOD.NAME"]


def _pretraining_differences(config: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[str]:
    from pretrain.config import FREE_ON_RESUME

    return _differences(config, {k: v for k, v in recipe.items() if not k.startswith((*FREE_ON_RESUME, "SEED"))})


def _differences(found: Mapping[str, Any], recipe: Mapping[str, Any], prefix: str = "") -> list[str]:
    """``SOLVER.EPOCHS 100 (recipe: 200)`` for each value of ``recipe`` that ``found`` does not have."""
    return [
        f"{prefix}{key} {_text(found[key]) if key in found else 'not set'} (recipe: {_text(value)})"
        for key, value in recipe.items()
        if key not in found or found[key] != value
    ]


def _text(value: Any) -> str:
    return str(value) if isinstance(value, str) and value else json.dumps(value)


def _rows(file: str) -> list[dict[str, str]]:
    with open(ROOT / "configs" / "papers" / file, newline="") as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


@functools.cache
def _pretrain_recipe(path: str) -> dict[str, Any]:
    from pretrain.config import load_config

    return _plain(load_config(ROOT / path))


@functools.cache
def _probe_recipe(pretrain: str, linear: str) -> tuple[str, dict[str, Any]]:
    """A linear probe's config is its own file over the config of the pretraining, as tools/launch.py linear has it."""
    from pretrain.config import load_config

    cfg = load_config(ROOT / pretrain).clone()
    cfg.defrost()
    merge_file(cfg, ROOT / linear)
    return probe_protocol("linear", as_recorded("linear", cfg), cfg.LINEAR.ENCODER)


@functools.cache
def _transfer_recipe(path: str) -> tuple[dict[str, Any], str]:
    from transfer.config import load_config

    recipe = _plain(load_config(ROOT / path))
    return {k: v for k, v in recipe.items() if k not in FREE_IN_TRANSFER}, recipe["DATASETS.TEST"][0]


def _plain(cfg: Any) -> dict[str, Any]:
    """Keys and values as a config.yaml has them: lists for tuples."""
    return json.loads(json.dumps(dict(flatten(cfg))))
