"""Search for runs below folders, in the order of their pipelines and sweeps, and for stages that are not complete.

A results.json or config.yaml that cannot be read is named in one line and never hides other runs.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pretrain.common.config.yaml_io import flatten, parse_yaml
from pretrain.common.errors import UserError
from pretrain.common.files import check_file, read_json
from pretrain.common.run import file_names
from tools.data import DUPLICATES_FILE
from tools.launcher.execution.records import find_files
from tools.launcher.record_formats import PIPELINE_FILE, read_pipeline
from tools.stages.completion import read_fingerprint


@dataclass(frozen=True)
class Run:
    """A run folder (absolute), its results.json, and the keys of its config.yaml ({} if there is none)."""

    folder: Path
    results: dict[str, Any]
    config: dict[str, Any]


class Place(NamedTuple):
    """The place of a run in a pipeline: ``jcl_seed=1/mask`` is branch jcl, seed 1 and stage mask."""

    branch: str
    seed: str
    stage: str


@dataclass(frozen=True)
class Pipeline:
    """A pipeline or sweep, as the launcher recorded it.

    Attributes:
        stages: the place of each run folder, in the order of the file.
        seeds: all seeds that the file lists, complete or not; empty if it lists none.
        baseline: the branch that others are compared with; empty if there is none.
        incomplete: the run folders whose stage is not complete as the file describes it. Their results, if any, are
            those of other settings.
    """

    folder: Path
    stages: Mapping[Path, Place]
    seeds: Sequence[str] = ()
    baseline: str = ""
    incomplete: frozenset[Path] = frozenset()


@dataclass
class RunCollection:
    """Runs, pipelines and sweeps, and one line for each unreadable file and incomplete pipeline.

    Attributes:
        duplicates: tables of test images that are nearly training images; ``unused`` has a line for each that is about
            no run, ``not_drawn`` one for each figure that would be empty.
    """

    runs: list[Run] = field(default_factory=list)
    pipelines: list[Pipeline] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    duplicates: list[Path] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    not_drawn: list[str] = field(default_factory=list)


def find_runs(folders: Sequence[Path]) -> RunCollection:
    """Return every run in and below ``folders``, each once, also if links lead to it.

    Raises:
        UserError: a folder does not exist.
    """
    collection = RunCollection()
    files: dict[str, Path] = {}  # by their real paths
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder; pass a run folder or a folder of runs")
        for path in find_files(Path(os.path.abspath(folder)), str(PIPELINE_FILE), file_names.RESULTS, DUPLICATES_FILE):
            files.setdefault(os.path.realpath(path), path)
    collection.duplicates = [path for path in files.values() if path.name == DUPLICATES_FILE]
    for path in files.values():
        if path.name == PIPELINE_FILE.name:
            try:
                collection.pipelines.append(_read_pipeline(path, collection.incomplete))
            except UserError as error:
                collection.unreadable.append(str(error))
    run_folders = {
        os.path.dirname(real): path.parent for real, path in files.items() if path.name == file_names.RESULTS
    }
    planned = {os.path.realpath(folder): folder for pipeline in collection.pipelines for folder in pipeline.stages}
    planned = {real: folder for real, folder in planned.items() if real in run_folders}
    for folder in (planned | {real: path for real, path in run_folders.items() if real not in planned}).values():
        try:
            results = read_json(folder / file_names.RESULTS)
        except UserError as error:
            collection.unreadable.append(str(error))
            continue
        config: dict[str, Any] = {}
        try:
            config = read_config(folder) if (folder / file_names.CONFIG).exists() else {}
        except UserError as error:
            collection.unreadable.append(f"{error}; the protocol of this run is unknown")
        collection.runs.append(Run(folder, results, config))
    return collection


def read_config(run: Path) -> dict[str, Any]:
    """Return the keys of a run's config.yaml, ``{"SOLVER.EPOCHS": 200, ...}``; raise UserError if it is damaged."""
    path = check_file(run / file_names.CONFIG, "config of a run")
    try:
        return dict(flatten(parse_yaml(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error


def read_environment(run: Path) -> list[dict[str, str]]:
    """Read the records of environment.txt, one for each start of a run, in order; one empty record if none."""
    path = run / file_names.ENVIRONMENT
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [dict(re.findall(r"^([\w.-]+)(?:: |=)(.*)$", start, re.MULTILINE)) for start in text.rstrip().split("\n\n")]


def shorten_names(folders: Sequence[Path]) -> dict[Path, str]:
    """Map each folder to its path relative to the folder that contains all of them."""
    if not folders:
        return {}
    common = Path(os.path.commonpath(folders))
    base = common.parent if common in folders else common
    return {folder: str(folder.relative_to(base)) for folder in folders}


def _read_pipeline(path: Path, lines: list[str]) -> Pipeline:
    """Read the record of a pipeline or sweep, even if its folder was moved; ``lines`` gets one if it is incomplete."""
    pipeline_folder = path.parents[1]
    record = read_pipeline(path)
    plan = record.study or {"branches": {}, "baseline": ""}
    places = {name: (branch, seed) for branch, names in plan["branches"].items() for seed, name in names.items()}
    stages: dict[Path, Place] = {}
    incomplete: dict[Path, str] = {}
    for stage in record.stages:
        moved = pipeline_folder / stage["key"]
        folder = moved if moved.is_dir() else Path(stage["folder"])
        branch, _, name = stage["key"].partition("/")
        stages[folder] = Place(*places.get(branch, (branch.partition("_seed=")[0], "")), name)
        if read_fingerprint(folder) != stage["fingerprint"]:
            incomplete[folder] = stage["key"]
    if incomplete:
        remedy = f"run `python tools/launch.py status {pipeline_folder}` to see why"
        lines.append(f"{pipeline_folder.name}: {', '.join(incomplete.values())} ({remedy})")
    seeds = list(dict.fromkeys(seed for _, seed in places.values()))
    return Pipeline(pipeline_folder, stages, seeds, plan["baseline"], frozenset(incomplete))
