"""Finds every run below the given folders, in the order of its pipeline or sweep, and what those did not finish.

A file that cannot be read is named in one line and never hides other files.
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
        not_done: the keys of those that are not complete.
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
        """A line per pipeline or sweep that is not complete."""
        return [
            f"{plan.folder.name}: {', '.join(plan.not_done)} (`python tools/launch.py status {plan.folder}` says why)"
            for plan in self.plans
            if plan.not_done
        ]


def find(folders: Sequence[Path]) -> Found:
    """Every run in and below ``folders``, each once.

    Raises:
        UserError: a folder that does not exist.
    """
    found = Found()
    records: dict[Path, None] = {}
    results: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder")
        folder = Path(os.path.abspath(folder))
        for name in ("pipeline", "sweep"):
            records |= dict.fromkeys(sorted(folder.glob(f"**/launch/{name}.json")))
        below = sorted(folder.glob("**/results.json"))
        results |= dict.fromkeys(path for path in below if "launch" not in path.relative_to(folder).parts)
    for path in records:
        try:
            found.plans.append(_plan(path))
        except UserError as error:
            found.unread.append(str(error))
    order = [folder for plan in found.plans for folder in plan.stages]
    position = {folder: place for place, folder in enumerate(order)}
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


def _plan(path: Path) -> Plan:
    """The pipeline or sweep of a record, even if its folder was moved."""
    stages: dict[Path, str] = {}
    not_done: list[str] = []
    for stage in read_json(path)["stages"]:
        beside = path.parents[1] / stage["key"]
        folder = beside if beside.is_dir() else Path(stage["folder"])
        stages[folder] = stage["key"]
        try:
            is_done = read_json(folder / "launch" / "complete.json")["fingerprint"] == stage["fingerprint"]
        except (KeyError, UserError):
            is_done = False
        if not is_done:
            not_done.append(stage["key"])
    return Plan(path.parents[1], path.name == "sweep.json", stages, not_done)
