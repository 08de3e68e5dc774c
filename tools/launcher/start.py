"""Starts a graph of stages on this machine or submits it to SLURM, or shows what would be started.

Complete stages are skipped, missing ones run, and a failure ends only its own branch.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

from pretrain.common import interrupt
from pretrain.common.config import extensions
from pretrain.common.errors import UserError
from pretrain.common.run.lock import claim

from . import slurm
from .checks import check_graph, check_stage
from .graph import Graph, Node, write_graph
from .local_graph import Interrupted, LocalRun, short
from .options import Options
from .records import new_log_folder
from .submit import preview, snapshot, submit


def start_graph(graph: Graph, options: Options) -> int:
    """Run what is missing on this machine, or submit it; return the exit status.

    Raises:
        UserError: a stage cannot be started, or another process runs or submits the same graph; nothing was started.
    """
    is_slurm = options.cluster == "slurm"
    work = "submission of the pipeline" if is_slurm else "pipeline"  # by which `cancel` finds this process
    with contextlib.nullcontext() if graph.is_single else claim(graph.output, work):
        return _submit_graph(graph, options) if is_slurm else _run_graph(graph, options)


def _run_graph(graph: Graph, options: Options) -> int:
    missing, _ = check_graph(graph, options)
    if not missing and graph.is_single:
        print(f"{graph.output} is already complete; move it away to run it again")
        return 0
    write_graph(graph, options)
    try:
        status = LocalRun(graph, options, missing).run()
        if graph.report:
            graph.report.run()
        return status
    except (Interrupted, interrupt.Stopped) as stop:
        command = shlex.join(["python", "tools/launch.py", "resume", graph.output, *extensions.options()])
        print(f"{stop}\nto continue: {command}", file=sys.stderr)
        return 130


def _submit_graph(graph: Graph, options: Options) -> int:
    """Submit what is missing as dependent jobs that share one copy of the code; active jobs are left alone.

    Everything is checked before the first job is submitted; if sbatch refuses one, those before it are cancelled.
    """
    missing, jobs = check_graph(graph, options)
    earlier_report = jobs.pop("report", "")
    for node in graph.nodes:
        if node.key in jobs:
            print(f"{node.key}: job {jobs[node.key]} is already queued or running")
        elif node.key not in missing:
            print(f"{node.key}: already complete")
    write_graph(graph, options)
    if not missing and not jobs:
        if graph.report:
            graph.report.run()
        return 0
    submitted: list[Any] = []
    code = None if graph.is_single else snapshot(new_log_folder(graph.output))
    try:
        for batch in _group_nodes(missing.values(), {*missing, *jobs}, options):
            dependency = _depend("afterok", [jobs[key] for node in batch for key in node.parents if key in jobs])
            new_jobs = submit([node.spec for node in batch], options, dependency=dependency, code=code)
            submitted += new_jobs
            for node, job in zip(batch, new_jobs, strict=True):
                jobs[node.key] = job.job_id
                print(f"{node.key}: job {job.job_id} {dependency}".rstrip())
        if graph.report:
            dependency = _depend("afterany", [*jobs.values(), earlier_report])
            submitted += submit([graph.report], options, dependency=dependency, code=code)
            print(f"report: job {submitted[-1].job_id} {dependency}")
    except BaseException:
        for job in submitted:
            with contextlib.suppress(UserError):
                slurm.cancel({"id": job.job_id, "slurm_cluster": options.sbatch.get("clusters", "")})
        if submitted:
            print(f"cancelled the {len(submitted)} jobs that were submitted before the error", file=sys.stderr)
        raise
    print(f"to see the status: python tools/launch.py status {shlex.quote(graph.output)}")
    return 0


def show_graph(graph: Graph, options: Options) -> int:
    """Print the stages, and the scripts or commands of those that can start; return 2 if one is invalid, else 0.

    A stage that builds on an invalid one cannot start either.
    """
    missing: dict[str, Node] = {}
    blocked: set[str] = set()
    errors = 0
    for node in graph.nodes:
        after = f"  after {', '.join(node.parents)}" if node.parents else ""
        state = "complete"
        reason = ""
        if not node.spec.is_complete():
            state = "to run"
            try:
                check_stage(node, options, download=False)
            except UserError as error:
                state = "invalid"
                reason = f"\n         {error}"
                errors += 1
            if state == "invalid" or not blocked.isdisjoint(node.parents):
                blocked.add(node.key)
            else:
                missing[node.key] = node
        print(f"{state:<8} {node.key}{after}  -> {short(node.spec.folder)}{reason}")
    if graph.report:
        print(f"to run   report  after everything  -> {short(graph.report.produces)}")
    code = Path(graph.output) / "launch" / "DRY-RUN" / "code"
    for batch in _group_nodes(missing.values(), missing.keys(), options):
        parents = [f"<job of {key}>" for node in batch for key in node.parents if key in missing]
        script = preview([node.spec for node in batch], options, _depend("afterok", parents), code)
        print(f"\n# {', '.join(node.key for node in batch)}\n{script}")
    unseen = f"; data only where the job runs, for at most {options.minutes} minutes"
    print(f"\n# {len(missing) + len(blocked)} of {len(graph.nodes)} stages to run; {errors} invalid")
    print(f"# checked: config, run folder, weights{unseen if options.cluster == 'slurm' else ''}")
    return 2 if errors else 0


def _group_nodes(nodes: Iterable[Node], waiting: Set[str], options: Options) -> Iterable[list[Node]]:
    """Group ``nodes`` by what is submitted together.

    An array contains the nodes of one stage and equal resources that build on none in ``waiting``. Other nodes, and all
    nodes of this machine, are alone.
    """
    groups: dict[str, list[Node]] = {}
    for node in nodes:
        is_in_array = options.cluster == "slurm" and waiting.isdisjoint(node.parents)
        name = f"{node.spec.stage} {options.for_stage(node.spec)}" if is_in_array else node.key
        groups.setdefault(name, []).append(node)
    return groups.values()


def _depend(kind: str, job_ids: Iterable[str]) -> str:
    """Return a dependency in sbatch's form, or an empty string for no jobs."""
    ids = ":".join(filter(None, job_ids))
    return f"{kind}:{ids}" if ids else ""
