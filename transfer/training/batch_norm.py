"""Estimates batch-norm statistics from training images: precise BN before evaluation, frozen BN before training.

A frozen ResNet keeps the statistics that its weights came with: those of other images or, from random values, none at
all (mean 0, variance 1). Where frozen features are compared, SOLVER.FROZEN_BN_ITER puts all initializations on the same
footing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from fvcore.nn.precise_bn import get_bn_modules, update_bn_stats
from torch import Tensor, nn
from torch.nn import functional as F

from pretrain.common.distributed import mean_
from pretrain.common.errors import UserError, count_noun, one_line

from ..distributed import log_progress
from .samplers import ModelInput, derive_seed

if TYPE_CHECKING:
    from ..trainer import Trainer

log = logging.getLogger(__name__)


@contextmanager
def explain_single_values() -> Iterator[None]:
    """Raise UserError if a batch norm has a single value per channel to normalize, which torch refuses.

    The last feature map of an image of up to 32 pixels is a single pixel.
    """
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        problem = f"a batch norm has one value per channel ({one_line(error)})"
        remedy = "raise SOLVER.IMS_PER_BATCH or INPUT.MIN_SIZE_TRAIN, or lower SOLVER.ACCUMULATE"
        raise UserError(f"{problem}; {remedy}") from error


def precise_bn(trainer: Trainer, iteration: int) -> None:
    """Replace the running statistics by the true averages over some batches, the same on every rank."""
    norms = get_bn_modules(trainer.model)
    settings = trainer.cfg.TEST.PRECISE_BN
    if not settings.ENABLED or not norms:
        return
    count = min(settings.NUM_ITER, iteration + 1)  # limited to the iterations trained so far
    log.info(f"precise BN over {count_noun(count, 'batch', 'batches')}")
    torch.manual_seed(derive_seed(trainer.cfg.SEED, iteration, trainer.rank))
    batches = _load_batches(trainer, derive_seed(trainer.cfg.SEED, iteration, 0), count, "precise BN")
    with trainer.engine.storage(iteration):  # events logged meanwhile are discarded
        update_bn_stats(trainer.model, batches, count)
    if trainer.world_size > 1:
        pool_batch_norm(norms)


def _load_batches(trainer: Trainer, seed: int, count: int, activity: str) -> Iterator[list[ModelInput]]:
    """Yield the first training batches under ``seed``; before each, all ranks raise Stopped if one was asked to."""
    batches = islice(trainer.data.batches(seed=seed, start=0, workers=0), count)
    for batch in log_progress(batches, count, activity):
        trainer.engine.stop.raise_now()
        yield batch


@torch.no_grad()
def pool_batch_norm(norms: Iterable[nn.Module]) -> None:
    """Replace running means and variances in place with those of the images of all ranks.

    The pooled variance is the mean of variances plus the variance of means (law of total variance).
    """
    for norm in norms:
        mean = norm.get_buffer("running_mean")
        var = norm.get_buffer("running_var")
        moments = mean_(torch.stack([mean.double(), var.double() + mean.double() ** 2]))
        mean.copy_(moments[0])
        var.copy_(moments[1] - moments[0] ** 2)


class _Moments:
    """Forward hook of a frozen norm that normalizes with the statistics of the batch, and sums its inputs' moments."""

    def __init__(self, norm: nn.Module) -> None:
        self.sums = torch.zeros_like(norm.get_buffer("bias"), dtype=torch.float64).repeat(3, 1)  # x, x^2, pixels

    def __call__(self, norm: nn.Module, inputs: tuple[Tensor], _: Tensor) -> Tensor:
        x = inputs[0].float()
        self.sums[:2] += torch.stack([power.sum((0, 2, 3), dtype=torch.float64) for power in (x, x * x)])
        self.sums[2] += x.numel() // x.shape[1]
        weight = norm.get_buffer("weight")
        bias = norm.get_buffer("bias")
        eps: Any = norm.eps
        return F.batch_norm(x, None, None, weight, bias, training=True, eps=eps).to(inputs[0].dtype)

    def write(self, norm: nn.Module) -> None:
        """Write the mean and variance of all ranks' inputs into ``norm``, if it had any."""
        total, squares, pixels = mean_(self.sums)
        if pixels.any():
            mean = total / pixels
            norm.get_buffer("running_mean").copy_(mean)
            norm.get_buffer("running_var").copy_((squares / pixels - mean**2).clamp(min=0))


@torch.no_grad()
def estimate_frozen_bn(trainer: Trainer, num_batches: int) -> None:
    """Set means and variances of frozen norms to those of their inputs over training batches of every rank.

    Meanwhile each norm normalizes with the statistics of the batch, as precise BN does, so that those behind it see
    normalized inputs. Trainable norms follow the frozen ones and stay in evaluation mode, in which the model is left.
    Norms outside the backbone are unchanged.

    Raises:
        Stopped: a stop was requested; nothing was changed.
    """
    model = trainer.model.eval()
    moments = {norm: _Moments(norm) for norm in model.modules() if isinstance(norm, trainer.engine.frozen_norm)}
    with ExitStack() as hooks:
        for norm, norm_moments in moments.items():
            hooks.callback(norm.register_forward_hook(norm_moments).remove)
        for batch in _load_batches(trainer, trainer.cfg.SEED, num_batches, "frozen batch norm"):
            trainer.engine.run_backbone(model, batch)
    for norm, norm_moments in moments.items():
        norm_moments.write(norm)
    log.info(f"frozen batch norms take their statistics from {num_batches} training batches")
