"""Checks, before a job is submitted, of what a stage would refuse at its start; only a fine-tuning imports torch."""

import functools
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fvcore.common.config import CfgNode

from pretrain.common.errors import UserError, count_noun
from pretrain.common.files import check_file, read_json
from pretrain.common.run.folder import check_free, check_stage_of
from pretrain.common.run.state import find_working_folder, read_record, read_state
from pretrain.config import from_yaml_text
from pretrain.data.names import resolve
from pretrain.preflight import check_batch_size, check_data_exists, check_divisible, check_same_run
from transfer.api import try_config
from transfer.preflight import check_inputs
from transfer.weights.locate import find_weights

from ..arguments import TransferArguments
from ..execution import slurm
from ..execution.job import Job
from ..execution.jobs import wait_for_ending_jobs
from ..options import Options
from ..resources import Resources
from ..spec import StageSpec
from ..stages import prepare_fine_tuning, read_pretrain_config
from .graph import RECORD, Graph, Node


@dataclass
class Plan:
    """The stages of a graph to start, by key.

    Attributes:
        missing: the stages to start, valid or not.
        resources: what the jobs of these stages get, and that of the report.
        queued: SLURM jobs of stages that are pending or running, and of the report.
        errors: why stages cannot start.
        warnings: data and weights that this machine does not have or did not check.
    """

    missing: dict[str, Node]
    resources: dict[str, Resources]
    queued: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def check(self, graph: Graph) -> None:
        """Print the warnings; raise UserError if stages are invalid. If there are several, print each of them."""
        lines = [f"{key}: {error}" for key, error in self.errors.items()]
        if len(lines) > 1:
            print("\n".join(lines), file=sys.stderr)
            lines = [f"{len(lines)} of {len(graph.nodes)} stages are invalid (see above)"]
        if lines:
            raise UserError(*self.errors.values() if graph.is_single else [f"{lines[0]}; nothing was started"])
        for warning in dict.fromkeys(self.warnings):
            print(f"warning: {warning}", file=sys.stderr)


def check_graph(graph: Graph, options: Options, *, download: bool = True, check_data: bool = False) -> Plan:
    """Find the stages to start, and check each of them.

    Args:
        download: fetch weights at a URL; nodes of a cluster may have no internet.
        check_data: also refuse a SLURM job if its data are not on this machine.
    """
    if graph.report:
        check_free(graph.output, ("report.md", "report.html"), str(RECORD), "folder")
    missing = {node.key: node for node in graph.nodes if not node.spec.is_complete()}
    specs = {key: node.spec for key, node in missing.items()}
    if graph.report:
        specs["report"] = graph.report
    plan = Plan(missing, {key: options.for_stage(spec) for key, spec in specs.items()})
    folders = {key: Path(spec.folder) for key, spec in specs.items()}
    last_jobs = wait_for_ending_jobs(folders.values())
    for key, folder in folders.items():
        try:
            if folder in last_jobs:
                job, state = last_jobs[folder]
                may_wait = job.is_slurm and options.cluster == "slurm" and not graph.is_single
                if may_wait and state.word in ("PENDING", "RUNNING"):
                    if key in plan.missing:
                        _check_same_work(plan.missing[key], job)
                    plan.queued[key] = job.id
                    plan.missing.pop(key, None)
                else:
                    job.check_not_running(state)
            if key in plan.missing:
                _check_parents(key, graph, plan)
                plan.warnings += _check_stage(plan.missing[key], plan.resources[key], download, check_data)
        except UserError as error:
            plan.errors[key] = str(error)
    if options.cluster == "slurm" and graph.report:
        jobs = len(plan.missing) + 1  # the report
        limit = slurm.read_max_jobs(options.account, options.slurm_cluster)
        if jobs > limit:
            plan.warnings.append(
                f"this submits {count_noun(jobs, 'job')}, but your account may have {limit} in the queue at a time"
            )
    return plan


def _check_same_work(node: Node, job: Job) -> None:
    """Check that a job in the queue does the work of ``node``: the file of a pipeline may have been edited since."""
    record = read_json(job.folder / "launch" / "launch.json")
    submitted = StageSpec.from_json(record["spec"])
    if submitted.fingerprint() != node.spec.fingerprint():
        changes = node.spec.describe_changes(submitted.identity, allowed=()) or "what it builds on has changed"
        remedy = f"cancel it first: python tools/launch.py cancel {shlex.quote(str(job.folder))}"
        raise UserError(f"job {job.id} in the queue does other work ({changes}); {remedy}, or undo the change")


def _check_parents(key: str, graph: Graph, plan: Plan) -> None:
    """Check the stages that this one depends on; warn if it would rerun although nothing needs it."""
    nodes = {node.key: node for node in graph.nodes}
    if graph.is_single:  # no other stage runs before it
        nodes[key].spec.check_parents()
    for parent in (nodes[name] for name in nodes[key].parents if name not in {*plan.missing, *plan.queued}):
        if parent.spec.stage == "pretrain" and not parent.spec.has_checkpoint():
            remedy = "restore it, or move the folder away to pretrain again"
            raise UserError(f"the checkpoint of {parent.key} is gone from {parent.spec.folder}; {remedy}")
    children = [node.key for node in graph.nodes if key in node.parents]
    if nodes[key].spec.stage == "pretrain" and children and plan.missing.keys().isdisjoint(children):
        plan.warnings.append(f"{key} has no result and runs again, although every stage that depends on it is complete")


def _check_stage(node: Node, resources: Resources, download: bool, check_data: bool) -> list[str]:
    """Check what the stage would refuse on its devices; return warnings."""
    spec = node.spec
    is_slurm = resources.cluster == "slurm"
    if is_slurm and ("%" in spec.folder or "\\" in spec.folder):
        raise UserError(f"SLURM interprets '%' and '\\' in {spec.folder} as a pattern; choose another OUTPUT_DIR")
    spec.check_weights()
    check_may_continue(spec)
    if is_slurm:
        _check_cores(resources)
    if not spec.config:
        return []
    reads_weights = not node.parents and not spec.has_checkpoint()  # a resumed run may no longer need them
    world_size = resources.nodes * resources.tasks
    warnings: list[str] = []
    cfg: CfgNode
    if spec.stage == "transfer":
        run = prepare_fine_tuning(spec.config, spec.args[0], world_size)
        if is_slurm or node.parents:  # it starts later, maybe after days
            try_config(run)
        cfg = run.cfg
        names = [*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST]
        is_address = "://" in cfg.MODEL.WEIGHTS
        if reads_weights and is_address and download:
            find_weights(cfg.MODEL.WEIGHTS)
        elif reads_weights and is_address:
            warnings.append(f"{cfg.MODEL.WEIGHTS} is not checked: it is downloaded here before the stage is started")
        check = functools.partial(check_inputs, cfg, eval_only=run.eval_only, weights=reads_weights and not is_address)
    else:
        cfg = from_yaml_text(spec.config)
        check_divisible(cfg, spec.stage, world_size)
        names = [cfg.DATA.TRAIN, cfg.DATA.PROBE_TRAIN, cfg.DATA.VAL, cfg.DATA.ROOT]
        if reads_weights and spec.stage == "pretrain" and "://" in cfg.MODEL.WEIGHTS:
            check_file(cfg.MODEL.WEIGHTS, "weights file (MODEL.WEIGHTS)")
        check = functools.partial(check_data_exists, cfg, spec.stage, weights=reads_weights)
        warnings += _describe_moved_names(spec, names[:3])
    if any(key.partition("/")[0] == "data" for key in spec.folders):  # an earlier stage writes them
        return warnings
    unchecked = _check_data(check, names, is_slurm, check_data)
    if spec.stage != "transfer" and not unchecked:  # the data are on this machine
        check_batch_size(cfg, spec.stage)
    return [*warnings, *unchecked]


def _describe_moved_names(spec: StageSpec, names: Iterable[str]) -> list[str]:
    """Describe the relative names of a run that resumes in another working folder, where they may be other images."""
    earlier = read_state(spec.folder).get("cwd", "")
    current = find_working_folder()
    if earlier in ("", current) or not spec.has_checkpoint():
        return []
    relative = [name for name in filter(None, names) if resolve(name, current) != name]
    return [f"{name} is now that of {current}; the run was started in {earlier}" for name in relative]


def _check_data(check: Callable[[], object], names: Iterable[str], is_slurm: bool, check_data: bool) -> list[str]:
    """Run the ``check`` of the data sets ``names``; nodes of a cluster may have other disks than this machine."""
    in_job = [name for name in names if "$" in name]
    if is_slurm and in_job:
        return [f"{name} is not checked here: its variables are expanded in the job" for name in in_job]
    try:
        check()
    except UserError as error:
        if not is_slurm or check_data:
            raise
        return [f"this machine does not have the data: {error}"]
    return []


def _check_cores(resources: Resources) -> None:
    cores = slurm.read_max_cores(resources.partition, resources.request.slurm_cluster)
    needed = resources.tasks * (resources.cpus_per_task or 1)
    if 0 < cores < needed:
        processes = count_noun(resources.tasks, "process", "processes")
        problem = f"--cpus-per-task {resources.cpus_per_task} for {processes} is {needed} cores"
        node = f"node of {resources.partition}" if resources.partition else "node"
        remedy = "give a smaller --cpus-per-task (default: DATALOADER.NUM_WORKERS + 1)"
        raise UserError(f"{problem} per node, but no {node} has more than {cores}; {remedy}")


def check_may_continue(spec: StageSpec) -> None:
    """Check that the run folder can be written, and contains no checkpoint or results of another run."""
    folder = Path(spec.folder)
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        raise UserError(f"cannot write to {existing}; choose another OUTPUT_DIR")
    is_evaluation = spec.stage == "transfer" and TransferArguments.from_words(spec.args[0]).eval_only
    check_stage_of(folder, "evaluation" if is_evaluation else spec.stage)
    if not spec.has_checkpoint() and not (folder / "results.json").exists():
        return
    earlier_config = read_pretrain_config(spec.folder) if spec.stage == "pretrain" else None
    if earlier_config:
        check_same_run(from_yaml_text(spec.config), earlier_config, str(folder / "config.yaml"), folder)
    launched = read_record(folder / "launch" / "launch.json").get("spec")
    earlier = StageSpec.from_json(launched).identity if launched else read_state(folder).get("work")
    changes = spec.describe_changes(earlier) if earlier else ""
    if changes:
        raise UserError(f"{folder} contains a different run ({changes}); move it, or choose another OUTPUT_DIR")
