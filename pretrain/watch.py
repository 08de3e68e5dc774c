"""What the host must know about every step, read one step later so that it never waits for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .common import distributed, interrupt, process_group
from .common.copies import AsyncHostCopy
from .common.errors import UserError
from .common.skipped_steps import SkippedSteps


class Watch:
    """Non-finite losses, skipped fp16 steps and requests to stop, which one collective per step shares.

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
        self._stop_agreed = False

    @torch.no_grad()
    def step(self, loss: Tensor, step: int, lr: float, index_N: Tensor) -> None:
        """Reads the report of the step before and sends that of this one; call it when the step is complete.

        Raises:
            UserError: as `check`.
        """
        self.check()
        bad = (~loss.isfinite()).float()
        shared = torch.stack([bad, torch.full_like(bad, bool(interrupt.stop_requested()))])
        if distributed.world_size() > 1:
            shared = distributed.mean_(shared)
        report = AsyncHostCopy(torch.cat([bad[None], shared, self._scaler.scale(self._one)[None]]))
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
        bad_here, bad_anywhere, stop, next_scale = report.read().tolist()
        self._stop_agreed = stop > 0
        if bad_anywhere > 0:
            names = ", ".join(map(self._image_name, index_N[:8].tolist())) + (", ..." if len(index_N) > 8 else "")
            named = process_group.gather_objects(names if bad_here > 0 else "")
            rank, images = next((rank, images) for rank, images in enumerate(named) if images)
            where = f" on rank {rank}" if distributed.world_size() > 1 else ""
            raise UserError(
                f"loss is not finite at step {step}{where} (learning rate {lr:.4g}; images: {images}); lower "
                "SOLVER.BASE_LR, raise SOLVER.WARMUP_EPOCHS or set SOLVER.AMP none"
            )
        self.skipped.see(next_scale, step + 1)

    def stop_agreed(self) -> str:
        """The reason to stop if any rank was asked to, else an empty string; every rank decides alike.

        With several ranks the answer comes from the report of the step before the last, which has reached the host:
        waiting for the last one would leave the device idle after every step.
        """
        reason = interrupt.stop_requested()
        if distributed.world_size() == 1:
            return reason
        return (reason or process_group.STOP_ELSEWHERE) if self._stop_agreed else ""
