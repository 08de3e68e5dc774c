"""Builds, saves and restores everything that a step changes; checkpoints have MoCo's format."""

import logging
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode

from .common.distributed import on_every_rank
from .common.errors import UserError
from .common.weights import checkpoint
from .model.objectives import build_objective
from .optim import build_optimizer
from .preflight import check_same_run
from .steps import TrainState

log = logging.getLogger(__name__)


def build_train_state(
    cfg: CfgNode, device: torch.device, steps_per_epoch: int, read_weights: bool = True
) -> TrainState:
    """Build objective, optimizer and gradient scaler.

    Args:
        read_weights: Start from MODEL.WEIGHTS. A resumed run no longer needs that file.
    """
    objective = build_objective(cfg, device, steps_per_epoch, read_weights)
    scaler = torch.amp.GradScaler(device.type, enabled=cfg.SOLVER.AMP == "fp16")
    return TrainState(objective, build_optimizer(objective.encoder, cfg.SOLVER), scaler)


def build_checkpoint(
    state: TrainState, cfg: CfgNode, step: int, steps_per_epoch: int, skipped_steps: int
) -> dict[str, Any]:
    """Return the content of the checkpoint after ``step`` optimizer steps.

    Args:
        skipped_steps: steps that fp16 has skipped so far.

    Raises:
        UserError: a weight is not finite, which no later step would fix.
    """
    weights = state.objective.model.state_dict()
    norms = torch._foreach_norm([value.detach() for value in weights.values() if value.is_floating_point()])
    if not torch.stack(norms).isfinite().all():
        remedy = "lower SOLVER.BASE_LR, raise SOLVER.WARMUP_EPOCHS or set SOLVER.AMP none"
        raise UserError(f"weights are not finite after step {step}; nothing was saved; {remedy}")
    return {
        "epoch": step // steps_per_epoch,
        "arch": cfg.MODEL.ARCH,
        "state_dict": {_rename_to_moco(name): value for name, value in weights.items()},
        "optimizer": state.optimizer.state_dict(),
        "step": step,
        "steps_per_epoch": steps_per_epoch,
        "scaler": state.scaler.state_dict(),
        "method": cfg.METHOD.NAME,
        "bn_groups": state.objective.bn_groups,
        "skipped_steps": skipped_steps,
        "config": cfg.dump(),
    }


def restore_checkpoint(state: TrainState, saved: dict[str, Any]) -> int:
    """Restore what `build_checkpoint` returned, and return the step to continue from.

    Raises:
        UserError: the checkpoint is incomplete or of another model.
    """
    model = state.objective.model
    with checkpoint.translate_restore_errors("the checkpoint", state.optimizer, "choose another OUTPUT_DIR"):
        names = {_rename_to_moco(name): name for name in model.state_dict()}
        weights = saved["state_dict"].items()
        model.load_state_dict({str(names.get(name, name)): value for name, value in weights}, strict=True)
        state.optimizer.load_state_dict(saved["optimizer"])
        if saved["scaler"]:  # empty if the run has not used fp16 so far
            state.scaler.load_state_dict(saved["scaler"])
        step = int(saved["step"])
        bn_groups = state.objective.bn_groups
        earlier_bn_groups = int(saved.get("bn_groups", bn_groups))
    if earlier_bn_groups != bn_groups:
        why = "another number of processes or SOLVER.ACCUMULATE; the result differs from an uninterrupted run's"
        log.warning(f"BN statistics were computed over {earlier_bn_groups} groups and now over {bn_groups} ({why})")
    return step


def load_checkpoint_to_resume(cfg: CfgNode, folder: Path) -> tuple[Path | None, dict[str, Any]]:
    """Load the newest undamaged checkpoint on every rank; rank 0 chooses it.

    Returns:
        Its path and its content; None and an empty dict for a new run.

    Raises:
        UserError: a rank cannot read it or sees one although rank 0 sees none, or it belongs to a run of another
            config.
    """
    newest = checkpoint.load_newest_on_all_ranks(folder, checkpoint.list_checkpoints(folder), checkpoint.read)
    if newest is None:
        return None, {}
    on_every_rank(_add_recipe_changes, cfg, folder, *newest)
    return newest


def _add_recipe_changes(cfg: CfgNode, folder: Path, path: Path, saved: dict[str, Any]) -> None:
    """Add the changes that SOLVER.CHANGE_RECIPE allows to a checkpoint's content; raise UserError for another run's."""
    if not isinstance(saved.get("config"), str):
        raise UserError(f"{path} has no config, so it is not a checkpoint of this project; choose another OUTPUT_DIR")
    changes = check_same_run(cfg, saved["config"], f"the config in {path}", folder)
    new_changes = [f"step {saved.get('step')}: {change}" for change in changes]
    saved["recipe_changes"] = [*saved.get("recipe_changes", []), *new_changes]


def _rename_to_moco(name: str) -> str:
    """Return ``module.encoder_q.*``, ``module.encoder_k.*``, ``module.queue`` or ``module.queue_ptr``."""
    return f"module.{name.removeprefix('negatives.')}"
