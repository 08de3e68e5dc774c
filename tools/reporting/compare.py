"""Differences between two runs: config, engine, versions, machine, data, and the step at which their curves diverge."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from pretrain.common.config.yaml_io import flatten
from pretrain.common.files import read_json
from pretrain.common.run import file_names
from pretrain.common.run.metrics import read_metrics

from .files import read_config, read_environment, shorten_names

_DIFFERENT_IN_EVERY_RUN = ("OUTPUT_DIR", "started", "command")  # keys of config.yaml, lines of environment.txt
_NOT_COMPARED = {"iteration", "epoch", "time", "data_time", "eta_seconds", "images_per_second", "data_wait_share"}
_NOT_COMPARED |= {"max_memory_mib", "max_reserved_mib"}
_PLAIN: Any = {"tablefmt": "plain", "disable_numparse": True}
_Values = dict[tuple[int, str], float]  # by iteration and metric


def compare(first: Path, second: Path) -> str:
    """Return the differences between two run folders as text.

    Raises:
        UserError: a folder does not exist or contains no run.
    """
    folders = [Path(os.path.abspath(run)) for run in (first, second)]
    names = [shorten_names(folders)[folder] for folder in folders]
    first_sections = _read_sections(first)
    second_sections = _read_sections(second)
    blocks = [f"{names[0]}: {first}\n{names[1]}: {second}"]
    for title, section in first_sections.items():
        blocks.append(_compare_section(title, names, section, second_sections[title]))
    blocks.append(_compare_curves(names, _read_values(first), _read_values(second)))
    return "\n\n".join(blocks)


def _read_sections(run: Path) -> dict[str, dict[str, Any]]:
    """Map each section's title to what the run recorded: DEVICE as resolved, initial weights by their content."""
    config = {key: value for key, value in read_config(run).items() if key not in _DIFFERENT_IN_EVERY_RUN}
    results = read_json(run / file_names.RESULTS) if (run / file_names.RESULTS).is_file() else {}
    machine = {key: value for key, value in read_environment(run)[-1].items() if key not in _DIFFERENT_IN_EVERY_RUN}
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
    pairs = {key: (first.get(key, "-"), second.get(key, "-")) for key in {**first, **second}}
    rows = [[key, *map(_format_value, pair)] for key, pair in pairs.items() if pair[0] != pair[1]]
    return f"{title}:\n{tabulate(rows, ['', *names], **_PLAIN)}" if rows else f"{title}: equal"


def _compare_curves(names: Sequence[str], first: _Values, second: _Values) -> str:
    """Return, for each metric that both runs logged, the first iteration at which it differs."""
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
    pairs = {point: [_format_value(values[point]) for values in (first, second)] for point in diverged.values()}
    rows = [[metric, str(step + 1), *pair] for (step, metric), pair in pairs.items()]
    table = tabulate(rows, ["", "diverge at step", *names], **_PLAIN)
    return f"curves diverge at step {rows[0][1]}; equal metrics: {len(metrics) - len(rows)} of {len(metrics)}\n{table}"


def _read_values(run: Path) -> _Values:
    """Read the metrics of a run that do not depend on the machine."""
    values: _Values = {}
    for line in read_metrics(run):
        for name in line.keys() - _NOT_COMPARED:
            if isinstance(line[name], (int, float)):
                values[line["iteration"], name] = float(line[name])
    return values


def _format_value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
