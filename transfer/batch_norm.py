"""Statistics of batch norm from training images: precise BN before a test, and those of frozen norms before training.

A frozen ResNet keeps the statistics that its weights came with: of other images or, from random values, none at all
(mean 0, variance 1). Where frozen features are compared, SOLVER.FROZEN_BN_ITER puts all initializations on the same
footing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from fvcore.nn.precise_bn import get_bn_modules, update_bn_stats
from torch import Tensor, nn
from torch.nn import functional as F

from .distributed import reported, until_stopped
from .samplers import mix

if TYPE_CHECKING:
    from .state import State

T = TypeVar("T")


def precise_bn(state: State, iteration: int) -> None:
    """Replaces the running statistics by the true averages over some batches, the same on every rank."""
    norms, settings = get_bn_modules(state.model), state.cfg.TEST.PRECISE_BN
    if not settings.ENABLED or not norms:
        return
    count = min(settings.NUM_ITER, iteration + 1)  # more would take longer than a short training
    state.log.info(f"precise BN over {count} batches")
    torch.manual_seed(mix(state.cfg.SEED, iteration, state.rank))
    batches = state.batches(seed=mix(state.cfg.SEED, iteration, 0), start=0, workers=0)
    with state.engine.storage(iteration):  # what the model notes meanwhile is dropped
        update_bn_stats(state.model, reported(until_stopped(batches), count, "precise BN", state.log.info), count)
    if state.world > 1:
        pool_batch_norm(norms)


@torch.no_grad()
def pool_batch_norm(norms: Iterable[torch.nn.Module]) -> None:
    """Replaces running means and variances in place with those of the images of all ranks.

    The pooled variance is the mean of variances plus the variance of means (law of total variance).
    """
    for norm in norms:
        mean, var = norm.get_buffer("running_mean"), norm.get_buffer("running_var")
        moments = torch.stack([mean.double(), var.double() + mean.double() ** 2])
        dist.all_reduce(moments)
        moments /= dist.get_world_size()
        mean.copy_(moments[0])
        var.copy_(moments[1] - moments[0] ** 2)


def settle_frozen_bn(state: State, count: int) -> None:
    """Sets the statistics of the frozen norms from the first batches of the training."""
    model, engine = state.model, state.engine
    settle(
        model,
        [module for module in model.modules() if isinstance(module, engine.FROZEN_NORM)],
        lambda batch: engine.backbone_features(model, batch),
        state.batches(seed=state.cfg.SEED, start=0, workers=0), count, state.log.info,
    )  # fmt: skip


@torch.no_grad()
def settle(
    model: nn.Module,
    norms: Sequence[nn.Module],
    features: Callable[[T], Any],
    batches: Iterable[T],
    count: int,
    log: Callable[[str], None],
) -> None:
    """Sets means and variances of frozen norms to those of their inputs over ``count`` batches of every rank.

    Meanwhile each norm normalizes with the statistics of the batch, as precise BN does, so that those behind it see
    normalized inputs. Batch norms that are trained come behind all frozen ones, and are evaluated.

    Args:
        model: is left in evaluation mode.
        norms: FrozenBatchNorm2d of torchvision or Detectron2; those that ``features`` does not run keep their values.
        features: runs the network that holds them on a batch.

    Raises:
        Stopped: a stop was requested; nothing was changed.
    """
    model.eval()
    sums = {norm: torch.zeros_like(norm.get_buffer("running_mean"), dtype=torch.float64).repeat(2, 1) for norm in norms}
    pixels = dict.fromkeys(norms, 0)

    def normalize(norm: nn.Module, inputs: tuple[Tensor], _: Tensor) -> Tensor:
        x = inputs[0].float()
        sums[norm] += torch.stack([power.sum((0, 2, 3), dtype=torch.float64) for power in (x, x * x)])
        pixels[norm] += x.numel() // x.shape[1]
        weight, bias = norm.get_buffer("weight"), norm.get_buffer("bias")
        eps: Any = norm.eps
        return F.batch_norm(x, None, None, weight, bias, training=True, eps=eps).to(inputs[0].dtype)

    hooks = [norm.register_forward_hook(normalize) for norm in norms]
    try:
        for batch in islice(reported(until_stopped(batches), count, "frozen batch norm", log), count):
            features(batch)
    finally:
        for hook in hooks:
            hook.remove()
    for norm in (norm for norm in norms if pixels[norm]):
        moments = torch.cat([sums[norm].flatten(), sums[norm].new_tensor([pixels[norm]])])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(moments)
        mean, square = (moments[:-1] / moments[-1]).unflatten(0, (2, -1))
        norm.get_buffer("running_mean").copy_(mean)
        norm.get_buffer("running_var").copy_((square - mean**2).clamp(min=0))
    log(f"{sum(map(bool, pixels.values()))} frozen batch norms take their statistics from {count} training batches")
