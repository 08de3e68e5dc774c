"""Statistics of batch norm from training images: precise BN before a test, and those of frozen norms before training.

A frozen ResNet keeps the statistics that its weights came with: of other images or, from random values, none at all
(mean 0, variance 1). Where frozen features are compared, SOLVER.FROZEN_BN_ITER puts all initializations on the same
footing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from fvcore.nn.precise_bn import get_bn_modules, update_bn_stats
from torch import Tensor, nn
from torch.nn import functional as F

from pretrain.common.distributed import mean_

from .distributed import log_progress, raise_if_stopped
from .samplers import mix

if TYPE_CHECKING:
    from .state import State


def precise_bn(state: State, iteration: int) -> None:
    """Replaces the running statistics by the true averages over some batches, the same on every rank."""
    norms, settings = get_bn_modules(state.model), state.cfg.TEST.PRECISE_BN
    if not settings.ENABLED or not norms:
        return
    count = min(settings.NUM_ITER, iteration + 1)  # more would take longer than a short training
    state.log.info(f"precise BN over {count} batches")
    torch.manual_seed(mix(state.cfg.SEED, iteration, state.rank))
    batches = _batches(state, mix(state.cfg.SEED, iteration, 0), count, "precise BN")
    with state.engine.storage(iteration):  # what the model notes meanwhile is dropped
        update_bn_stats(state.model, batches, count)
    if state.world > 1:
        pool_batch_norm(norms)


def _batches(state: State, seed: int, count: int, what: str) -> Iterator[list[dict[str, Any]]]:
    """The first ``count`` training batches under ``seed``; before each, all ranks raise Stopped if one was asked to."""
    batches = state.batches(seed=seed, start=0, workers=0)
    for batch in log_progress(islice(batches, count), count, what, state.log.info):
        raise_if_stopped()
        yield batch


@torch.no_grad()
def pool_batch_norm(norms: Iterable[nn.Module]) -> None:
    """Replaces running means and variances in place with those of the images of all ranks.

    The pooled variance is the mean of variances plus the variance of means (law of total variance).
    """
    for norm in norms:
        mean, var = norm.get_buffer("running_mean"), norm.get_buffer("running_var")
        moments = mean_(torch.stack([mean.double(), var.double() + mean.double() ** 2]))
        mean.copy_(moments[0])
        var.copy_(moments[1] - moments[0] ** 2)


@torch.no_grad()
def estimate_frozen_bn(state: State, count: int) -> None:
    """Sets means and variances of frozen norms to those of their inputs over ``count`` training batches of every rank.

    Meanwhile each norm normalizes with the statistics of the batch, as precise BN does, so that those behind it see
    normalized inputs. Batch norms that are trained come behind all frozen ones, and are evaluated. The model is left in
    evaluation mode.

    Raises:
        Stopped: a stop was requested; nothing was changed.
    """
    model, engine = state.model.eval(), state.engine
    norms = [module for module in model.modules() if isinstance(module, engine.FROZEN_NORM)]
    moments = {norm: torch.zeros_like(norm.get_buffer("bias"), dtype=torch.float64).repeat(3, 1) for norm in norms}

    def normalize(norm: nn.Module, inputs: tuple[Tensor], _: Tensor) -> Tensor:
        x = inputs[0].float()
        moments[norm][:2] += torch.stack([power.sum((0, 2, 3), dtype=torch.float64) for power in (x, x * x)])
        moments[norm][2] += x.numel() // x.shape[1]
        weight, bias = norm.get_buffer("weight"), norm.get_buffer("bias")
        eps: Any = norm.eps
        return F.batch_norm(x, None, None, weight, bias, training=True, eps=eps).to(inputs[0].dtype)

    with ExitStack() as hooks:
        for norm in norms:
            hooks.callback(norm.register_forward_hook(normalize).remove)
        for batch in _batches(state, state.cfg.SEED, count, "frozen batch norm"):
            engine.backbone_features(model, batch)
    for norm in norms:
        total, squares, pixels = mean_(moments[norm])
        if pixels.any():  # in the backbone
            mean = total / pixels
            norm.get_buffer("running_mean").copy_(mean)
            norm.get_buffer("running_var").copy_((squares / pixels - mean**2).clamp(min=0))
    state.log.info(f"frozen batch norms take their statistics from {count} training batches")
