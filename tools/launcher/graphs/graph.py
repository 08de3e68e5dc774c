"""A graph of stages as plain data: its nodes, how it is built, and its record in a file."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError
from pretrain.common.files import read_json, write_json
from pretrain.common.run.state import enter_folder, find_working_folder, read_json_or_empty
from tools.stages.base import Stage
from tools.stages.inputs import hash_content
from tools.stages.registry import build_stage

from ..options import Options, from_record

REPORT = "report"  # key of the report, which no other node has
PIPELINE_FILE = Path("launch", "pipeline.json")  # in the folder of a graph of several stages


@dataclass(frozen=True)
class Node:
    """A stage of a graph: ``key`` is its display name (``jcl/linear``), ``parents`` are keys of other nodes."""

    key: str
    spec: Stage
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
        return self.report is None


def build_graph(output: str, nodes: Sequence[Node], report: Stage, study: dict[str, Any] | None = None) -> Graph:
    """Build a graph, and complete the spec of each stage by what the stage builds on.

    A spec gets its parents' fingerprints and folders, the folder that they share, and the content of the weights
    that no parent writes.

    Raises:
        UserError: two stages would share a key or a folder.
    """
    specs: dict[str, Stage] = {}
    owners: dict[str, str] = {}
    for node in nodes:
        owner = owners.setdefault(node.spec.folder, node.key)
        if owner != node.key or node.key in specs:
            raise UserError(f"{node.key} and {owner} would share {node.spec.folder}; rename one of them")
        specs[node.key] = _complete_spec(node, specs, output)
    return Graph(output, tuple(replace(node, spec=specs[node.key]) for node in nodes), report, study or {})


def build_single(spec: Stage) -> Graph:
    """Build a graph of one stage. A stage that was part of a pipeline keeps what it builds on."""
    if spec.inputs:
        spec = replace(spec, inputs=_hash_inputs(spec, set()))
    return Graph(spec.folder, (Node(spec.name, spec),))


def _complete_spec(node: Node, specs: Mapping[str, Stage], output: str) -> Stage:
    """Add to the spec of ``node`` what it builds on; ``specs`` contains its parents."""
    fingerprints: dict[str, str] = {}
    folders: dict[str, str] = {}
    products: set[str] = set()
    for key in node.parents:
        parent = specs[key]
        fingerprints[key] = parent.fingerprint()
        folders |= {**parent.folders, key: parent.folder}
        products |= {parent.folder, parent.product}
    inputs = _hash_inputs(node.spec, products)
    return replace(node.spec, root=output, parents=fingerprints, folders=folders, inputs=inputs)


def _hash_inputs(spec: Stage, products: set[str]) -> dict[str, str]:
    """Map each weights file that is not in ``products`` to its content.

    A resumed stage no longer needs its initial weights; if they are gone, the record knows what they were.
    """
    recorded: dict[str, str] = {}
    if spec.has_checkpoint():
        recorded = read_json_or_empty(Path(spec.folder) / "launch" / "launch.json").get("spec", {}).get("inputs", {})
    hashes = {path: sha or hash_content(path) for path, sha in spec.inputs.items() if path not in products}
    return {path: sha or recorded.get(path, "") for path, sha in hashes.items()}


def write_graph(graph: Graph, options: Options) -> None:
    """Write the record of a graph for `report`, `status` and `resume`. For a single stage, launch.json is enough."""
    if graph.report is None:
        return
    stages = []
    for node in graph.nodes:
        spec = node.spec
        place = {"key": node.key, "stage": spec.name, "folder": spec.folder, "parents": list(node.parents)}
        stages.append({**place, "fingerprint": spec.fingerprint(), "spec": spec.to_json()})
    record = {"output": graph.output, "cwd": find_working_folder(), "study": graph.study, "stages": stages}
    write_json(
        Path(graph.output) / PIPELINE_FILE, {**record, "report": graph.report.to_json(), "options": asdict(options)}
    )


def find_record(folder: Path) -> Path | None:
    """Return the record of the pipeline or of the single stage in ``folder``."""
    return next((folder / name for name in (PIPELINE_FILE, "launch/launch.json") if (folder / name).exists()), None)


@contextlib.contextmanager
def enter_working_folder(record: Path) -> Iterator[None]:
    """Work in the folder that the stages of a launch.json or pipeline.json were started in, where it names one.

    What their options and configs name relative to it is then found.
    """
    folder = read_json(record).get("cwd", "")
    if folder in ("", find_working_folder()):
        yield
        return
    if not os.path.isdir(folder):
        remedy = "make that folder again, or rerun the original command"
        raise UserError(f"{record.parents[1]} was started in {folder}, which is gone; {remedy}")
    print(f"relative names are those of {folder}, where {record.parents[1]} was started", file=sys.stderr)
    with enter_folder(folder):
        yield


def read_graph(path: Path, **changes: str) -> tuple[Graph, Options]:
    """Read the graph of a launch.json, or of a file of `write_graph`, and its options, with ``changes``."""
    record = read_json(path)
    try:
        options = from_record(record["options"], **changes)
        if path.name == PIPELINE_FILE.name:
            nodes = tuple(
                Node(stage["key"], build_stage(stage["spec"]), tuple(stage["parents"])) for stage in record["stages"]
            )
            graph = Graph(record["output"], nodes, build_stage(record["report"]), record["study"])
        else:
            graph = build_single(build_stage(record["spec"]))
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged or from another version ({error}); rerun the original command") from error
    folder = path.absolute().parents[1]
    if folder.resolve() != Path(graph.output).resolve():
        raise UserError(f"{folder} was moved from {graph.output}; rerun the original command")
    return graph, options
