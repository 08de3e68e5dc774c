"""What the launcher's records contain: launch.json in each run folder, pipeline.json in the folder of a graph.

In these files, and in the file of a job (`execution.job_file`), a "spec" is the record of a stage: what `Stage.to_json`
writes and `registry.build_stage` reads. "stage" is the name of its kind.

Each has one reader, which returns it as this version writes it, whichever version wrote it. A file of an earlier
version has no number; what it lacks follows from its form:

- A stage whose arguments are a list (`registry.upgrade_stage`) got the time limit of all stages whole. Today it would
  get what it needs, so the limit becomes its own one.
- A record without a working folder does not say where the relative names of its stages are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pretrain.common.errors import UserError
from pretrain.common.files import read_json
from pretrain.common.run import file_names
from tools.stages.registry import find_kind, upgrade_stage

PIPELINE_FILE = Path(file_names.LAUNCH_FOLDER, "pipeline.json")  # in the folder of a graph of several stages
LAUNCH_FILE = Path(file_names.LAUNCH)
VERSION = 1
Record = TypeVar("Record")


@dataclass(frozen=True)
class LaunchRecord:
    """The content of launch.json.

    Attributes:
        spec: the recorded stage.
        options: the fields of `job_options.JobOptions`, as the user asked for them.
        jobs: what `Job.from_record` reads, in the order of the starts.
        command: the last command that started jobs here, except `resume`.
        cwd: the folder in which they were typed; empty if it is not recorded.
    """

    spec: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    jobs: list[dict[str, Any]] = field(default_factory=list)
    command: str = ""
    cwd: str = ""
    version: int = VERSION


@dataclass(frozen=True)
class PipelineRecord:
    """The content of pipeline.json.

    Attributes:
        stages: of each node key, stage (the name of the kind), folder, parents, fingerprint and spec.
        output: the folder when it was started; it may have been moved since.
        study: of `graph.Graph`.
        report, options, cwd: as in `LaunchRecord`; the report is a stage.
    """

    stages: list[dict[str, Any]]
    output: str = ""
    report: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    study: dict[str, Any] = field(default_factory=dict)
    cwd: str = ""
    version: int = VERSION


def read_launch(folder: Path) -> LaunchRecord:
    """Read the launch.json of a run folder; raise UserError if it is missing, damaged or of a newer version."""
    return _read(folder / LAUNCH_FILE, upgrade_launch)


def find_launch(folder: Path) -> LaunchRecord | None:
    """Return the launch.json of a run folder; None if it is missing or cannot be read, which must not stop a job."""
    try:
        return read_launch(folder)
    except UserError:
        return None


def read_pipeline(file: Path) -> PipelineRecord:
    """Read a pipeline.json; raise UserError if it is missing, damaged or of a newer version."""
    return _read(file, upgrade_pipeline)


def upgrade_launch(record: dict[str, Any]) -> LaunchRecord:
    """Return the content of a launch.json of this version or an earlier one."""
    launched = LaunchRecord(**record)
    if "version" in record:
        return launched
    options = _upgrade_options(launched.options, [launched.spec])
    return replace(launched, spec=upgrade_stage(launched.spec), options=options)


def upgrade_pipeline(record: dict[str, Any]) -> PipelineRecord:
    """Return the content of a pipeline.json of this version or an earlier one."""
    pipeline = PipelineRecord(**record)
    if "version" in record:
        return pipeline
    options = _upgrade_options(pipeline.options, [stage["spec"] for stage in pipeline.stages])
    stages = []
    for stage in pipeline.stages:
        spec = upgrade_stage(stage["spec"])
        stages.append({**stage, "stage": spec["stage"], "spec": spec})
    return replace(pipeline, stages=stages, report=upgrade_stage(pipeline.report), options=options)


def _read(file: Path, upgrade: Callable[[dict[str, Any]], Record]) -> Record:
    values = read_json(file)
    version = values.get("version", 0)
    if not isinstance(version, int) or version > VERSION:
        raise UserError(f"{file} is of a newer version of this program ({version!r}); use that version for this folder")
    try:
        return upgrade(values)
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged or from another version ({error}); rerun the original command") from error


def _upgrade_options(options: dict[str, Any], specs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return options in which stages that got the time limit whole have it as their own."""
    time = options.get("time", "")
    names = dict.fromkeys(upgrade_stage(spec)["stage"] for spec in specs if "args" in spec)
    if not time or not names:
        return options
    has_cpu_limit = "time" in options["cpu"]
    limits = [f"{name}={time}" for name in names if find_kind(name).gpu or not has_cpu_limit]
    return {**options, "time": ",".join([time, *limits])}
