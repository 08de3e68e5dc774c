"""Everything that a step changes: built, saved in a checkpoint of MoCo's format, restored from it."""

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode

from .common.config import yaml_io
from .common.errors import UserError, count_noun
from .common.ranks.agreement import on_every_rank
from .common.run.skipped_steps import SkippedSteps
from .common.weights import checkpoint
from .model.objectives import InBatchObjective, QueueObjective, build_objective
from .optim import build_optimizer
from .preflight import check_same_images, check_same_run

log = logging.getLogger(__name__)


@dataclass
class TrainState:
    """What training changes, and what a checkpoint records of the run it belongs to.

    Attributes:
        images_digest: `ImageData.digest` of the training images; it is empty if a caller does not resume.
        step: optimizer steps done.
        skipped: of these, the steps that fp16 has skipped.
        recipe_changes: changes that SOLVER.CHANGE_RECIPE has allowed so far, and the step of each.
    """

    cfg: CfgNode
    steps_per_epoch: int
    images_digest: str
    objective: QueueObjective | InBatchObjective
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    skipped: SkippedSteps
    step: int = 0
    recipe_changes: list[str] = dataclasses.field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """Return the content of a checkpoint; see `checkpoint` for its format.

        Raises:
            UserError: a weight is not finite, which no later step would fix.
        """
        weights = self.objective.model.state_dict()
        norms = torch._foreach_norm([value.detach() for value in weights.values() if value.is_floating_point()])
        if not torch.stack(norms).isfinite().all():
            remedy = "lower SOLVER.BASE_LR, raise SOLVER.WARMUP_EPOCHS or set SOLVER.AMP none"
            raise UserError(f"weights are not finite after step {self.step}; nothing was saved; {remedy}")
        return {
            "epoch": self.step // self.steps_per_epoch,
            "arch": self.cfg.MODEL.ARCH,
            "state_dict": {_rename_to_moco(name): value for name, value in weights.items()},
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "steps_per_epoch": self.steps_per_epoch,
            "scaler": self.scaler.state_dict(),
            "method": self.cfg.METHOD.NAME,
            "bn_groups": self.objective.encoder.bn_groups,
            "skipped_steps": self.skipped.total,
            "config": yaml_io.dump(self.cfg),
            "images": self.images_digest,
            "recipe_changes": self.recipe_changes,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, also that of an earlier version.

        Raises:
            UserError: the checkpoint is incomplete, or of another model or other images.
        """
        model = self.objective.model
        with checkpoint.translate_restore_errors("the checkpoint", self.optimizer, "choose another OUTPUT_DIR"):
            names = {_rename_to_moco(name): name for name in model.state_dict()}
            weights = saved["state_dict"].items()
            model.load_state_dict({str(names.get(name, name)): value for name, value in weights}, strict=True)
            self.optimizer.load_state_dict(saved["optimizer"])
            if saved["scaler"]:  # empty if the run has not used fp16 so far
                self.scaler.load_state_dict(saved["scaler"])
            self.step = int(saved["step"])
            self.skipped.total = int(saved.get("skipped_steps", 0))
            self.recipe_changes = list(saved.get("recipe_changes", []))
            earlier_bn_groups = int(saved.get("bn_groups", self.objective.encoder.bn_groups))
        images_digest = str(saved.get("images", self.images_digest))
        check_same_images(images_digest, self.images_digest, self.cfg.DATA.TRAIN, self.cfg.OUTPUT_DIR)
        if earlier_bn_groups != self.objective.encoder.bn_groups:
            groups = f"{count_noun(earlier_bn_groups, 'group')} and now over {self.objective.encoder.bn_groups}"
            why = "another number of processes or SOLVER.ACCUMULATE; the result differs from an uninterrupted run's"
            log.warning(f"BN statistics were computed over {groups} ({why})")


def build_train_state(
    cfg: CfgNode, device: torch.device, steps_per_epoch: int, images_digest: str = "", read_weights: bool = True
) -> TrainState:
    """Build objective, optimizer and gradient scaler.

    Args:
        images_digest: `ImageData.digest` of the training images.
        read_weights: Start from MODEL.WEIGHTS. A resumed run no longer needs that file.
    """
    objective = build_objective(cfg, device, steps_per_epoch, read_weights)
    return TrainState(
        cfg=cfg,
        steps_per_epoch=steps_per_epoch,
        images_digest=images_digest,
        objective=objective,
        optimizer=build_optimizer(objective.encoder.network, cfg.SOLVER),
        scaler=torch.amp.GradScaler(device.type, enabled=cfg.SOLVER.AMP == "fp16"),
        skipped=SkippedSteps("set SOLVER.AMP bf16 or none"),
    )


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
