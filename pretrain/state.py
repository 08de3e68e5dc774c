"""Saves everything that a step changes in a checkpoint of MoCo's format, and restores it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode

from .common import distributed
from .common.errors import UserError
from .common.weights import checkpoint
from .preflight import check_same_run
from .steps import TrainState


def to_checkpoint(
    training: TrainState, cfg: CfgNode, step: int, steps_per_epoch: int, skipped_steps: int
) -> dict[str, Any]:
    """Everything that resuming needs after ``step`` steps.

    Args:
        skipped_steps: steps that fp16 has skipped so far.

    Raises:
        UserError: a weight is not finite, which no later step would fix.
    """
    weights = training.objective.model.state_dict()
    norms = torch._foreach_norm([value.detach() for value in weights.values() if value.is_floating_point()])
    if not torch.stack(norms).isfinite().all():
        raise UserError(
            f"weights are not finite after step {step}; nothing was saved; lower SOLVER.BASE_LR, raise "
            "SOLVER.WARMUP_EPOCHS or set SOLVER.AMP none"
        )
    return {
        "epoch": step // steps_per_epoch, "arch": cfg.MODEL.ARCH,
        "state_dict": {_moco_name(name): value for name, value in weights.items()},
        "optimizer": training.optimizer.state_dict(), "step": step, "steps_per_epoch": steps_per_epoch,
        "scaler": training.scaler.state_dict(), "method": cfg.METHOD.NAME,
        "bn_groups": training.objective.bn_groups, "skipped_steps": skipped_steps, "config": cfg.dump(),
    }  # fmt: skip


def from_checkpoint(training: TrainState, state: dict[str, Any], log: Callable[[str], None]) -> int:
    """Restores what `to_checkpoint` returned; returns the step to continue from.

    Args:
        log: called with a line for the log.

    Raises:
        UserError: the checkpoint is incomplete or of another model.
    """
    model = training.objective.model
    with checkpoint.check_restoring("the checkpoint", training.optimizer, "choose another OUTPUT_DIR"):
        names = {_moco_name(name): name for name in model.state_dict()}
        weights = state["state_dict"].items()
        model.load_state_dict({str(names.get(name, name)): value for name, value in weights}, strict=True)
        training.optimizer.load_state_dict(state["optimizer"])
        if state["scaler"]:  # empty if the run was not fp16 so far
            training.scaler.load_state_dict(state["scaler"])
        step, now = int(state["step"]), training.objective.bn_groups
        earlier = int(state.get("bn_groups", now))
    if earlier != now:
        log(
            f"warning: the run began with batch-norm statistics over {earlier} parts of the batch and continues with "
            f"{now} (another number of processes, or another SOLVER.ACCUMULATE); its result will differ from an "
            "uninterrupted run's"
        )
    return step


def find_checkpoint(cfg: CfgNode, folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Load the newest undamaged checkpoint on every rank (see `load_latest_checkpoint`); return None for a new run.

    Raises:
        UserError: a rank cannot read it or sees one although rank 0 sees none, or it belongs to a run of another
            config.
    """
    newest = checkpoint.load_latest_checkpoint(folder, checkpoint.list_checkpoints(folder), checkpoint.read)
    if newest:
        distributed.on_every_rank(_add_recipe_changes, cfg, folder, *newest)
    return newest


def _add_recipe_changes(cfg: CfgNode, folder: Path, path: Path, state: dict[str, Any]) -> None:
    """Add to a checkpoint's content what its run changes on resume; raise UserError if it is another run's."""
    if not isinstance(state.get("config"), str):
        raise UserError(f"{path} has no config, so it is not a checkpoint of this project; choose another OUTPUT_DIR")
    changes = check_same_run(cfg, state["config"], f"the config in {path}", folder)
    new_changes = [f"step {state.get('step')}: {change}" for change in changes]
    state["recipe_changes"] = [*state.get("recipe_changes", []), *new_changes]


def _moco_name(name: str) -> str:
    """``module.encoder_q.*``, ``module.encoder_k.*``, ``module.queue``, ``module.queue_ptr``."""
    return f"module.{name.removeprefix('negatives.')}"
