"""Search for runs below folders, in the order of their pipelines and sweeps, and for stages that are not complete.

A results.json or config.yaml that cannot be read is named in one line and never hides other runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.common.config.yaml_io import parse_yaml
from pretrain.common.errors import UserError
from pretrain.common.files import read_json
from tools.launcher.records import files_below
from tools.launcher.spec import read_fingerprint


@dataclass(frozen=True)
class Run:
    """A run folder (absolute), its results.json, and its config.yaml as nested sections ({} if there is none)."""

    folder: Path
    results: dict[str, Any]
    config: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """A pipeline or sweep; ``stages`` maps run folders to keys such as ``jcl/mask``."""

    folder: Path
    stages: dict[Path, str]


@dataclass
class Collection:
    """Runs, their pipelines and sweeps, and one line for each unreadable file and each incomplete plan."""

    runs: list[Run] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)


def find_runs(folders: Sequence[Path]) -> Collection:
    """Return every run in and below ``folders``, each once.

    Raises:
        UserError: a folder does not exist, or a record of the launcher is damaged.
    """
    collection = Collection()
    files: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder")
        files |= dict.fromkeys(files_below(Path(os.path.abspath(folder)), "launch/pipeline.json", "results.json"))
    for path in files:
        if path.name != "results.json":
            _add_plan(path, collection)
    planned = [folder for plan in collection.plans for folder in plan.stages]
    position = {folder: index for index, folder in enumerate(planned)}
    results = [path for path in files if path.name == "results.json"]
    for path in sorted(results, key=lambda path: position.get(path.parent, len(position))):
        try:
            content = read_json(path)
            config = _read_config(path.parent / "config.yaml", collection.unreadable)
            collection.runs.append(Run(path.parent, content, config))
        except UserError as error:
            collection.unreadable.append(str(error))
    return collection


def shorten_names(folders: Sequence[Path]) -> dict[Path, str]:
    """Map each folder to its path relative to the folder that contains all of them."""
    if not folders:
        return {}
    common = Path(os.path.commonpath(folders))
    base = common.parent if common in folders else common
    return {folder: str(folder.relative_to(base)) for folder in folders}


def _read_config(path: Path, unreadable: list[str]) -> dict[str, Any]:
    try:
        return parse_yaml(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        unreadable.append(f"{path}: {error}; the protocol of this run is unknown")
        return {}


def _add_plan(path: Path, collection: Collection) -> None:
    """Add the pipeline or sweep of a record, even if its folder was moved."""
    plan_folder = path.parents[1]
    stages: dict[Path, str] = {}
    incomplete: list[str] = []
    for stage in read_json(path)["stages"]:
        moved = plan_folder / stage["key"]
        folder = moved if moved.is_dir() else Path(stage["folder"])
        stages[folder] = stage["key"]
        if read_fingerprint(folder) != stage["fingerprint"]:
            incomplete.append(stage["key"])
    collection.plans.append(Plan(plan_folder, stages))
    if incomplete:
        remedy = f"run `python tools/launch.py status {plan_folder}` to see why"
        collection.incomplete.append(f"{plan_folder.name}: {', '.join(incomplete)} ({remedy})")
