"""One iteration of fine-tuning: data, losses, gradients, update."""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.common.distributed import average_gradients

from .trainer import Trainer
from .training.losses import send_losses
from .training.samplers import ModelInput, derive_seed


def run_step(trainer: Trainer, ddp_model: nn.Module, batches: Iterator[list[ModelInput]], iteration: int) -> None:
    """Run one iteration: data, losses, gradients, update.

    Raises:
        UserError: a loss of the previous iteration was not finite.
    """
    cfg = trainer.cfg
    scaler = trainer.scaler
    trainer.iter = trainer.storage.iter = iteration
    trainer.call_hooks("before_step")
    started = time.perf_counter()
    batch = next(batches)
    seconds_waited = time.perf_counter() - started
    rate = trainer.schedule(iteration)
    # The sampling of anchors and proposals depends on the seed, the iteration and the rank, not on history.
    torch.manual_seed(derive_seed(cfg.SEED, iteration, trainer.rank))
    trainer.optimizer.zero_grad()
    losses = accumulate_losses(ddp_model, batch, cfg.SOLVER.ACCUMULATE, scaler.scale, trainer.precision)
    total = torch.stack(list(losses.values())).sum()
    scaler.scale(total).backward()
    trainer.call_hooks("after_backward")
    loss_scale = scaler.scale(torch.ones_like(total, dtype=torch.float32))
    sent = send_losses(losses, loss_scale, iteration, rate, [image["file_name"] for image in batch])
    if cfg.SOLVER.CLIP_GRADIENTS.ENABLED:
        scaler.unscale_(trainer.optimizer)  # the optimizer's step clips
    scaler.step(trainer.optimizer)
    scaler.update()
    trainer.read_losses()  # of the previous iteration: the device works on this one meanwhile
    trainer.unread = sent, {"time": time.perf_counter() - started, "data_time": seconds_waited}
    trainer.call_hooks("after_step")
    trainer.write_images()


def accumulate_losses(
    model: nn.Module,
    batch: list[Any],
    accumulate: int,
    scale: Callable[[Tensor], Tensor],
    precision: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Return the mean losses of ``accumulate`` micro-batches of equal size.

    The backward pass of all but the last has run: gradients must be zeroed before. Batch norm sees one micro-batch at
    a time. A loss that is a mean over sampled boxes is computed per micro-batch.

    Args:
        model: a detector, or DistributedDataParallel around it; its gradients are averaged over ranks once.
        scale: scales a loss, for fp16.
        precision: autocast's data type; None for full precision.
    """
    device = next(model.parameters()).device.type
    sums: dict[str, Tensor] = {}
    size = len(batch) // accumulate
    for first in range(0, len(batch), size):
        images = batch[first : first + size]
        is_last = first + size == len(batch)
        with average_gradients(model, is_last):
            with torch.autocast(device, precision) if precision else nullcontext():
                losses = {name: loss / accumulate for name, loss in model(images).items()}
            if not is_last:
                scale(torch.stack(list(losses.values())).sum()).backward()
                losses = {name: loss.detach() for name, loss in losses.items()}
        sums = {name: loss + sums[name] if sums else loss for name, loss in losses.items()}
    return sums
