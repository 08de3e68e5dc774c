"""Published results, and whether a run is comparable to one: only if its config is that of the row's recipes."""

from __future__ import annotations

import csv
import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fvcore.common.config import CfgNode

from pretrain import config as pretraining
from pretrain.common.config_io import flatten, merge_file
from pretrain.probe.protocol import protocol
from tools.launcher.spec import ROOT
from transfer.config import OWN, keys, load_config

from .runs import FREE_IN_TRANSFER, Detection, Origin, Probe, probe_protocol

FOLDER = ROOT / "configs" / "papers"
TASKS = {"faster": "bbox", "mask": "segm", "keypoint": "keypoints"}  # what Table 2 reports of each detector
_DETECTION = (FOLDER / "jcl_table2_coco_1x.csv", FOLDER / "moco_voc.csv")
Numbers = dict[str, float | None]


class Verdict(NamedTuple):
    """Whether a run is comparable to a published result.

    Attributes:
        numbers: the paper's; None: not comparable.
        table: ``JCL (Cai et al. 2020), Table 1``; empty: the run is unrelated to any row.
        reason: why it is not comparable.
        row: of the table, if it is comparable.
    """

    numbers: Numbers | None = None
    table: str = ""
    reason: str = ""
    row: Mapping[str, str] | None = None


def linear_result(probe: Probe) -> Verdict:
    """The published top1 and top5 of a linear probe, from the row whose recipe differs least from the run's config."""
    config, best = probe.origin.config, (Verdict(), math.inf)
    for table, row in _linear_rows() if probe.kind == "linear" else ():
        recipe = _pretrain_recipe(row["pretrain"], row["overrides"])
        if any(config.get(key) != recipe[key] for key in ("METHOD.NAME", "MODEL.ARCH", "DATA.TRAIN")):
            continue
        scored_on, protocol = _probe_recipe(row["pretrain"], row["overrides"], row["linear"])
        reasons = [probe.origin.altered] if probe.origin.altered else []
        reasons += _pretraining_differences(config, recipe)
        reasons += _differences({"scored on": probe.scored_on}, {"scored on": scored_on}, "linear ")
        reasons += _differences(probe.protocol, protocol, "linear ")
        if len(reasons) < best[1]:
            best = _verdict(table, row, ("top1", "top5"), reasons), len(reasons)
    return best[0]


def detection_result(run: Detection) -> Verdict:
    """JCL's Table 2 and MoCo's VOC: AP, AP50, AP75 of the task that the paper reports for this detector."""
    if run.evaluated_only:
        return Verdict()
    for table, row in ((table, row) for table, rows in map(read, _DETECTION) for row in rows):
        if not row["AP"] or row["task"] != TASKS[run.detector] or not _starts_from(run.origin, row["pretrain"]):
            continue
        recipe, test = _transfer_recipe(row["recipe"])
        if any(run.protocol.get(key) != recipe[key] for key in ("MODEL.RESNETS.DEPTH", "DATASETS.TRAIN")):
            continue
        reasons = [origin] if (origin := run.origin.altered) else []
        if row["pretrain"].endswith(".yaml"):
            reasons += _pretraining_differences(run.origin.config, _pretrain_recipe(row["pretrain"]))
        reasons += _differences({"test": run.test}, {"test": test}) + _differences(run.protocol, recipe)
        return _verdict(table, row, ("AP", "AP50", "AP75"), reasons)
    return Verdict()


def rows_of(name: str) -> list[dict[str, str]]:
    """All rows of a published table by its name, as verdicts hold them."""
    return next(rows for table, rows in map(read, sorted(FOLDER.glob("*.csv"))) if table == name)


def _verdict(table: str, row: Mapping[str, str], names: Iterable[str], reasons: list[str]) -> Verdict:
    if not reasons:
        return Verdict({name: float(row[name]) if row[name] else None for name in names}, table, row=row)
    more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return Verdict(None, table, "; ".join(reasons[:3]) + more)


def _starts_from(origin: Origin, pretrain: str) -> bool:
    if not pretrain.endswith(".yaml"):
        return origin.method == pretrain
    return origin.config.get("METHOD.NAME") == _pretrain_recipe(pretrain)["METHOD.NAME"]


def _pretraining_differences(config: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[str]:
    free = (*pretraining.FREE_ON_RESUME, "SEED")
    return _differences(config, {key: value for key, value in recipe.items() if not key.startswith(free)})


def _differences(found: Mapping[str, Any], recipe: Mapping[str, Any], prefix: str = "") -> list[str]:
    """``SOLVER.EPOCHS 100 (recipe: 200)`` for each value of ``recipe`` that ``found`` does not have."""
    return [
        f"{prefix}{key} {_text(found[key]) if key in found else 'not set'} (recipe: {_text(value)})"
        for key, value in recipe.items()
        if key not in found or found[key] != value
    ]


def _text(value: Any) -> str:
    return str(value) if isinstance(value, str) and value else json.dumps(value)


def read(file: Path) -> tuple[str, list[dict[str, str]]]:
    """The table's name, which begins its first comment, and its rows."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return lines[0].removeprefix("# ").partition(":")[0], list(csv.DictReader(li for li in lines if li[0] != "#"))


def _linear_rows() -> Iterator[tuple[str, dict[str, str]]]:
    for table, rows in map(read, sorted(FOLDER.glob("*_linear.csv"))):
        yield from ((table, row) for row in rows if row["pretrain"] and row["top1"])


@functools.cache
def _pretrain_config(path: str, overrides: str = "") -> CfgNode:
    return pretraining.load_config(ROOT / path, overrides.split())


@functools.cache
def _pretrain_recipe(path: str, overrides: str = "") -> dict[str, Any]:
    return _plain(_pretrain_config(path, overrides))


@functools.cache
def _probe_recipe(pretrain: str, overrides: str, linear: str) -> tuple[str, dict[str, Any]]:
    """A linear probe's config is its own file over the config of the pretraining, as tools/launch.py linear has it."""
    cfg = _pretrain_config(pretrain, overrides).clone()
    if linear != "own":
        cfg.defrost()
        merge_file(cfg, ROOT / linear)
    return probe_protocol("linear", protocol(cfg, "linear"), cfg.LINEAR.ENCODER)


@functools.cache
def _transfer_recipe(path: str) -> tuple[dict[str, Any], str]:
    recipe = keys(OWN) | _plain(load_config(ROOT / path))
    return {k: v for k, v in recipe.items() if not k.startswith(FREE_IN_TRANSFER)}, recipe["DATASETS.TEST"][0]


def _plain(cfg: Any) -> dict[str, Any]:
    """Keys and values as a config.yaml has them: lists for tuples."""
    return json.loads(json.dumps(dict(flatten(cfg))))
