"""Stages that build on one another: complete ones stay, missing ones run, and a failure ends only its own branch."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pretrain.common import interrupt
from pretrain.common.errors import UserError
from pretrain.common.lock import claim, start_of
from pretrain.common.run_folder import write_json

from . import attach, control
from .checks import refuse_indivisible
from .local_graph import LocalGraph, short
from .options import Options
from .spec import StageSpec
from .submit import Refused, new_log_folder, refuse_if_running, snapshot, submit
from .submit import preview as preview_script


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
        kind: pipeline or sweep.
        report: runs after everything else, failed or not.
        file: the YAML file that describes it, absolute.
        facts: whatever the report needs beside the stages.

    Raises:
        UserError: two stages would share a folder.
    """

    kind: str
    output: str
    nodes: tuple[Node, ...]
    report: StageSpec
    file: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        specs: dict[str, StageSpec] = {}
        owners: dict[str, str] = {}
        for node in self.nodes:
            spec, parents = node.spec, [specs[parent] for parent in node.parents]
            if owners.setdefault(spec.folder, node.key) != node.key or node.key in specs:
                raise UserError(f"{node.key} and {owners[spec.folder]} would share {spec.folder}; rename one of them")
            made = {path for parent in parents for path in (parent.folder, str(Path(parent.folder) / parent.produces))}
            specs[node.key] = replace(
                spec,
                root=self.output,
                parents={key: specs[key].fingerprint() for key in node.parents},
                inputs={path: content for path, content in spec.inputs.items() if path not in made},
            )
        object.__setattr__(self, "nodes", tuple(replace(node, spec=specs[node.key]) for node in self.nodes))

    def remember(self, options: Options, *, running: bool = False) -> None:
        """`launch/<kind>.json`: the stages, for `report` and `status`; file and options, for `resume`.

        Args:
            running: this process runs the stages one after the other; `cancel` finds it by the record's ``runner``.
        """
        stages = [
            {"key": node.key, "stage": node.spec.stage, "folder": node.spec.folder, "parents": list(node.parents),
             "produces": node.spec.produces, "fingerprint": node.spec.fingerprint()}
            for node in self.nodes
        ]  # fmt: skip
        runner = {"host": socket.gethostname(), "pid": os.getpid(), "started": start_of(os.getpid())}
        write_json(
            Path(self.output) / "launch" / f"{self.kind}.json",
            {**self.facts, "file": self.file, "options": asdict(options), "stages": stages}
            | ({"runner": runner} if running else {}),
        )


def run(graph: Graph, options: Options) -> int:
    """Runs what is missing on this machine, or submits it; returns the exit status.

    Raises:
        UserError: a stage cannot be started, or another process runs or submits the same graph; nothing was started.
    """
    with claim(graph.output, graph.kind):
        return submit_all(graph, options) if options.cluster == "slurm" else run_locally(graph, options)


def run_locally(graph: Graph, options: Options) -> int:
    """Runs what is missing on this machine; returns the exit status.

    SIGTERM or Ctrl-C stops the running stages after a checkpoint, and no other stage is started.
    """
    missing, _ = _check(graph, options)
    graph.remember(options, running=True)
    try:
        with interrupt.handled():
            status = LocalGraph(graph, options, missing).run()
            graph.report.run()
            return status
    except (attach.Interrupted, interrupt.Stopped) as stop:
        print(f"{stop}\nto continue: python tools/launch.py resume {shlex.quote(graph.output)}", file=sys.stderr)
        return 130
    finally:
        graph.remember(options)


def submit_all(graph: Graph, options: Options) -> int:
    """Submits what is missing to SLURM as dependent jobs with one copy of the code; active jobs are left alone.

    Everything is checked before the first job is submitted; if sbatch refuses one, those before it are cancelled.
    """
    missing, jobs = _check(graph, options)
    for node in graph.nodes:
        if node.key in jobs:
            print(f"{node.key}: job {jobs[node.key]} is already queued or running")
        elif node.key not in missing:
            print(f"{node.key}: already complete")
    graph.remember(options)
    earlier_report = _active_job(graph.report)  # the new one waits for it: both write the same file
    if not missing and not jobs:
        graph.report.run()
        return 0
    submitted: list[Any] = []
    code = snapshot(new_log_folder(graph.output))
    try:
        for batch in _batches(graph, missing, jobs):
            for node in batch:
                node.spec.mark("begun")
            parents = [jobs[parent] for node in batch for parent in node.parents if parent in jobs]
            dependency = _dependency("afterok", parents)
            new = submit([node.spec for node in batch], options, dependency=dependency, code=code)
            submitted += new
            jobs |= {node.key: job.job_id for node, job in zip(batch, new, strict=True)}
            if len(batch) == 1:
                print(f"{batch[0].key}: job {new[0].job_id} {dependency}".rstrip())
            else:
                array, most = new[0].job_id.split("_")[0], options.array_parallelism
                print(f"{batch[0].spec.stage}: array {array} of {len(batch)} jobs, at most {most} at once")
        dependency = _dependency("afterany", [*jobs.values(), *([earlier_report] if earlier_report else [])])
        (job,) = submit([graph.report], options, dependency=dependency, code=code, after_active=True)
    except BaseException as error:
        for job in submitted:
            job.cancel(check=False)
        print(f"cancelled the {len(submitted)} jobs that were submitted before the error", file=sys.stderr)
        if not submitted and isinstance(error, Refused):
            shutil.rmtree(code.parent)
        raise
    print(f"report: job {job.job_id} {dependency}\nto see the status: python tools/launch.py status {graph.output}")
    return 0


def preview(graph: Graph, options: Options) -> None:
    """The graph, and for what is missing the scripts or commands, and times."""
    missing = []
    for node in graph.nodes:
        after = f"  after {', '.join(node.parents)}" if node.parents else ""
        state, refused = "complete", ""
        if not node.spec.is_complete():
            try:
                state = "missing"
                _refuse(node.spec, options)
            except UserError as error:
                state, refused = "refused", f"\n         {error}"
            missing.append(node)
        print(f"{state:<8} {node.key}{after}  -> {short(node.spec.folder)}{refused}")
    print(f"missing  report  after everything  -> {short(graph.report.produces)}\n")
    code = Path(graph.output) / "launch" / "DRY-RUN" / "code"
    keys = {node.key for node in missing}
    for node in missing:
        dependency = _dependency("afterok", [f"<job of {parent}>" for parent in node.parents if parent in keys])
        script = preview_script(node.spec, options, dependency, code)
        print(f"# {node.key}\n{script}\n")
    limit = f"{options.minutes} minutes per job" if options.minutes else "no time limit"
    print(f"# {len(missing)} of {len(graph.nodes)} stages to run; {limit}")


def _check(graph: Graph, options: Options) -> tuple[dict[str, Node], dict[str, str]]:
    """The stages to start, and the SLURM jobs of those already pending or running, by key.

    Raises:
        UserError: some stages are refused; if there are several, each is printed with its reason.
    """
    missing: dict[str, Node] = {}
    jobs: dict[str, str] = {}
    refused: list[str] = []
    for node in graph.nodes:
        try:
            if node.spec.is_complete():
                continue
            _refuse(node.spec, options)
            job = _active_job(node.spec) if options.cluster == "slurm" else ""
            if job:
                jobs[node.key] = job
            else:
                refuse_if_running(Path(node.spec.folder))
                missing[node.key] = node
        except UserError as error:
            refused.append(f"{node.key}: {error}")
    if not refused and not _active_job(graph.report):
        refuse_if_running(Path(graph.report.folder))
    if len(refused) > 1:
        print("\n".join(refused), file=sys.stderr)
        raise UserError(f"{len(refused)} of {len(graph.nodes)} stages are refused (see above); nothing was started")
    if refused:
        raise UserError(f"{refused[0]}; nothing was started")
    return missing, jobs


def _refuse(spec: StageSpec, options: Options) -> None:
    spec.refuse_missing_weights()
    spec.refuse_other_work()
    refuse_indivisible(spec, options, count=False)  # an earlier stage may make the data


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


def _active_job(spec: StageSpec) -> str:
    """The id of the SLURM job that waits or runs in the stage's folder, or an empty string."""
    file = Path(spec.folder) / "launch" / "launch.json"
    if not file.exists():
        return ""
    job = control.read_launch(file)["jobs"][-1]
    is_active = job["cluster"] == "slurm" and control.job_state(job) in ("PENDING", "RUNNING")
    return str(job["id"]) if is_active else ""


def _dependency(kind: str, job_ids: Sequence[str]) -> str:
    return f"{kind}:{':'.join(job_ids)}" if job_ids else ""
