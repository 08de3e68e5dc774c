"""Differences between two runs: config, engine, versions, machine, data, and the step at which their curves diverge."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from pretrain.common.config.yaml_io import flatten
from pretrain.common.files import read_json
from pretrain.common.run.metrics import read_metrics

from .files import read_config, read_environment, shorten_names

_DIFFERENT_IN_EVERY_RUN = ("OUTPUT_DIR", "started", "command")  # keys of config.yaml, lines of environment.txt
_MACHINE_METRICS = ("time", "data_time", "eta_seconds", "images_per_second", "data_wait_share")
_MACHINE_METRICS += ("max_memory_mib", "max_reserved_mib")


def compare(first: Path, second: Path) -> str:
    """Return the differences between two run folders as text.

    Raises:
        UserError: a folder does not exist or contains no run.
    """
    folders = [Path(os.path.abspath(run)) for run in (first, second)]
    names = [shorten_names(folders)[folder] for folder in folders]
    first_sections = _read_sections(first)
    second_sections = _read_sections(second)
    differences = [
        _compare_section(title, names, section, second_sections[title]) for title, section in first_sections.items()
    ]
    curves = _compare_curves(names, read_metrics(first), read_metrics(second))
    return "\n\n".join([f"{names[0]}: {first}\n{names[1]}: {second}", *differences, curves])


def _read_sections(run: Path) -> dict[str, dict[str, Any]]:
    """Map each section's title to what the run recorded: DEVICE as resolved, initial weights by their content."""
    config = {key: value for key, value in read_config(run).items() if key not in _DIFFERENT_IN_EVERY_RUN}
    results = read_json(run / "results.json") if (run / "results.json").is_file() else {}
    last_start = read_environment(run)[-1]
    machine = {key: value for key, value in last_start.items() if key not in _DIFFERENT_IN_EVERY_RUN}
    if "cpu" in (config.pop("DEVICE", ""), config.pop("MODEL.DEVICE", "")):
        machine["devices"] = "cpu"
    engine = results.get("engine")
    if engine:
        machine = {"engine": f"{engine['name']} {engine['version']}", **machine}
    weights = results.get("weights") or results.get("source") or {}
    for section in ("knn_protocol", "protocol"):
        config |= {key: value for key, value in results.get(section, {}).items() if "images" in key}
    config["initial weights"] = weights.get("sha256") or weights.get("source_sha256") or weights.get("source") or "-"
    metrics = flatten(results.get("metrics", {}))
    scores = {name: value for name, value in metrics if ".AP-" not in name}  # without the AP of each class
    return {"config, data and weights": config, "engine, versions and machine": machine, "results": scores}


def _compare_section(title: str, names: Sequence[str], first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    keys = dict.fromkeys((*first, *second))
    pairs = {key: (first.get(key, "-"), second.get(key, "-")) for key in keys}
    rows = [[key, *map(_format_value, pair)] for key, pair in pairs.items() if pair[0] != pair[1]]
    return f"{title}:\n{_format_table(rows, ['', *names])}" if rows else f"{title}: equal"


def _compare_curves(
    names: Sequence[str], first_lines: Iterable[Mapping[str, Any]], second_lines: Iterable[Mapping[str, Any]]
) -> str:
    """Return, for each metric that both runs logged, the first iteration at which it differs."""
    first = _collect_values(first_lines)
    second = _collect_values(second_lines)
    common = sorted(first.keys() & second.keys())
    metrics = {metric for _, metric in common}
    diverged: dict[str, tuple[int, str]] = {}
    for point in common:
        if first[point] != second[point]:
            diverged.setdefault(point[1], point)
    if not common:
        return "curves: the runs logged no metric at the same iterations"
    if not diverged:
        return f"curves: equal in all {len(metrics)} metrics, at every iteration that both runs logged"
    rows = [
        [metric, str(point[0] + 1), _format_value(first[point]), _format_value(second[point])]
        for metric, point in diverged.items()
    ]
    table = _format_table(rows, ["", "diverge at step", *names])
    return f"curves diverge at step {rows[0][1]}; equal metrics: {len(metrics) - len(rows)} of {len(metrics)}\n{table}"


def _collect_values(lines: Iterable[Mapping[str, Any]]) -> dict[tuple[int, str], float]:
    """Map iteration and metric to the value in ``lines``, without the metrics that depend on the machine."""
    return {
        (line["iteration"], name): float(value)
        for line in lines
        for name, value in line.items()
        if isinstance(value, (int, float)) and name not in ("iteration", "epoch", *_MACHINE_METRICS)
    }


def _format_table(rows: list[list[str]], head: list[str]) -> str:
    return tabulate(rows, head, "plain", disable_numparse=True)


def _format_value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
