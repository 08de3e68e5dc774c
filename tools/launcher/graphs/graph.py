"""A graph of stages as plain data: its nodes, how it is built, and its record in a file."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError, shorten_list
from pretrain.common.files import write_json
from pretrain.common.shell import enter_folder, find_working_folder
from tools.stages.base import Stage
from tools.stages.inputs import hash_content
from tools.stages.registry import build_stage

from ..job_options import JobOptions, from_record
from ..record_formats import (
    LAUNCH_FILE,
    PIPELINE_FILE,
    LaunchRecord,
    PipelineRecord,
    find_launch,
    read_launch,
    read_pipeline,
)

REPORT = "report"  # key of the report, which no other node has


@dataclass(frozen=True)
class Node:
    """A stage of a graph: ``key`` is its display name (``jcl/linear``), ``parents`` are keys of other nodes."""

    key: str
    stage: Stage
    parents: tuple[str, ...] = ()


@dataclass(frozen=True)
class Graph:
    """Stages in an order in which they can run: a pipeline, a sweep, or a single stage.

    Attributes:
        output: the folder that contains all stages; the run folder of a single one.
        report: runs after everything else, even after failures; None for a single stage.
        study: ``{"branches": {name: {seed: folder}}, "baseline": name}``, which the report of a study over seeds reads.
    """

    output: str
    nodes: tuple[Node, ...]
    report: Stage | None = None
    study: dict[str, Any] = field(default_factory=dict)

    @property
    def is_single(self) -> bool:
        """Whether it is one stage that a command has started, rather than a pipeline, which has a report."""
        return self.report is None

    def list_stages(self) -> list[str]:
        """List the names of its kinds of stages."""
        stages = [*(node.stage for node in self.nodes), *([self.report] if self.report else [])]
        return list(dict.fromkeys(stage.name for stage in stages))


def build_graph(output: str, nodes: Sequence[Node], report: Stage, study: dict[str, Any] | None = None) -> Graph:
    """Build a graph, in which each stage knows what it builds on.

    A stage gets its parents' fingerprints and folders, the folder that they share, and the content of the weights
    that no parent writes.

    Raises:
        UserError: two stages would share a key or a folder.
    """
    stages: dict[str, Stage] = {}
    owners: dict[str, str] = {}
    for node in nodes:
        owner = owners.setdefault(node.stage.folder, node.key)
        if owner != node.key or node.key in stages:
            raise UserError(f"{node.key} and {owner} would share {node.stage.folder}; rename one of them")
        stages[node.key] = _link_stage(node, stages, output)
    return Graph(output, tuple(replace(node, stage=stages[node.key]) for node in nodes), report, study or {})


def build_single(stage: Stage) -> Graph:
    """Build a graph of one stage. A stage that was part of a pipeline keeps what it builds on."""
    if stage.inputs:
        stage = replace(stage, inputs=_hash_inputs(stage, set()))
    return Graph(stage.folder, (Node(stage.name, stage),))


def _link_stage(node: Node, stages: Mapping[str, Stage], output: str) -> Stage:
    """Return the stage of ``node`` with what it builds on; ``stages`` contains its parents."""
    fingerprints: dict[str, str] = {}
    folders: dict[str, str] = {}
    products: set[str] = set()
    for key in node.parents:
        parent = stages[key]
        fingerprints[key] = parent.fingerprint()
        folders |= {**parent.folders, key: parent.folder}
        products |= {parent.folder, parent.product}
    inputs = _hash_inputs(node.stage, products)
    return replace(node.stage, root=output, parents=fingerprints, folders=folders, inputs=inputs)


def _hash_inputs(stage: Stage, products: set[str]) -> dict[str, str]:
    """Map each weights file that is not in ``products`` to its content.

    A resumed stage no longer needs its initial weights; if they are gone, the record knows what they were.
    """
    recorded: dict[str, str] = {}
    if stage.has_checkpoint():
        launched = find_launch(Path(stage.folder))
        recorded = launched.spec["inputs"] if launched else {}
    hashes = {path: sha or hash_content(path) for path, sha in stage.inputs.items() if path not in products}
    return {path: sha or recorded.get(path, "") for path, sha in hashes.items()}


def write_graph(graph: Graph, options: JobOptions) -> None:
    """Write the record of a graph for `report`, `status` and `resume`. For a single stage, launch.json is enough."""
    if graph.report is None:
        return
    records = []
    for node in graph.nodes:
        stage = node.stage
        place = {"key": node.key, "stage": stage.name, "folder": stage.folder, "parents": list(node.parents)}
        records.append({**place, "fingerprint": stage.fingerprint(), "spec": stage.to_json()})
    record = PipelineRecord(
        stages=records,
        output=graph.output,
        report=graph.report.to_json(),
        options=asdict(options),
        study=graph.study,
        cwd=find_working_folder(),
    )
    write_json(Path(graph.output) / PIPELINE_FILE, asdict(record))


def find_record(folder: Path) -> Path | None:
    """Return the record of the pipeline or of the single stage in ``folder``."""
    return next((folder / name for name in (PIPELINE_FILE, LAUNCH_FILE) if (folder / name).exists()), None)


@contextlib.contextmanager
def open_graph(file: Path, **changes: str) -> Iterator[tuple[Graph, JobOptions]]:
    """Read a graph and its options, with ``changes``, and work in the folder that it was started in, if it names one.

    What its options and configs name relative to that folder is then found.

    Args:
        file: launch.json of a single stage, or pipeline.json.

    Raises:
        UserError: the record or that folder cannot be used, or nobody knows where relative names are.
    """
    folder = file.absolute().parents[1]
    record = read_pipeline(file) if file.name == PIPELINE_FILE.name else read_launch(folder)
    with _enter_working_folder(record.cwd, folder):
        try:
            options = from_record(record.options, **changes)
            graph = _rebuild(record)
        except (KeyError, TypeError) as error:
            problem = f"{file} is damaged or from another version ({error})"
            raise UserError(f"{problem}; rerun the original command") from error
        if folder.resolve() != Path(graph.output).resolve():
            raise UserError(f"{folder} was moved from {graph.output}; rerun the original command")
        if not record.cwd:
            _check_relative_names(graph)
        yield graph, options


def _rebuild(record: LaunchRecord | PipelineRecord) -> Graph:
    if isinstance(record, LaunchRecord):
        return build_single(build_stage(record.spec))
    nodes = (Node(entry["key"], build_stage(entry["spec"]), tuple(entry["parents"])) for entry in record.stages)
    return Graph(record.output, tuple(nodes), build_stage(record.report), record.study)


@contextlib.contextmanager
def _enter_working_folder(working_folder: str, run: Path) -> Iterator[None]:
    if working_folder in ("", find_working_folder()):
        yield
        return
    if not os.path.isdir(working_folder):
        remedy = "make that folder again, or rerun the original command"
        raise UserError(f"{run} was started in {working_folder}, which is gone; {remedy}")
    print(f"relative names are those of {working_folder}, where {run} was started", file=sys.stderr)
    with enter_folder(working_folder):
        yield


def _check_relative_names(graph: Graph) -> None:
    """Check that the stages of a record without a working folder mean files of this one, if they name any.

    A run or its pipeline lies below the folder that it was started in, unless the user chose another place.
    """
    names = list(dict.fromkeys(name for node in graph.nodes for name in node.stage.list_relative_names()))
    if not names:
        return
    root = Path(graph.nodes[0].stage.root or graph.output)
    is_below = root.resolve().is_relative_to(Path().resolve())
    text = f"the earlier version that started {graph.output} did not record the folder of {shorten_list(names)}"
    if not is_below:
        raise UserError(f"{text}; rerun the original command in that folder")
    print(f"{text}; it is taken for this one", file=sys.stderr)
