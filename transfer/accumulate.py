"""A detector in training: a process's batch in parts (SOLVER.ACCUMULATE), in half precision (SOLVER.AMP)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.common.distributed import averaged_after


class Accumulated(nn.Module):
    """A detector whose losses are those of the batch in ``count`` parts, averaged by their numbers of images.

    The forward pass returns the losses, and has run the backward pass of all parts but the last: gradients must be
    zeroed before it. Batch norm sees a part at a time. A loss that is a mean over sampled boxes is one per part.

    Args:
        model: a detector, or DistributedDataParallel around it; its gradients are averaged over ranks once.
        scale: of a loss, for fp16.
        precision: of autocast in training; None: full precision, or an autocast around it.
    """

    def __init__(
        self, model: nn.Module, count: int, scale: Callable[[Tensor], Tensor], precision: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.model, self._count, self._scale, self._precision = model, count, scale, precision

    def forward(self, batch: list[Any]) -> Any:
        device = next(self.model.parameters()).device.type
        if not self.training or self._precision is None:
            return self._forward(batch)
        with torch.autocast(device, self._precision):
            return self._forward(batch)

    def _forward(self, batch: list[Any]) -> Any:
        if self._count == 1 or not self.training:
            return self.model(batch)
        sums: dict[str, Tensor] = {}
        for index in range(self._count):
            start, stop = (len(batch) * part // self._count for part in (index, index + 1))
            is_last, share = index == self._count - 1, (stop - start) / len(batch)
            with averaged_after(self.model, is_last):
                losses = {name: loss * share for name, loss in self.model(batch[start:stop]).items()}
                if not is_last:
                    total = torch.stack(list(losses.values())).sum()
                    with torch.autocast(total.device.type, enabled=False):
                        self._scale(total).backward()
                    losses = {name: loss.detach() for name, loss in losses.items()}
            sums = {name: loss + sums.get(name, 0) for name, loss in losses.items()}
        return sums
