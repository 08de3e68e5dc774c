"""Stages that build on one another: what is finished stays, what is missing runs, a failure ends its own branch."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError
from pretrain.common.run_folder import write_json

from . import attach, control
from .options import Options
from .run import StageFailed, disk_gib, execute, time_and_disk
from .spec import StageSpec, read_json
from .submit import preview as preview_script
from .submit import submit


@dataclass(frozen=True)
class Node:
    """A stage of a graph: ``key`` names it to people (``jcl/linear``), ``parents`` are keys."""

    key: str
    spec: StageSpec
    parents: tuple[str, ...] = ()


@dataclass(frozen=True)
class Graph:
    """Stages in an order in which they can run, and the folder that holds all of them.

    Attributes:
        kind: pipeline or sweep.
        report: runs after everything else, whatever became of it.
        facts: whatever the report needs beside the stages.
    """

    kind: str
    output: str
    nodes: tuple[Node, ...]
    report: StageSpec
    command: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    def fingerprints(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for node in self.nodes:
            found[node.key] = node.spec.fingerprint(tuple(found[parent] for parent in node.parents))
        return found

    def remember(self) -> None:
        """`launch/<kind>.json`: the stages, for `report` and `status`, and the command, for `resume`."""
        marks = self.fingerprints()
        stages = [
            {"key": node.key, "stage": node.spec.stage, "folder": node.spec.folder, "parents": list(node.parents),
             "produces": node.spec.produces, "fingerprint": marks[node.key]}
            for node in self.nodes
        ]  # fmt: skip
        write_json(
            Path(self.output) / "launch" / f"{self.kind}.json",
            {**self.facts, "command": list(self.command), "stages": stages},
        )


def begin(spec: StageSpec, fingerprint: str) -> None:
    """A folder must not be continued with other work than it was begun with.

    Raises:
        UserError: it was begun with another config, other arguments, or other stages before it.
    """
    path = Path(spec.folder) / "launch" / "begun.json"
    earlier = read_json(path).get("fingerprint", fingerprint)
    if earlier != fingerprint:
        raise UserError(
            f"{spec.folder} holds other work (its config, or a stage it builds on, has changed); "
            "move that folder away, or choose another OUTPUT_DIR"
        )
    write_json(path, {"fingerprint": fingerprint})


def run_here(graph: Graph, options: Options) -> int:
    """Runs what is missing, a stage at a time; returns the exit status."""
    graph.remember()
    marks, failed = graph.fingerprints(), {}
    status = 0
    for place, node in enumerate(graph.nodes, start=1):
        head = f"[{place}/{len(graph.nodes)}] {node.key}"
        broken = next((parent for parent in node.parents if parent in failed), None)
        if broken:
            failed[node.key] = f"left out: {failed[broken] if failed[broken].startswith('left out') else broken} failed"
            print(f"{head}: {failed[node.key]}", file=sys.stderr, flush=True)
            continue
        if node.spec.is_complete(marks[node.key]):
            print(f"{head}: done before", flush=True)
            continue
        print(f"{head} -> {_short(node.spec.folder)}", flush=True)
        started = time.monotonic()
        try:
            begin(node.spec, marks[node.key])
            execute(node.spec, options, fingerprint=marks[node.key])
        except (StageFailed, UserError) as failure:
            failed[node.key] = "failed"
            status = status or getattr(failure, "status", 2)
            text = str(failure) if isinstance(failure, StageFailed) else f"error: {failure}"
            print(f"{text}\n{head}: failed; the other branches go on", file=sys.stderr, flush=True)
            continue
        except attach.Interrupted as stop:
            print(f"{stop}\nto go on: the same command again", file=sys.stderr)
            return 130
        print(f"{head}: {time.monotonic() - started:.0f} s", flush=True)
    graph.report.run()
    return status


def submit_all(graph: Graph, options: Options) -> int:
    """Submits what is missing to SLURM as dependent jobs; what waits or runs already is left alone."""
    graph.remember()
    marks = graph.fingerprints()
    jobs: dict[str, str] = {}
    for node in graph.nodes:
        if node.spec.is_complete(marks[node.key]):
            print(f"{node.key}: done before")
            continue
        active = active_job(node.spec)
        if active:
            jobs[node.key] = active
            print(f"{node.key}: job {active} is at it")
            continue
        begin(node.spec, marks[node.key])
        dependency = _dependency("afterok", [jobs[parent] for parent in node.parents if parent in jobs])
        (job,) = submit([node.spec], options.fitting(node.spec), fingerprints=[marks[node.key]], dependency=dependency)
        jobs[node.key] = job.job_id
        print(f"{node.key}: job {job.job_id}" + (f" {dependency}" if dependency else ""))
    submit_report(graph, options, list(jobs.values()))
    return 0


def submit_report(graph: Graph, options: Options, job_ids: Sequence[str]) -> None:
    """The report after all jobs, however they ended; at once and here where there are none."""
    if not job_ids:
        graph.report.run()
        return
    active = active_job(graph.report)
    if active:  # it waits for the jobs of before only
        control.cancel(Path(graph.report.folder))
    dependency = _dependency("afterany", job_ids)
    (job,) = submit([graph.report], options.fitting(graph.report), dependency=dependency)
    print(f"report: job {job.job_id} {dependency}\nto see where it is: python tools/launch.py status {graph.output}")


def preview(graph: Graph, options: Options) -> None:
    """The graph, and for what is missing the scripts or commands, times and disk."""
    marks = graph.fingerprints()
    missing = [node for node in graph.nodes if not node.spec.is_complete(marks[node.key])]
    for node in graph.nodes:
        after = f"  after {', '.join(node.parents)}" if node.parents else ""
        print(f"{'missing' if node in missing else 'done':<8} {node.key}{after}  -> {_short(node.spec.folder)}")
    print(f"missing  report  after everything  -> {_short(graph.report.produces)}\n")
    for node in missing:
        parents = [f"<job of {parent}>" for parent in node.parents if any(parent == other.key for other in missing)]
        dependency = _dependency("afterok", parents) if options.cluster == "slurm" else ""
        fitting = options.fitting(node.spec)
        print(f"# {node.key}: {time_and_disk(node.spec, fitting)}\n{preview_script(node.spec, fitting, dependency)}\n")
    total = sum(disk_gib(node.spec) for node in missing)
    limit = f"{options.minutes} minutes a job" if options.minutes else "no time limit"
    print(f"# {len(missing)} of {len(graph.nodes)} stages to run; {limit}; about {total:.2f} GiB of checkpoints in all")


def active_job(spec: StageSpec) -> str:
    """The id of the job that waits or runs in the stage's folder, or an empty string."""
    jobs = read_json(Path(spec.folder) / "launch" / "launch.json").get("jobs", [])
    return jobs[-1]["id"] if jobs and control.job_state(jobs[-1]) in ("PENDING", "RUNNING") else ""


def _dependency(kind: str, job_ids: Sequence[str]) -> str:
    return f"{kind}:{':'.join(job_ids)}" if job_ids else ""


def _short(path: str) -> str:
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path
