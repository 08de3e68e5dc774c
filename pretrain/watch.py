"""What the host must know about every step, read one step later so that it never waits for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .common import distributed
from .common.copies import AsyncHostCopy
from .common.errors import UserError
from .common.skipped_steps import SkippedSteps


class Watch:
    """Non-finite losses and skipped fp16 steps.

    Args:
        device: of the loss.
        scaler: of the loss; a step of fp16 whose scaled gradients overflow is skipped.
        image_name: position in the data set -> name.
        skipped_steps: by an earlier part of this run.
    """

    def __init__(
        self, device: torch.device, scaler: torch.amp.GradScaler, image_name: Callable[[int], str],
        skipped_steps: int = 0,
    ) -> None:  # fmt: skip
        self._scaler, self._image_name = scaler, image_name
        self.skipped = SkippedSteps("set SOLVER.AMP bf16 or none")
        self.skipped.total = skipped_steps
        self.skipped.see(scaler.get_scale(), 0)
        self._one = torch.ones((), device=device)
        self._sent: tuple[AsyncHostCopy, int, float, Tensor] | None = None

    @torch.no_grad()
    def step(self, loss: Tensor, step: int, lr: float, index_N: Tensor) -> None:
        """Reads the report of the step before and sends that of this one; call it when the step is complete.

        Raises:
            UserError: as `check`.
        """
        self.check()
        bad = (~loss.isfinite()).float()
        bad_anywhere = distributed.mean_(bad.clone())
        report = AsyncHostCopy(torch.stack([bad, bad_anywhere, self._scaler.scale(self._one)]))
        self._sent = (report, step, lr, index_N)

    def check(self) -> None:
        """Reads the report that `step` sent last.

        Raises:
            UserError: the loss was not finite on some rank (it names step, learning rate and that rank's images), or
                too many steps in a row were skipped. Every rank raises the same.
        """
        if self._sent is None:
            return
        report, step, lr, index_N = self._sent
        self._sent = None
        bad_here, bad_anywhere, next_scale = report.read().tolist()
        if bad_anywhere > 0:
            names = ", ".join(map(self._image_name, index_N[:8].tolist())) + (", ..." if len(index_N) > 8 else "")
            named = distributed.gather_objects(names if bad_here > 0 else "")
            rank, images = next((rank, images) for rank, images in enumerate(named) if images)
            where = f" on rank {rank}" if distributed.world_size() > 1 else ""
            raise UserError(
                f"loss is not finite at step {step}{where} (learning rate {lr:.4g}; images: {images}); lower "
                "SOLVER.BASE_LR, raise SOLVER.WARMUP_EPOCHS or set SOLVER.AMP none"
            )
        self.skipped.see(next_scale, step + 1)
