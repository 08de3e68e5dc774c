"""SGD, learning rate and gradient clipping with the meaning that Detectron2 gives its SOLVER keys."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from fvcore.common.config import CfgNode
from fvcore.common.param_scheduler import (
    CompositeParamScheduler,
    ConstantParamScheduler,
    CosineParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
    ParamScheduler,
    StepWithFixedGammaParamScheduler,
)
from torch import nn

from pretrain.common.sgd import fused_sgd

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)


def build_optimizer(cfg: CfgNode, model: nn.Module) -> torch.optim.SGD:
    """SGD over the trainable parameters, one group for each pair of weight decay and learning-rate factor.

    A norm's parameters decay by WEIGHT_DECAY_NORM, biases by WEIGHT_DECAY_BIAS (None: as the rest) and learn at
    BIAS_LR_FACTOR; for a norm's bias the bias's keys count. Each group keeps its ``factor``.
    """
    solver, clip = cfg.SOLVER, cfg.SOLVER.CLIP_GRADIENTS
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            decay = solver.WEIGHT_DECAY_NORM if isinstance(module, _NORMS) else solver.WEIGHT_DECAY
            factor = 1.0
            if name == "bias":
                factor = solver.BIAS_LR_FACTOR
                decay = decay if solver.WEIGHT_DECAY_BIAS is None else solver.WEIGHT_DECAY_BIAS
            groups.setdefault((decay, factor), []).append(parameter)
    described: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": decay, "factor": factor}
        for (decay, factor), parameters in groups.items()
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
    elif solver.LR_SCHEDULER_NAME == "WarmupStepWithFixedGammaLR":
        schedule = StepWithFixedGammaParamScheduler(1.0, solver.NUM_DECAYS, solver.GAMMA, end)
    else:
        steps = [step for step in solver.STEPS if step < end]
        if len(steps) < len(solver.STEPS):
            logging.getLogger("transfer").warning(f"SOLVER.STEPS at or after MAX_ITER {end} are ignored")
        schedule = MultiStepParamScheduler([solver.GAMMA**k for k in range(len(steps) + 1)], end, milestones=steps)
    length = min(solver.WARMUP_ITERS / end, 1.0)
    start = solver.WARMUP_FACTOR * schedule(0.0)
    reached = schedule(0.0) if solver.RESCALE_INTERVAL else schedule(length)
    warmup = (
        ConstantParamScheduler(start) if solver.WARMUP_METHOD == "constant" else LinearParamScheduler(start, reached)
    )
    scaling = ["rescaled", "rescaled" if solver.RESCALE_INTERVAL else "fixed"]
    whole = CompositeParamScheduler([warmup, schedule], [length, 1 - length], scaling)

    def set_rate(iteration: int) -> float:
        rate = solver.BASE_LR * whole(iteration / end)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        return rate

    return set_rate


def clip_gradients(clip: CfgNode, parameters: Iterable[nn.Parameter]) -> None:
    """Clips each parameter's gradient by value or by its own norm."""
    if clip.CLIP_TYPE == "value":
        nn.utils.clip_grad_value_(parameters, clip.CLIP_VALUE)
        return
    for parameter in parameters:
        nn.utils.clip_grad_norm_(parameter, clip.CLIP_VALUE, clip.NORM_TYPE)
