"""Differences between two runs: config, engine, versions, machine, data, and the step at which their curves diverge."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from pretrain.common.config.yaml_io import flatten, parse_yaml
from pretrain.common.errors import UserError
from pretrain.common.files import existing_file, read_json
from pretrain.common.run.metrics import read_metrics

from .files import shorten_names

_DIFFERENT_IN_EVERY_RUN = ("started", "command")  # lines of environment.txt
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


def read_environment(run: Path) -> dict[str, str]:
    """Return what environment.txt records of the last start of a run, or {} if there is no such file."""
    path = run / "environment.txt"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    last_start = text.rstrip().rpartition("\n\n")[2]
    return dict(re.findall(r"^([\w.-]+)(?:: |=)(.*)$", last_start, re.MULTILINE))


def _read_sections(run: Path) -> dict[str, dict[str, Any]]:
    """Map each section's title to what the run recorded: DEVICE as resolved, initial weights by their content."""
    config = _read_config(run)
    results = read_json(run / "results.json") if (run / "results.json").is_file() else {}
    environment = read_environment(run)
    machine = {key: value for key, value in environment.items() if key not in _DIFFERENT_IN_EVERY_RUN}
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


def _read_config(run: Path) -> dict[str, Any]:
    path = existing_file(run / "config.yaml", "config of a run")
    try:
        config = dict(flatten(parse_yaml(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error
    return {key: value for key, value in config.items() if key != "OUTPUT_DIR"}


def _compare_section(title: str, names: Sequence[str], first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    keys = dict.fromkeys((*first, *second))
    pairs = {key: (first.get(key, "-"), second.get(key, "-")) for key in keys}
    rows = [[key, *map(_format_value, pair)] for key, pair in pairs.items() if pair[0] != pair[1]]
    return f"{title}:\n{_format_table(rows, ['', *names])}" if rows else f"{title}: equal"


def _compare_curves(
    names: Sequence[str], first_lines: Iterable[Mapping[str, Any]], second_lines: Iterable[Mapping[str, Any]]
) -> str:
    """Return, for each metric that both runs logged, the first iteration at which it differs."""
    first = _group_by_metric(first_lines)
    second = _group_by_metric(second_lines)
    compared = 0
    diverged: dict[str, int] = {}
    for metric in first.keys() & second.keys():
        common = sorted(first[metric].keys() & second[metric].keys())
        compared += bool(common)
        different = [iteration for iteration in common if first[metric][iteration] != second[metric][iteration]]
        if different:
            diverged[metric] = different[0]
    if not compared:
        return "curves: the runs logged no metric at the same iterations"
    if not diverged:
        return f"curves: equal in all {compared} metrics, at every iteration that both runs logged"
    rows = [
        [metric, str(at + 1), _format_value(first[metric][at]), _format_value(second[metric][at])]
        for metric, at in sorted(diverged.items(), key=lambda item: (item[1], item[0]))
    ]
    table = _format_table(rows, ["", "diverge at step", *names])
    equal = f"equal metrics: {compared - len(diverged)} of {compared}"
    return f"curves diverge at step {min(diverged.values()) + 1}; {equal}\n{table}"


def _group_by_metric(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Return metric -> iteration -> value of the logged ``lines``, without the metrics that depend on the machine."""
    values: dict[str, dict[int, float]] = {}
    for line in lines:
        for name, value in line.items():
            if isinstance(value, (int, float)) and name not in ("iteration", "epoch", *_MACHINE_METRICS):
                values.setdefault(name, {})[line["iteration"]] = float(value)
    return values


def _format_table(rows: list[list[str]], head: list[str]) -> str:
    return tabulate(rows, head, "plain", disable_numparse=True)


def _format_value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
