"""Stages that build on one another, or a single one: what is checked, shown, and run here or submitted to SLURM.

Complete stages stay, missing ones run, and a failure ends only its own branch.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pretrain.common import interrupt
from pretrain.common.config import extensions
from pretrain.common.errors import UserError
from pretrain.common.files import read_json, write_json
from pretrain.common.run.lock import claim

from . import checks, slurm
from .local_graph import Interrupted, LocalRun, short
from .options import Options, from_record
from .records import new_log_folder
from .spec import StageSpec, content_of, read_record
from .submit import preview, snapshot, submit


@dataclass(frozen=True)
class Node:
    """A stage of a graph: ``key`` names it to people (``jcl/linear``), ``parents`` are keys."""

    key: str
    spec: StageSpec
    parents: tuple[str, ...] = ()


@dataclass(frozen=True)
class Graph:
    """Stages in an order in which they can run, and the folder that holds all of them.

    Each stage's spec is completed by what it builds on: its parents' fingerprints, the folder they share, and the
    content of the weights that no parent makes.

    Attributes:
        kind: pipeline or sweep; stage: a single one, whose folder is ``output``.
        report: runs after everything else, failed or not; None for a single stage.
        facts: whatever the report needs in addition to the stages.
    """

    kind: str
    output: str
    nodes: tuple[Node, ...]
    report: StageSpec | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        specs: dict[str, StageSpec] = {}
        owners: dict[str, str] = {}
        for node in self.nodes:
            spec, parents = node.spec, [specs[parent] for parent in node.parents]
            if owners.setdefault(spec.folder, node.key) != node.key or node.key in specs:
                raise UserError(f"{node.key} and {owners[spec.folder]} would share {spec.folder}; rename one of them")
            if self.kind != "stage":  # which may be one of a pipeline, and then keeps what it builds on
                folders = {key: folder for parent in parents for key, folder in parent.folders.items()}
                folders |= {key: specs[key].folder for key in node.parents}
                fingerprints = {key: specs[key].fingerprint() for key in node.parents}
                spec = replace(spec, root=self.output, parents=fingerprints, folders=folders)
            products = {str(Path(parent.folder, name)) for parent in parents for name in ("", parent.produces)}
            earlier = read_record(Path(spec.folder) / "launch" / "launch.json") if spec.has_checkpoint() else {}
            recorded = earlier.get("spec", {}).get("inputs", {})  # it goes on without its weights, which may be gone
            inputs = {
                path: sha or content_of(path) or recorded.get(path, "")
                for path, sha in spec.inputs.items() if path not in products
            }  # fmt: skip
            specs[node.key] = replace(spec, inputs=inputs)
        object.__setattr__(self, "nodes", tuple(replace(node, spec=specs[node.key]) for node in self.nodes))

    def remember(self, options: Options) -> None:
        """`launch/<kind>.json`: the stages, for `report`, `status` and `resume`."""
        if self.report is None:  # launch.json says it all
            return
        stages = [
            {"key": node.key, "stage": node.spec.stage, "folder": node.spec.folder, "parents": list(node.parents),
             "fingerprint": node.spec.fingerprint(), "spec": node.spec.to_json()}
            for node in self.nodes
        ]  # fmt: skip
        write_json(
            Path(self.output) / "launch" / f"{self.kind}.json",
            {**self.facts, "facts": list(self.facts), "output": self.output, "stages": stages,
             "report": self.report.to_json(), "options": asdict(options)},
        )  # fmt: skip

    @classmethod
    def from_record(cls, path: Path) -> tuple[Graph, Options]:
        """The graph of a launch.json, or that `remember` wrote to ``path``, and the options it was started with."""
        record = read_json(path)
        try:
            if path.name == "launch.json":
                graph = single(StageSpec.from_json(record["spec"]))
            else:
                nodes = tuple(
                    Node(stage["key"], StageSpec.from_json(stage["spec"]), tuple(stage["parents"]))
                    for stage in record["stages"]
                )
                facts, report = {key: record[key] for key in record["facts"]}, StageSpec.from_json(record["report"])
                graph = cls(path.stem, record["output"], nodes, report, facts)
            options = from_record(record["options"])
        except (KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged, or of another version ({error}); run its own command again") from error
        for spec in (*(node.spec for node in graph.nodes), *filter(None, [graph.report])):
            spec.check_entry()
        if (folder := path.absolute().parents[1]).resolve() != Path(graph.output).resolve():
            raise UserError(f"{folder} was at {graph.output} when it was started; run its own command again")
        return graph, options


def single(spec: StageSpec) -> Graph:
    """A graph of one stage."""
    return Graph("stage", spec.folder, (Node(spec.stage, spec),))


def run(graph: Graph, options: Options) -> int:
    """Runs what is missing on this machine, or submits it; returns the exit status.

    Raises:
        UserError: a stage cannot be started, or another process runs or submits the same graph; nothing was started.
    """
    is_slurm = options.cluster == "slurm"
    work = f"submission of the {graph.kind}" if is_slurm else graph.kind  # by which `cancel` finds this process
    with claim(graph.output, work) if graph.report else contextlib.nullcontext():
        return _submit_all(graph, options) if is_slurm else _run_here(graph, options)


def _run_here(graph: Graph, options: Options) -> int:
    missing, _ = checks.check(graph, options)
    if not missing and graph.report is None:
        print(f"{graph.output} is already complete; move it away to run it again")
        return 0
    graph.remember(options)
    try:
        status = LocalRun(graph, options, missing).run()
        if graph.report:
            graph.report.run()
        return status
    except (Interrupted, interrupt.Stopped) as stop:
        words = ["python", "tools/launch.py", "resume", graph.output, *extensions.options()]
        print(f"{stop}\nto continue: {shlex.join(words)}", file=sys.stderr)
        return 130


def _submit_all(graph: Graph, options: Options) -> int:
    """Submits what is missing to SLURM as dependent jobs with one copy of the code; active jobs are left alone.

    Everything is checked before the first job is submitted; if sbatch refuses one, those before it are cancelled.
    """
    missing, jobs = checks.check(graph, options)
    earlier_report = [jobs.pop("report")] if "report" in jobs else []  # the new one waits for it
    for node in graph.nodes:
        if node.key in jobs:
            print(f"{node.key}: job {jobs[node.key]} is already queued or running")
        elif node.key not in missing:
            print(f"{node.key}: already complete")
    graph.remember(options)
    if not missing and not jobs:
        if graph.report:
            graph.report.run()
        return 0
    submitted: list[Any] = []
    code = snapshot(new_log_folder(graph.output)) if graph.report else None  # a single job's lies next to its logs
    try:
        for batch in _batches(graph, missing, jobs):
            dependency = _dependency("afterok", [jobs[key] for node in batch for key in node.parents if key in jobs])
            new = submit([node.spec for node in batch], options, dependency=dependency, code=code)
            submitted += new
            jobs |= {node.key: job.job_id for node, job in zip(batch, new, strict=True)}
            if len(batch) == 1:
                print(f"{batch[0].key}: job {new[0].job_id} {dependency}".rstrip())
            else:
                array, most = new[0].job_id.split("_")[0], options.sbatch_parameters["array_parallelism"]
                print(f"{batch[0].spec.stage}: array {array} of {len(batch)} jobs, at most {most} at once")
        if graph.report:
            dependency = _dependency("afterany", [*jobs.values(), *earlier_report])
            (job,) = submit([graph.report], options, dependency=dependency, code=code)
            print(f"report: job {job.job_id} {dependency}")
    except BaseException:
        for job in submitted:
            with contextlib.suppress(UserError):
                slurm.cancel({"id": job.job_id, "slurm_cluster": options.sbatch.get("clusters", "")})
        if submitted:
            print(f"cancelled the {len(submitted)} jobs that were submitted before the error", file=sys.stderr)
        raise
    print(f"to see the status: python tools/launch.py status {shlex.quote(graph.output)}")
    return 0


def show(graph: Graph, options: Options) -> int:
    """Prints the graph, and the scripts or commands of the stages that can start; returns 2 if one is refused, else 0.

    A stage that builds on a refused one cannot start either.
    """
    missing: dict[str, Node] = {}
    blocked: dict[str, Node] = {}
    refused = 0
    for node in graph.nodes:
        after = f"  after {', '.join(node.parents)}" if node.parents else ""
        state, reason = "complete", ""
        if not node.spec.is_complete():
            state = "missing"
            try:
                checks.check_stage(node, options, download=False)
            except UserError as error:
                state, reason, refused = "refused", f"\n         {error}", refused + 1
            is_blocked = state == "refused" or not blocked.keys().isdisjoint(node.parents)
            (blocked if is_blocked else missing)[node.key] = node
        print(f"{state:<8} {node.key}{after}  -> {short(node.spec.folder)}{reason}")
    if graph.report:
        print(f"missing  report  after everything  -> {short(graph.report.produces)}")
    code = Path(graph.output) / "launch" / "DRY-RUN" / "code"
    for batch in _batches(graph, missing, {}):
        parents = [f"<job of {key}>" for node in batch for key in node.parents if key in missing]
        script = preview([node.spec for node in batch], options, _dependency("afterok", parents), code)
        print(f"\n# {', '.join(node.key for node in batch)}\n{script}")
    unseen = f"; data only where the job runs, for at most {options.minutes} minutes" * (options.cluster == "slurm")
    print(f"\n# {len(missing) + len(blocked)} of {len(graph.nodes)} stages to run, {refused} of them refused")
    print(f"# checked: config, run folder, weights{unseen}")
    return 2 if refused else 0


def _batches(graph: Graph, missing: dict[str, Node], jobs: dict[str, str]) -> Iterator[list[Node]]:
    """Yields what is submitted together: one stage, or an array of a sweep's stages that wait for no other job."""
    waiting = {*missing, *jobs}
    rest = list(missing.values())
    if graph.kind == "sweep":
        ready = [node for node in rest if waiting.isdisjoint(node.parents)]
        rest = [node for node in rest if node not in ready]
        for stage in dict.fromkeys(node.spec.stage for node in ready):
            yield [node for node in ready if node.spec.stage == stage]
    for node in rest:
        yield [node]


def _dependency(kind: str, job_ids: Sequence[str]) -> str:
    return f"{kind}:{':'.join(job_ids)}" if job_ids else ""
