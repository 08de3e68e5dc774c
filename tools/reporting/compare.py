"""What distinguishes two runs: config, code, versions, machine and data; and where their curves part."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from pretrain.common.config_io import flatten, parse_yaml
from pretrain.common.errors import UserError
from pretrain.common.metrics import read_metrics
from pretrain.common.run_folder import read_json

_PER_RUN = ("started", "command")  # lines of environment.txt that are different in any two runs
_OF_THE_MACHINE = ("time", "data_time", "eta_seconds", "images_per_second", "data_wait_share")
_DATA = ("train", "val", "test")
_ABSENT = "-"


@dataclass(frozen=True)
class Parting:
    """A metric that both runs logged: where its values differ first, and what it ended with.

    Attributes:
        iteration: from 0; None: it never differs.
        epoch: of that iteration, where the run logs epochs.
        values: of the two runs at that iteration.
        last: of the two runs at the last iteration that both logged.
    """

    metric: str
    iteration: int | None
    epoch: float | None
    values: tuple[float, float]
    last: tuple[float, float]


def compare(one: Path, two: Path) -> str:
    """The differences of two run folders as text.

    Raises:
        UserError: a folder does not exist or holds no run.
    """
    sections = [
        _section("config", _config(one), _config(two)),
        _section("versions and machine", _comparable(environment(one)), _comparable(environment(two))),
        _section("data and weights", _inputs(one), _inputs(two)),
        _section("results", _results(one), _results(two)),
    ]
    return "\n\n".join([f"one: {one}\ntwo: {two}", *sections, _curves(partings(read_metrics(one), read_metrics(two)))])


def _section(title: str, one: Mapping[str, Any], two: Mapping[str, Any]) -> str:
    if not (one or two):
        return f"{title}: neither run has recorded any"
    rows = _differences(one, two)
    return f"{title}:\n{_table(rows, ['', 'one', 'two'])}" if rows else f"{title}: equal"


def partings(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> list[Parting]:
    """For each metric that both runs logged at the same iterations, the first one at which it differs."""
    found = []
    ours, theirs = _by_metric(one), _by_metric(two)
    epochs = {line["iteration"]: line["epoch"] for line in one if isinstance(line.get("epoch"), (int, float))}
    for metric in [name for name in ours if name in theirs]:
        common = [iteration for iteration in ours[metric] if iteration in theirs[metric]]
        if not common:
            continue
        pair = {iteration: (ours[metric][iteration], theirs[metric][iteration]) for iteration in common}
        first = next((iteration for iteration, (a, b) in pair.items() if a != b), None)
        at = common[-1] if first is None else first
        found.append(Parting(metric, first, epochs.get(at), pair[at], pair[common[-1]]))
    return found


def _curves(found: list[Parting]) -> str:
    if not found:
        return "curves: the runs logged no metric at the same iterations"
    parted = [one for one in found if one.iteration is not None]
    if not parted:
        return f"curves: equal in all {len(found)} metrics, at every iteration that both runs logged"
    first = min(parted, key=lambda one: one.iteration or 0)
    epoch = "" if first.epoch is None else f" (epoch {first.epoch:g})"
    numbers = [[(one.iteration or 0) + 1, *one.values, *one.last] for one in parted]
    rows = [[one.metric, *(f"{n:.6g}" for n in row)] for one, row in zip(parted, numbers, strict=True)]
    head = ["", "part at step", "one", "two", "end with: one", "two"]
    text = f"curves: part at step {(first.iteration or 0) + 1}{epoch}\n{_table(rows, head)}"
    equal = len(found) - len(parted)
    return f"{text}\n{equal} further metrics are equal throughout" if equal else text


def _table(rows: list[list[str]], head: list[str]) -> str:
    return tabulate(rows, head, "plain", disable_numparse=True)


def _by_metric(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for line in lines:
        for name, value in line.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_number and name not in ("iteration", "epoch", *_OF_THE_MACHINE):
                found.setdefault(name, {})[line["iteration"]] = float(value)
    return found


def _differences(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[list[str]]:
    names = dict.fromkeys((*one, *two))
    return [
        [name, _text(one.get(name, _ABSENT)), _text(two.get(name, _ABSENT))]
        for name in names
        if one.get(name, _ABSENT) != two.get(name, _ABSENT)
    ]


def _config(run: Path) -> dict[str, Any]:
    if not run.is_dir():
        raise UserError(f"{run} is not a folder; name two run folders")
    path = run / "config.yaml"
    if not path.is_file():
        raise UserError(f"{run} is not a run folder (no config.yaml); name one, such as runs/demo/jcl/pretrain")
    try:
        config = dict(flatten(parse_yaml(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error
    return {key: value for key, value in config.items() if key != "OUTPUT_DIR"}


def environment(run: Path) -> dict[str, str]:
    """The lines of environment.txt, of its last start; {} where there is none."""
    path = run / "environment.txt"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    last = text.rstrip().rpartition("\n\n")[2]
    return dict(re.findall(r"^([\w.-]+)(?:: |=)(.*)$", last, re.MULTILINE))


def _comparable(lines: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in lines.items() if key not in _PER_RUN}


def _inputs(run: Path) -> dict[str, Any]:
    """What results.json records of images and initial weights."""
    results = _read(run / "results.json")
    found: dict[str, Any] = {}
    for section in ("knn_protocol", "protocol"):
        recorded = results.get(section, {})
        if isinstance(recorded, dict):
            found |= {key: value for key, value in recorded.items() if "images" in key or key in _DATA}
    weights = results.get("weights") or results.get("source") or {}
    if isinstance(weights, dict):
        found["weights"] = weights.get("sha256") or weights.get("source_sha256") or weights.get("source")
    return {key: value for key, value in found.items() if value is not None}


def _results(run: Path) -> dict[str, Any]:
    metrics = _read(run / "results.json").get("metrics", {})
    found = dict(flatten(metrics)) if isinstance(metrics, dict) else {}
    return {name: value for name, value in found.items() if ".AP-" not in name}  # of single classes


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
