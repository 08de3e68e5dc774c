"""Refuses, before a job is submitted and without importing torch, what a stage would refuse at its start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fvcore.common.config import CfgNode

from pretrain.common.errors import UserError
from pretrain.common.files import read_json
from pretrain.common.run.folder import check_free, check_stage_of
from pretrain.common.run.state import read_record, read_state
from pretrain.config import from_yaml_text
from pretrain.preflight import check_data_exists, check_divisible, check_same_run
from transfer.config import load_config, scale_to_world
from transfer.config_keys import check_batch_division
from transfer.preflight import check_engine, check_inputs
from transfer.train_net import pick_engine

from .graph import RECORD, Graph, Node
from .jobs import check_not_running, job_states
from .options import Options
from .spec import StageSpec
from .stages import config_file, pretrain_config


def check_graph(graph: Graph, options: Options) -> tuple[dict[str, Node], dict[str, str]]:
    """Return the stages to start, and the SLURM jobs of stages already pending or running (and of the report), by key.

    Raises:
        UserError: some stages are refused; if there are several, each is printed with its reason.
    """
    if graph.report:
        check_free(graph.output, ("report.md", "report.html"), str(RECORD), "folder")
    missing = {node.key: node for node in graph.nodes if not node.spec.is_complete()}
    folders = {key: Path(node.spec.folder) for key, node in missing.items()}
    if graph.report:
        folders["report"] = Path(graph.report.folder)
    files = {key: folder / "launch" / "launch.json" for key, folder in folders.items()}
    last_jobs = {key: read_json(file)["jobs"][-1] for key, file in files.items() if os.path.exists(file)}
    states = dict(zip(last_jobs, job_states(list(last_jobs.values())), strict=True))
    queued: dict[str, str] = {}
    errors: dict[str, str] = {}
    for key, folder in folders.items():
        try:
            if job := last_jobs.get(key):
                is_queued = job["cluster"] == "slurm" and states[key].split()[0] in ("PENDING", "RUNNING")
                if is_queued and options.cluster == "slurm" and not graph.is_single:
                    queued[key] = job["id"]
                    missing.pop(key, None)
                else:
                    check_not_running(folder, job, states[key])
            if key in missing:
                check_stage(missing[key], options)
                if graph.is_single:  # no other stage runs before it
                    missing[key].spec.check_parents()
        except UserError as error:
            errors[key] = str(error)
    if errors and graph.is_single:
        raise UserError(*errors.values())
    lines = [f"{key}: {error}" for key, error in errors.items()]
    if len(lines) > 1:
        print("\n".join(lines), file=sys.stderr)
        lines = [f"{len(errors)} of {len(graph.nodes)} stages are invalid (see above)"]
    if lines:
        raise UserError(f"{lines[0]}; nothing was started")
    return missing, queued


def check_stage(node: Node, options: Options, *, download: bool = True) -> None:
    """Refuse what the stage would refuse on its devices; with ``download``, weights at an address are checked, too."""
    spec = node.spec
    if options.cluster == "slurm" and ("%" in spec.folder or "\\" in spec.folder):
        raise UserError(f"SLURM interprets '%' and '\\' in {spec.folder} as a pattern; choose another OUTPUT_DIR")
    spec.check_weights()
    check_may_continue(spec)
    if not spec.config:
        return
    # An earlier stage may write the data, and a cluster's nodes may have other disks.
    sees_data = options.cluster != "slurm" and not node.parents
    is_new = not Path(spec.folder).exists()  # a resumed run may no longer need its weights
    options = options.for_stage(spec)
    world_size = options.nodes * options.tasks_per_node
    if spec.stage != "transfer":
        cfg = from_yaml_text(spec.config)
        if sees_data:
            check_data_exists(cfg, spec.stage, weights=is_new)
        check_divisible(cfg, spec.stage, world_size)
        return
    cfg = _load_detector_config(spec)
    eval_only = _is_evaluation(spec)
    words = spec.args[0]
    check_engine(cfg, pick_engine(words[words.index("--engine") + 1]), eval_only=eval_only)
    if sees_data:
        is_local = "://" not in cfg.MODEL.WEIGHTS
        check_inputs(cfg, eval_only=eval_only, weights=is_new and (download or is_local))
    if not eval_only:
        check_batch_division(scale_to_world(cfg, world_size), world_size)


def check_may_continue(spec: StageSpec) -> None:
    """Check that the run folder can be written, and contains no checkpoint or results of another run."""
    folder = Path(spec.folder)
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        raise UserError(f"cannot write to {existing}; choose another OUTPUT_DIR")
    check_stage_of(folder, "evaluation" if _is_evaluation(spec) else spec.stage)
    if not spec.has_checkpoint() and not (folder / "results.json").exists():
        return
    if spec.stage == "pretrain" and (earlier_config := pretrain_config(spec.folder)):
        check_same_run(from_yaml_text(spec.config), earlier_config, str(folder / "config.yaml"), folder)
    launched = read_record(folder / "launch" / "launch.json").get("spec")
    earlier = StageSpec.from_json(launched).identity if launched else read_state(folder).get("work")
    changes = spec.describe_changes(earlier) if earlier else ""
    if changes:
        raise UserError(f"{folder} contains a different run ({changes}); move it, or choose another OUTPUT_DIR")


def _load_detector_config(spec: StageSpec) -> CfgNode:
    with config_file(spec.config) as file:
        return load_config(file, ["OUTPUT_DIR", spec.folder])


def _is_evaluation(spec: StageSpec) -> bool:
    return spec.stage == "transfer" and "--eval-only" in spec.args[0]
