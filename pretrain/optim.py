"""Optimizers by key: SGD (the recipes'), AdamW, LARS (timm's)."""

from __future__ import annotations

import torch
from fvcore.common.config import CfgNode
from torch import nn

from .common.sgd import fused_sgd


def build_optimizer(model: nn.Module, solver: CfgNode) -> torch.optim.Optimizer:
    """SGD decays every parameter, as MoCo's recipe does; AdamW and LARS leave biases and norm parameters alone.

    A layer's rate under LARS is lr times its trust ratio (You et al. 2017); with LARS_CLIP it is the smaller of the
    two, as in LARC and solo-learn.
    SGD and AdamW run fused, in one pass over the parameters instead of several.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    lr, decay = solver.BASE_LR, solver.WEIGHT_DECAY
    if solver.OPTIMIZER == "sgd":
        return fused_sgd(trained, lr, solver.MOMENTUM, weight_decay=decay)
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if solver.OPTIMIZER == "adamw":
        return torch.optim.AdamW(groups, lr, fused=True)
    from timm.optim.lars import Lars  # slow to import

    groups[0]["always_adapt"] = True  # without weight decay, too
    return Lars(groups, lr, momentum=solver.MOMENTUM, trust_coeff=solver.LARS_TRUST, trust_clip=solver.LARS_CLIP)
