"""The losses of an iteration, which the host reads one iteration later: reading them at once waits for the device."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.common import distributed
from pretrain.common.device import AsyncHostCopy

from .checkpoints import build_divergence_error


@dataclass(frozen=True)
class SentLosses:
    """The losses of an iteration, on their way to the host, with what describes it.

    Attributes:
        names: the names of the losses.
        copy: their means over ranks, and the loss scale at the start of the iteration.
        rate: the learning rate.
        files: the names of this rank's images.
    """

    names: list[str]
    copy: AsyncHostCopy
    iteration: int
    rate: float
    files: list[str]

    def read(self) -> tuple[dict[str, float], float]:
        """Return the losses and their sum as ``total_loss``, and the loss scale; the ranks need not read together.

        Raises:
            UserError: a loss is not finite on some rank; it names the iteration, the losses and this rank's images.
        """
        *values, loss_scale = self.copy.read().tolist()
        means = dict(zip(self.names, values, strict=True))
        if not all(map(math.isfinite, values)):
            loss_values = ", ".join(f"{name} {value:.3g}" for name, value in means.items())
            when = f"at iteration {self.iteration} (learning rate {self.rate:.3g})"
            raise build_divergence_error(f" {when}: {loss_values}; images: {', '.join(self.files)}")
        return {"total_loss": sum(values), **means}, loss_scale


def send_losses(
    losses: dict[str, Tensor], loss_scale: Tensor, iteration: int, rate: float, files: list[str]
) -> SentLosses:
    """Start to copy the means of the losses over ranks to the host; every rank must call this."""
    stacked = torch.stack([value.detach().float() for value in (*losses.values(), loss_scale)])
    return SentLosses(list(losses), AsyncHostCopy(distributed.mean_(stacked)), iteration, rate, files)
