"""Statistics of frozen batch norm from the images that a detector is trained on, for every initialization alike.

A frozen ResNet keeps the statistics that its weights came with: of other images or, from random values, none at all
(mean 0, variance 1). Where frozen features are compared, this puts all initializations on the same footing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from .distributed import reported, until_stopped

T = TypeVar("T")


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
