"""Finds every run below the given folders, in the order of its pipeline or sweep, and what those did not finish.

A results.json or config.yaml that cannot be read is named in one line and never hides other runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.common.config_io import parse_yaml
from pretrain.common.errors import UserError
from pretrain.common.run_folder import read_json
from tools.launcher.records import files_below
from tools.launcher.spec import read_record


@dataclass(frozen=True)
class Run:
    """A run folder (absolute), its results.json, and its config.yaml as nested sections ({} where there is none)."""

    folder: Path
    results: dict[str, Any]
    config: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """A pipeline or sweep; ``stages`` maps run folders to keys such as ``jcl/mask``."""

    folder: Path
    stages: dict[Path, str]


@dataclass
class Found:
    """Runs, the pipelines and sweeps that they belong to, and lines on what could not be read and is not done."""

    runs: list[Run] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    not_done: list[str] = field(default_factory=list)


def find(folders: Sequence[Path]) -> Found:
    """Every run in and below ``folders``, each once.

    Raises:
        UserError: a folder that does not exist, or a damaged record of the launcher.
    """
    found = Found()
    files: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder")
        names = ("launch/pipeline.json", "launch/sweep.json", "results.json")
        files |= dict.fromkeys(files_below(Path(os.path.abspath(folder)), *names))
    for path in files:
        if path.name != "results.json":
            _add_plan(path, found)
    order = [folder for plan in found.plans for folder in plan.stages]
    position = {folder: place for place, folder in enumerate(order)}
    results = [path for path in files if path.name == "results.json"]
    for path in sorted(results, key=lambda path: position.get(path.parent, len(position))):
        try:
            found.runs.append(Run(path.parent, read_json(path), _config(path.parent / "config.yaml", found.unread)))
        except UserError as error:
            found.unread.append(str(error))
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


def _add_plan(path: Path, found: Found) -> None:
    """Adds the pipeline or sweep of a record, even if its folder was moved."""
    stages: dict[Path, str] = {}
    not_done: list[str] = []
    for stage in read_json(path)["stages"]:
        beside = path.parents[1] / stage["key"]
        folder = beside if beside.is_dir() else Path(stage["folder"])
        stages[folder] = stage["key"]
        if read_record(folder / "launch" / "complete.json").get("fingerprint") != stage["fingerprint"]:
            not_done.append(stage["key"])
    folder = path.parents[1]
    found.plans.append(Plan(folder, stages))
    if not_done:
        status = f"`python tools/launch.py status {folder}` says why"
        found.not_done.append(f"{folder.name}: {', '.join(not_done)} ({status})")
