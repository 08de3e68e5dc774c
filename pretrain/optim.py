"""Optimizers and their learning rate by key: SGD (the recipes'), AdamW, LARS (timm's)."""

import torch
from fvcore.common.config import CfgNode
from torch import nn

from . import schedule
from .common.sgd import build_fused_sgd


def build_optimizer(model: nn.Module, solver: CfgNode) -> torch.optim.Optimizer:
    """Build SGD, which decays every parameter as in MoCo's recipe, or AdamW or LARS, which decay no biases and norms.

    A layer's rate under LARS is lr times its trust ratio (You et al. 2017); with LARS_CLIP it is the smaller of the
    two, as in LARC and solo-learn. SGD and AdamW run fused, in one pass over the parameters instead of several, and
    LARS on GPUs in few kernels for all parameters.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    lr = solver.BASE_LR
    decay = solver.WEIGHT_DECAY
    if solver.OPTIMIZER == "sgd":
        return build_fused_sgd(trained, lr, solver.MOMENTUM, weight_decay=decay)
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if solver.OPTIMIZER == "adamw":
        return torch.optim.AdamW(groups, lr, fused=True)
    from timm.optim.lars import Lars  # slow to import

    groups[0]["always_adapt"] = True  # timm's LARS otherwise skips groups without weight decay
    return Lars(groups, lr, momentum=solver.MOMENTUM, trust_coeff=solver.LARS_TRUST, trust_clip=solver.LARS_CLIP)


def set_learning_rate(optimizer: torch.optim.Optimizer, solver: CfgNode, step: int, steps_per_epoch: int) -> float:
    """Set and return the learning rate of a step."""
    scale = solver.IMS_PER_BATCH / solver.REFERENCE_BATCH if solver.REFERENCE_BATCH else 1.0
    lr = schedule.compute_learning_rate(
        step,
        steps_per_epoch,
        solver.EPOCHS,
        base_lr=solver.BASE_LR * scale,
        kind=solver.LR_SCHEDULE,
        milestones=solver.STEPS,
        gamma=solver.GAMMA,
        warmup_epochs=solver.WARMUP_EPOCHS,
        per_step=solver.PER_STEP_LR,
    )
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr
