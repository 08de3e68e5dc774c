"""SGD, learning rate and gradient clipping, as Detectron2 reads its SOLVER keys."""

from collections.abc import Callable, Iterable
from functools import partial
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

from pretrain.common.sgd import build_fused_sgd

from ..config import select_steps

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)


def build_optimizer(cfg: CfgNode, model: nn.Module) -> torch.optim.SGD:
    """Build SGD over the trainable parameters, in one group per weight decay: that of norms is WEIGHT_DECAY_NORM."""
    solver = cfg.SOLVER
    groups: dict[float, list[nn.Parameter]] = {}
    for module in model.modules():
        decay = solver.WEIGHT_DECAY_NORM if isinstance(module, _NORMS) else solver.WEIGHT_DECAY
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                groups.setdefault(decay, []).append(parameter)
    options: list[dict[str, Any]] = [{"params": group, "weight_decay": decay} for decay, group in groups.items()]
    optimizer = build_fused_sgd(options, solver.BASE_LR, solver.MOMENTUM, nesterov=solver.NESTEROV)
    if solver.CLIP_GRADIENTS.ENABLED:
        optimizer.register_step_pre_hook(lambda *_: clip_gradients(solver.CLIP_GRADIENTS, model.parameters()))
    return optimizer


def build_schedule(cfg: CfgNode, optimizer: torch.optim.Optimizer) -> Callable[[int], float]:
    """Build a function of the iteration (from 0) that sets the learning rate and returns it.

    It warms up to the schedule's value at the end of the warm-up, then follows the schedule.
    """
    solver = cfg.SOLVER
    end = solver.MAX_ITER
    schedule: ParamScheduler
    if solver.LR_SCHEDULER_NAME == "WarmupCosineLR":
        schedule = CosineParamScheduler(1, solver.BASE_LR_END / solver.BASE_LR)
    else:
        steps = select_steps(cfg)
        schedule = MultiStepParamScheduler([solver.GAMMA**k for k in range(len(steps) + 1)], end, milestones=steps)
    length = min(solver.WARMUP_ITERS / end, 1.0)
    warmup = LinearParamScheduler(solver.WARMUP_FACTOR * schedule(0.0), schedule(length))
    factor = CompositeParamScheduler([warmup, schedule], [length, 1 - length], ["rescaled", "fixed"])
    return partial(_set_rate, optimizer, lambda iteration: solver.BASE_LR * factor(iteration / end))


def _set_rate(optimizer: torch.optim.Optimizer, schedule: Callable[[int], float], iteration: int) -> float:
    rate = schedule(iteration)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def clip_gradients(clip: CfgNode, parameters: Iterable[nn.Parameter]) -> None:
    """Clip each parameter's gradient by value or by its own norm."""
    if clip.CLIP_TYPE == "value":
        nn.utils.clip_grad_value_(parameters, clip.CLIP_VALUE)
        return
    for parameter in parameters:
        nn.utils.clip_grad_norm_(parameter, clip.CLIP_VALUE, clip.NORM_TYPE)
