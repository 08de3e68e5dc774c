"""SGD, learning rate and gradient clipping with the meaning that Detectron2 gives its SOLVER keys."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from fvcore.common.config import CfgNode
from fvcore.common.param_scheduler import (
    CompositeParamScheduler,
    CosineParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
    ParamScheduler,
)
from torch import nn

from pretrain.common.sgd import fused_sgd

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)


def build_optimizer(cfg: CfgNode, model: nn.Module) -> torch.optim.SGD:
    """SGD over the trainable parameters, in one group per weight decay: that of norms is WEIGHT_DECAY_NORM."""
    solver, clip = cfg.SOLVER, cfg.SOLVER.CLIP_GRADIENTS
    groups: dict[float, list[nn.Parameter]] = {}
    for module in model.modules():
        decay = solver.WEIGHT_DECAY_NORM if isinstance(module, _NORMS) else solver.WEIGHT_DECAY
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                groups.setdefault(decay, []).append(parameter)
    described: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()
    ]
    optimizer = fused_sgd(described, solver.BASE_LR, solver.MOMENTUM, nesterov=solver.NESTEROV)
    if clip.ENABLED:
        optimizer.register_step_pre_hook(lambda *_: clip_gradients(clip, model.parameters()))
    return optimizer


def build_schedule(cfg: CfgNode, optimizer: torch.optim.Optimizer) -> Callable[[int], float]:
    """Iteration (from 0) -> learning rate, which it sets: warm-up to the schedule's value where it ends, then that."""
    solver, end = cfg.SOLVER, cfg.SOLVER.MAX_ITER
    schedule: ParamScheduler
    if solver.LR_SCHEDULER_NAME == "WarmupCosineLR":
        schedule = CosineParamScheduler(1, solver.BASE_LR_END / solver.BASE_LR)
    else:
        steps = [step for step in solver.STEPS if step < end]
        if len(steps) < len(solver.STEPS):
            logging.getLogger("transfer").warning(f"SOLVER.STEPS at or after MAX_ITER {end} are ignored")
        schedule = MultiStepParamScheduler([solver.GAMMA**k for k in range(len(steps) + 1)], end, milestones=steps)
    length = min(solver.WARMUP_ITERS / end, 1.0)
    warmup = LinearParamScheduler(solver.WARMUP_FACTOR * schedule(0.0), schedule(length))
    whole = CompositeParamScheduler([warmup, schedule], [length, 1 - length], ["rescaled", "fixed"])

    def set_rate(iteration: int) -> float:
        rate = solver.BASE_LR * whole(iteration / end)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate

    return set_rate


def clip_gradients(clip: CfgNode, parameters: Iterable[nn.Parameter]) -> None:
    """Clips each parameter's gradient by value or by its own norm."""
    if clip.CLIP_TYPE == "value":
        nn.utils.clip_grad_value_(parameters, clip.CLIP_VALUE)
        return
    for parameter in parameters:
        nn.utils.clip_grad_norm_(parameter, clip.CLIP_VALUE, clip.NORM_TYPE)
