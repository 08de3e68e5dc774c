"""What a stage would refuse at its start, refused before a job is submitted and without importing torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

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

from .jobs import check_not_running, job_states
from .options import Options
from .spec import StageSpec
from .stages import config_file, pretrain_config

if TYPE_CHECKING:
    from .graph import Graph, Node


def check(graph: Graph, options: Options) -> tuple[dict[str, Node], dict[str, str]]:
    """The stages to start, and the SLURM jobs of those already pending or running, by key (report, too).

    Raises:
        UserError: some stages are refused; if there are several, each is printed with its reason.
    """
    if graph.report:
        check_free(graph.output, ("report.md", "report.html"), f"launch/{graph.kind}.json", "folder")
    missing = {node.key: node for node in graph.nodes if not node.spec.is_complete()}
    folders = {key: Path(node.spec.folder) for key, node in missing.items()}
    if graph.report:
        folders["report"] = Path(graph.report.folder)
    files = {key: folder / "launch" / "launch.json" for key, folder in folders.items()}
    last = {key: read_json(file)["jobs"][-1] for key, file in files.items() if os.path.exists(file)}
    states = dict(zip(last, job_states(list(last.values())), strict=True))
    jobs: dict[str, str] = {}
    refused: dict[str, str] = {}
    for key, folder in folders.items():
        try:
            if job := last.get(key):
                is_queued = job["cluster"] == "slurm" and states[key].split()[0] in ("PENDING", "RUNNING")
                if is_queued and graph.report and options.cluster == "slurm":
                    jobs[key] = job["id"]
                    missing.pop(key, None)
                else:
                    check_not_running(folder, job, states[key])
            if key in missing:
                check_stage(missing[key], options)
                if graph.kind == "stage":  # nothing before it is run first
                    missing[key].spec.check_parents()
        except UserError as error:
            refused[key] = str(error)
    if refused and graph.report is None:
        raise UserError(*refused.values())
    lines = [f"{key}: {reason}" for key, reason in refused.items()]
    if len(lines) > 1:
        print("\n".join(lines), file=sys.stderr)
        lines = [f"{len(refused)} of {len(graph.nodes)} stages are refused (see above)"]
    if lines:
        raise UserError(f"{lines[0]}; nothing was started")
    return missing, jobs


def check_stage(node: Node, options: Options, *, download: bool = True) -> None:
    """Refuses what the stage would refuse once it has its devices; ``download``: weights at an address, too."""
    spec = node.spec
    if options.cluster == "slurm" and (character := next((c for c in "%\\" if c in spec.folder), "")):
        raise UserError(
            f"{spec.folder} holds a '{character}', which SLURM interprets as a pattern; choose another OUTPUT_DIR"
        )
    spec.check_weights()
    check_may_continue(spec)
    if not spec.config:
        return
    # An earlier stage may make the data, and a cluster's nodes may have other disks.
    sees_data = options.cluster != "slurm" and not node.parents
    is_new = not Path(spec.folder).exists()  # a resumed run may no longer need its weights
    world = _world_size(spec, options)
    if spec.stage == "transfer":
        cfg, eval_only = _detector_config(spec), _is_evaluation(spec)
        engine = pick_engine(spec.args[0][spec.args[0].index("--engine") + 1])
        check_engine(cfg, engine, eval_only=eval_only)
        if sees_data:
            weights = is_new and (download or "://" not in cfg.MODEL.WEIGHTS)
            check_inputs(cfg, eval_only=eval_only, weights=weights)
        if not eval_only:
            check_batch_division(scale_to_world(cfg, world), world)
    else:
        cfg = from_yaml_text(spec.config)
        if sees_data:
            check_data_exists(cfg, spec.stage, weights=is_new)
        check_divisible(cfg, spec.stage, world)


def _world_size(spec: StageSpec, options: Options) -> int:
    options = options.fitting(spec)
    return options.nodes * options.tasks_per_node


def check_may_continue(spec: StageSpec) -> None:
    """Checks that the run folder can be written, and holds no checkpoint and no results, or those of the same work."""
    folder = Path(spec.folder)
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not os.access(nearest, os.W_OK):
        raise UserError(f"cannot write to {nearest}; choose another OUTPUT_DIR")
    check_stage_of(folder, "evaluation" if _is_evaluation(spec) else spec.stage)
    if not spec.has_checkpoint() and not (folder / "results.json").exists():
        return
    if spec.stage == "pretrain" and (earlier_config := pretrain_config(spec.folder)):
        check_same_run(from_yaml_text(spec.config), earlier_config, str(folder / "config.yaml"), folder)
    launched = read_record(folder / "launch" / "launch.json")
    earlier = StageSpec.from_json(launched["spec"]).work if launched.get("spec") else read_state(folder).get("work")
    changes = spec.changes(earlier) if earlier else ""
    if changes:
        raise UserError(f"{folder} holds other work ({changes}); move that folder away, or choose another OUTPUT_DIR")


def _detector_config(spec: StageSpec) -> CfgNode:
    with config_file(spec.config) as file:
        return load_config(file, ["OUTPUT_DIR", spec.folder])


def _is_evaluation(spec: StageSpec) -> bool:
    return spec.stage == "transfer" and "--eval-only" in spec.args[0]
