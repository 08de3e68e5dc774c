"""What distinguishes two runs: config, engine, versions, machine and data; and the step at which their curves part."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tabulate import tabulate

from pretrain.common.config_io import flatten, parse_yaml
from pretrain.common.errors import UserError
from pretrain.common.files import existing_file
from pretrain.common.metrics import read_metrics
from pretrain.common.run_folder import read_json

_PER_RUN = ("started", "command")  # lines of environment.txt that are different in any two runs
_OF_THE_MACHINE = ("time", "data_time", "eta_seconds", "images_per_second", "data_wait_share", "max_memory_mib")


def compare(one: Path, two: Path) -> str:
    """The differences of two run folders as text.

    Raises:
        UserError: a folder does not exist or holds no run.
    """
    sections = [_sections(run) for run in (one, two)]
    differences = [_section(title, sections[0][title], sections[1][title]) for title in sections[0]]
    return "\n\n".join([f"one: {one}\ntwo: {two}", *differences, _curves(read_metrics(one), read_metrics(two))])


def environment(run: Path) -> dict[str, str]:
    """The lines of environment.txt, of its last start; {} where there is none."""
    path = run / "environment.txt"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    last = text.rstrip().rpartition("\n\n")[2]
    return dict(re.findall(r"^([\w.-]+)(?:: |=)(.*)$", last, re.MULTILINE))


def _sections(run: Path) -> dict[str, dict[str, Any]]:
    """Title -> what a run recorded; DEVICE as resolved, and the weights it began with by their content."""
    config = _config(run)
    results = read_json(run / "results.json") if (run / "results.json").is_file() else {}
    machine = {key: value for key, value in environment(run).items() if key not in _PER_RUN}
    if "cpu" in (config.pop("DEVICE", ""), config.pop("MODEL.DEVICE", "")):
        machine["devices"] = "cpu"
    if engine := results.get("engine"):
        machine = {"engine": f"{engine['name']} {engine['version']}", **machine}
    weights = results.get("weights") or results.get("source") or {}
    for section in ("knn_protocol", "protocol"):
        config |= {key: value for key, value in results.get(section, {}).items() if "images" in key}
    config["initial weights"] = weights.get("sha256") or weights.get("source_sha256") or weights.get("source") or "-"
    scores = {name: value for name, value in flatten(results.get("metrics", {})) if ".AP-" not in name}  # of classes
    return {"config, data and weights": config, "engine, versions and machine": machine, "results": scores}


def _config(run: Path) -> dict[str, Any]:
    path = existing_file(run / "config.yaml", "config of a run")
    try:
        config = dict(flatten(parse_yaml(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error
    return {key: value for key, value in config.items() if key != "OUTPUT_DIR"}


def _section(title: str, one: Mapping[str, Any], two: Mapping[str, Any]) -> str:
    pairs = {name: (one.get(name, "-"), two.get(name, "-")) for name in dict.fromkeys((*one, *two))}
    rows = [[name, _text(first), _text(second)] for name, (first, second) in pairs.items() if first != second]
    return f"{title}:\n{_table(rows, ['', 'one', 'two'])}" if rows else f"{title}: equal"


def _curves(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> str:
    """Of each metric that both runs logged, the first iteration at which it differs."""
    ours, theirs = _by_metric(one), _by_metric(two)
    compared, parted = 0, {}
    for metric in ours.keys() & theirs.keys():
        common = sorted(ours[metric].keys() & theirs[metric].keys())
        compared += bool(common)
        different = [iteration for iteration in common if ours[metric][iteration] != theirs[metric][iteration]]
        if different:
            parted[metric] = different[0]
    if not compared:
        return "curves: the runs logged no metric at the same iterations"
    if not parted:
        return f"curves: equal in all {compared} metrics, at every iteration that both runs logged"
    rows = [
        [metric, str(at + 1), _text(ours[metric][at]), _text(theirs[metric][at])]
        for metric, at in sorted(parted.items(), key=lambda item: (item[1], item[0]))
    ]
    table = _table(rows, ["", "part at step", "one", "two"])
    return f"curves: part at step {min(parted.values()) + 1}; {compared - len(parted)} metrics are equal\n{table}"


def _by_metric(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    values: dict[str, dict[int, float]] = {}
    for line in lines:
        for name, value in line.items():
            if isinstance(value, (int, float)) and name not in ("iteration", "epoch", *_OF_THE_MACHINE):
                values.setdefault(name, {})[line["iteration"]] = float(value)
    return values


def _table(rows: list[list[str]], head: list[str]) -> str:
    return tabulate(rows, head, "plain", disable_numparse=True)


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
