"""The losses of a process's batch in micro-batches (SOLVER.ACCUMULATE), in half precision (SOLVER.AMP)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.common.distributed import averaged_after


def accumulated_losses(
    model: nn.Module,
    batch: list[Any],
    count: int,
    scale: Callable[[Tensor], Tensor],
    precision: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """The losses of ``count`` micro-batches, averaged by their numbers of images.

    The backward pass of all but the last has run: gradients must be zeroed before. Batch norm sees a micro-batch at a
    time. A loss that is a mean over sampled boxes is one per micro-batch.

    Args:
        model: a detector, or DistributedDataParallel around it; its gradients are averaged over ranks once.
        scale: of a loss, for fp16.
        precision: of autocast; None: full precision.
    """
    device, sums = next(model.parameters()).device.type, dict[str, Tensor]()
    for index in range(count):
        start, stop = (len(batch) * part // count for part in (index, index + 1))
        is_last, share = index == count - 1, (stop - start) / len(batch)
        with averaged_after(model, is_last):
            with torch.autocast(device, precision, enabled=precision is not None):
                losses = {name: loss * share for name, loss in model(batch[start:stop]).items()}
            if not is_last:
                scale(torch.stack(list(losses.values())).sum()).backward()
                losses = {name: loss.detach() for name, loss in losses.items()}
        sums = {name: loss + sums[name] if sums else loss for name, loss in losses.items()}
    return sums
