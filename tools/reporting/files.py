"""Finds every run below the given folders, in the order of its pipeline or sweep, and what those did not finish.

A file that cannot be read is named in one line and never hides other files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from pretrain.common.config_io import flatten, parse_yaml
from pretrain.common.errors import UserError
from pretrain.common.run_folder import json_text, read_json


@dataclass(frozen=True)
class Run:
    """A run folder (absolute), its results.json, and its config.yaml as nested sections ({} where there is none)."""

    folder: Path
    results: dict[str, Any]
    config: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """A pipeline or sweep.

    Attributes:
        stages: run folder -> key, ``jcl/mask``.
        not_done: a line per stage.
    """

    folder: Path
    is_sweep: bool
    stages: dict[Path, str]
    not_done: list[str]


@dataclass
class Found:
    """Runs, the pipelines and sweeps that they belong to, and a line per file that could not be read."""

    runs: list[Run] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    @property
    def not_done(self) -> list[str]:
        """A line per stage that is not done; it names the pipeline where there are several."""
        several = len(self.plans) > 1
        return [f"{plan.folder.name}/{line}" if several else line for plan in self.plans for line in plan.not_done]


def find(folders: Sequence[Path]) -> Found:
    """Every run in and below ``folders``, each once.

    Raises:
        UserError: a folder that does not exist.
    """
    found = Found()
    order: list[Path] = []
    graphs: dict[Path, None] = {}
    results: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder")
        folder = Path(os.path.abspath(folder))
        graphs |= dict.fromkeys(sorted(folder.glob("**/launch/pipeline.json")))
        graphs |= dict.fromkeys(sorted(folder.glob("**/launch/sweep.json")))
        found_here = sorted(folder.glob("**/results.json"))
        results |= dict.fromkeys(path for path in found_here if "launch" not in path.relative_to(folder).parts)
    for path in graphs:
        try:
            stages = _stages(path)
        except UserError as error:
            found.unread.append(str(error))
            continue
        order += stages
        keys = {folder: stage["key"] for folder, stage in stages.items()}
        plan = Plan(path.parents[1], path.name == "sweep.json", keys, list(_not_done(stages)))
        found.plans.append(plan)
    position = {folder: place for place, folder in enumerate(order)}
    for path in sorted(results, key=lambda path: position.get(path.parent, len(position))):
        try:
            content = read_json(path)
        except UserError as error:
            found.unread.append(str(error))
            continue
        for name in [name for name, value in flatten(content) if isinstance(value, float) and not isfinite(value)]:
            found.unread.append(f"{path}: {name} is not finite and is shown as '-'")
        content = json.loads(json_text(content))  # which has null for what is not finite
        found.runs.append(Run(path.parent, content, _config(path.parent / "config.yaml", found.unread)))
    return found


def short_names(folders: Sequence[Path]) -> dict[Path, str]:
    """Maps each folder to its path relative to the folder that holds all of them."""
    if not folders:
        return {}
    common = Path(os.path.commonpath(folders))
    base = common.parent if common in folders else common
    return {folder: str(folder.relative_to(base)) for folder in folders}


def _config(path: Path, unread: list[str]) -> dict[str, Any]:
    try:
        return parse_yaml(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        unread.append(f"{path}: {error}; the protocol of this run is unknown")
        return {}


def _stages(path: Path) -> dict[Path, dict[str, Any]]:
    """Run folder -> stage, as launch/pipeline.json or launch/sweep.json has them.

    They are found wherever the plan's folder is now.

    Raises:
        UserError: the file is damaged.
    """
    stages: dict[Path, dict[str, Any]] = {}
    try:
        for stage in read_json(path)["stages"]:
            if not all(isinstance(stage[word], str) for word in ("key", "folder", "produces", "fingerprint")):
                raise TypeError
            beside = path.parents[1] / stage["key"]
            stages[beside if beside.is_dir() else Path(stage["folder"])] = stage | {"parents": list(stage["parents"])}
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} lists no stages; start its pipeline or sweep again to rewrite it") from error
    return stages


def _not_done(stages: dict[Path, dict[str, Any]]) -> Iterable[str]:
    """What a pipeline or sweep did not finish, with the last failing rank's error where there is one."""
    broken: set[str] = set()
    for run, stage in stages.items():
        product = run / os.path.relpath(Path(stage["folder"]) / stage["produces"], stage["folder"])
        try:
            mark = read_json(run / "launch" / "complete.json").get("fingerprint")
        except UserError:
            mark = None
        if mark == stage["fingerprint"] and (product.exists() or (run / stage["produces"]).exists()):
            continue
        parent = next((parent for parent in stage["parents"] if parent in broken), None)
        broken.add(stage["key"])
        reason = f"skipped, because {parent} is not done" if parent else _last_error(run)
        yield f"{stage['key']}: {reason or 'not started, or stopped'}"


def _last_error(run: Path) -> str:
    failed = sorted((run / "launch" / "ranks").glob("*.failed"), key=lambda path: path.stat().st_mtime)
    if not failed:
        return ""
    try:
        failures = [read_json(path) for path in failed]
    except UserError as error:
        return f"failed; {error}"
    failure = next((one for one in reversed(failures) if not one.get("followed")), failures[-1])
    return f"failed on rank {failure.get('rank')}: {failure.get('error')}"
