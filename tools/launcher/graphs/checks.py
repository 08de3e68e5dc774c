"""Checks, before a job is submitted, of what a stage would refuse at its start; only a fine-tuning imports torch."""

import os
from pathlib import Path

from pretrain.common.errors import UserError, count_noun
from pretrain.common.files import explain_content, read_start
from pretrain.common.run import file_names
from pretrain.common.run.folder import check_stage_of
from pretrain.common.run.state import read_state, read_working_folder
from pretrain.common.shell import find_working_folder
from tools.stages.base import Stage
from tools.stages.completion import check_inputs
from tools.stages.identity import describe_changes
from tools.stages.registry import build_stage

from ..execution import slurm
from ..record_formats import find_launch
from ..resources import Resources
from .graph import Graph, Node


def check_stage(node: Node, graph: Graph, resources: Resources, is_dry_run: bool, needs_data: bool) -> list[str]:
    """Check what the stage would refuse on its devices; return warnings."""
    stage = node.stage
    is_slurm = resources.cluster == "slurm"
    if is_slurm and ("%" in stage.folder or "\\" in stage.folder):
        raise UserError(f"SLURM interprets '%' and '\\' in {stage.folder} as a pattern; choose another OUTPUT_DIR")
    _check_weights(stage)
    check_may_continue(stage)
    if is_slurm:
        _check_cores(resources)
    stage.check(resources.nodes * resources.tasks, starts_later=is_slurm or bool(node.parents))
    reads_weights = not node.parents and stage.reads_weights()  # a resumed run may no longer need them
    warnings: list[str] = []
    if reads_weights and stage.weights_address:
        warnings += _fetch_weights(stage.weights_address, is_dry_run)
    if stage.has_checkpoint():
        warnings += _describe_moved_names(stage)
    if any(other.stage.makes_data for other in graph.nodes if other.key in stage.folders):  # they may not exist yet
        return warnings
    unchecked = _check_data(stage, reads_weights and not stage.weights_address, is_slurm, needs_data)
    starts_now = graph.is_single and not is_slurm and not is_dry_run  # then it soon refuses too few images itself
    if not unchecked and not starts_now:  # the data are on this machine
        stage.check_counts()
    return [*warnings, *unchecked]


def _check_weights(stage: Stage) -> None:
    """Check that there are weights to read, without reading all of them."""
    if not stage.inputs or not stage.reads_weights():
        return
    for path, content in stage.inputs.items():
        if not content:
            problem = f"no weights at {path}: neither a file nor a folder with a checkpoint"
            raise UserError(f"{problem}; {stage.remedy}")
        problem = explain_content(read_start(path)) if Path(path).is_file() else ""
        if problem:
            raise UserError(f"{path} contains no weights: {problem}")
    check_inputs(stage)  # of a record


def _fetch_weights(address: str, is_dry_run: bool) -> list[str]:
    """Download the weights at a URL, because nodes of a cluster may have no internet; return warnings."""
    if is_dry_run:
        return [f"{address} is not checked: it is downloaded here before the stage is started"]
    from transfer.weights.locate import find_weights

    find_weights(address)
    return []


def _describe_moved_names(stage: Stage) -> list[str]:
    """Describe the relative names of a run that resumes in another working folder, where they may be other images."""
    earlier = read_working_folder(stage.folder)
    current = find_working_folder()
    if earlier in ("", current):
        return []
    return [
        f"{name} is now that of {current}; the run was started in {earlier}" for name in stage.list_relative_names()
    ]


def _check_data(stage: Stage, reads_weights: bool, is_slurm: bool, needs_data: bool) -> list[str]:
    """Check the data of a stage; of a SLURM job return as warnings what other disks than this machine's may have."""
    in_job = [name for name in stage.list_data() if "$" in name] if is_slurm else []
    if in_job:
        return [f"{name} is not checked here: its variables are expanded in the job" for name in in_job]
    try:
        stage.check_data(reads_weights)
    except UserError as error:
        if not is_slurm or needs_data:
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


def check_may_continue(stage: Stage) -> None:
    """Check that the run folder can be written, and contains no checkpoint or results of another run."""
    folder = Path(stage.folder)
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        raise UserError(f"cannot write to {existing}; choose another OUTPUT_DIR")
    check_stage_of(folder, stage.name)
    if not stage.has_checkpoint() and not (folder / file_names.RESULTS).exists():
        return
    stage.check_same_run()
    launched = find_launch(folder)
    earlier = build_stage(launched.spec).identity if launched else read_state(folder).get("work")
    changes = describe_changes(stage, earlier) if earlier else ""
    if changes:
        raise UserError(f"{folder} contains a different run ({changes}); move it, or choose another OUTPUT_DIR")
