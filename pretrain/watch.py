"""What the host must know of every step, read one step later so that it never waits for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from . import distributed
from .common import interrupt, process_group
from .common.copies import AsyncHostCopy
from .common.errors import UserError

_MAX_SKIPPED = 50  # fp16 steps in a row; the scale has then fallen by 2^50, and no smaller one will help


class Watch:
    """Non-finite losses, skipped fp16 steps and requests to stop; averages BN statistics over ranks.

    One collective per step carries all of it. The averages are those of the ranks' moments, so that a checkpoint of
    rank 0 is right for every rank, and resuming loses nothing.

    Args:
        model: its BN statistics are averaged.
        scaler: of the loss.
        image_name: position in the data set -> name.
        skipped_steps: by an earlier part of this run.

    Attributes:
        skipped_steps: fp16 optimizer steps skipped so far because the scaled gradients overflowed.
    """

    def __init__(
        self, model: nn.Module, scaler: torch.amp.GradScaler, image_name: Callable[[int], str], skipped_steps: int = 0
    ) -> None:
        self._scaler, self._image_name, self.skipped_steps = scaler, image_name, skipped_steps
        self._statistics = [b for b in model.buffers() if b.is_floating_point() and b.ndim == 1]
        self._one = torch.ones((), device=next(model.parameters()).device)
        self._scale = scaler.scale(self._one)
        self._skipped_in_a_row = 0
        self._on_its_way: tuple[AsyncHostCopy, int, float, Tensor] | None = None
        self._stop_agreed = False

    @torch.no_grad()
    def step(self, loss: Tensor, step: int, lr: float, index_N: Tensor) -> None:
        """Reads the report of the step before and sends that of this one: call it when the step is complete.

        Raises:
            UserError: as `check`.
        """
        self.check()
        here = (~loss.isfinite()).float()
        shared = torch.stack([here, torch.full_like(here, bool(interrupt.stop_requested()))])
        if distributed.world_size() > 1:
            flat = distributed.mean_(torch.cat([shared, *self._statistics]))
            torch._foreach_copy_(self._statistics, list(flat[2:].split([b.numel() for b in self._statistics])))
            shared = flat[:2]
        before, self._scale = self._scale, self._scaler.scale(self._one)  # it falls where the step was skipped
        report = AsyncHostCopy(torch.cat([here[None], shared, torch.stack([before, self._scale])]))
        self._on_its_way = (report, step, lr, index_N)

    def check(self) -> None:
        """Reads the report that `step` sent last.

        Raises:
            UserError: the loss was not finite on some rank (it names step, learning rate and that rank's images), or
                50 steps in a row were skipped. Every rank raises the same.
        """
        if self._on_its_way is None:
            return
        report, step, lr, index_N = self._on_its_way
        self._on_its_way = None
        here, anywhere, stop, scale, next_scale = report.read().tolist()
        self._stop_agreed = stop > 0
        if anywhere > 0:
            names = ", ".join(map(self._image_name, index_N[:8].tolist())) + (", ..." if len(index_N) > 8 else "")
            named = process_group.gather_objects(names if here > 0 else "")
            rank, images = next((rank, images) for rank, images in enumerate(named) if images)
            where = f" on rank {rank}" if distributed.world_size() > 1 else ""
            raise UserError(
                f"loss is not finite at step {step}{where} (learning rate {lr:.4g}; images: {images}); lower "
                "SOLVER.BASE_LR, raise SOLVER.WARMUP_EPOCHS or set SOLVER.AMP none"
            )
        skipped = next_scale < scale
        self.skipped_steps += skipped
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row >= _MAX_SKIPPED:
            raise UserError(
                f"fp16: the {_MAX_SKIPPED} steps up to step {step} were all skipped, their gradients overflow even at "
                f"a loss scale of {scale:.3g}; set SOLVER.AMP bf16 or none, or lower SOLVER.BASE_LR"
            )

    def stop_agreed(self) -> str:
        """The reason to stop, if any rank was asked to; an empty string on no rank or on all.

        With several ranks it is the report of the step before the last, which has reached the host: waiting for the
        last one's would leave the device idle after every step.
        """
        reason = interrupt.stop_requested()
        if distributed.world_size() == 1:
            return reason
        return (reason or "another rank was asked to stop") if self._stop_agreed else ""
