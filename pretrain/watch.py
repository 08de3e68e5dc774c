"""What may go wrong in a run: a loss that is not finite, skipped fp16 steps, a collapse, a shortcut, a loss that jumps.

What the host must know about every step is read one step later, so that it never waits for the device.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .common import distributed
from .common.copies import AsyncHostCopy
from .common.errors import UserError
from .common.skipped_steps import SkippedSteps

_COLLAPSED = 0.05  # feature spread; healthy runs log 0.6 to 1.0
_SOLVED = 99.5  # queue accuracy, percent
_IN_A_ROW = 3  # a line holds the numbers of one step, and one step may be an exception
_LOSSES = 20  # a jump is measured against so many lines

CAUSES = {
    "feature_spread": "the features collapse: every image gets nearly the same one. Usual causes: a learning rate "
    "that is too high (SOLVER.BASE_LR), a METHOD.KEY_TEMPERATURE near METHOD.TEMPERATURE, images that hardly differ",
    "queue_accuracy": "the query finds its key almost always, so it hardly learns any more. Usual causes: query and "
    "keys share batch statistics (MODEL.BN_GROUPS 1), views that hardly differ (views.png shows them), a small "
    "MODEL.QUEUE_SIZE",
    "loss": "Usual causes: a learning rate that is too high (SOLVER.BASE_LR), a warm-up that is too short "
    "(SOLVER.WARMUP_EPOCHS), damaged images",
}


class Watch:
    """Non-finite losses, skipped fp16 steps, and the signs of a collapse in what is logged.

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
        self._in_a_row = {"feature_spread": 0, "queue_accuracy": 0}
        self._losses: collections.deque[float] = collections.deque(maxlen=_LOSSES)

    @torch.no_grad()
    def step(self, loss: Tensor, step: int, lr: float, index_N: Tensor) -> None:
        """Reads the report of the step before (see `check`) and sends that of this one, which is complete."""
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

    def warnings(self, step: int, epoch: float, values: Mapping[str, float]) -> list[str]:
        """Lines for the log; collapse and shortcut are reported once, a jump of the loss each time.

        Args:
            epoch: epochs completed; in the first one the features of a random network are alike, and the queue fills.
            values: of one log line: ``loss``, and what the method reports of ``feature_spread`` (1: spread evenly, 0:
                collapsed) and ``queue_accuracy`` (percent).
        """
        lines = []
        bad = {"feature_spread": values.get("feature_spread", 1) < _COLLAPSED,
               "queue_accuracy": values.get("queue_accuracy", 0) > _SOLVED}  # fmt: skip
        for name, seen in self._in_a_row.items():
            if seen < _IN_A_ROW:
                self._in_a_row[name] = seen + 1 if bad[name] and epoch >= 1 else 0
                if self._in_a_row[name] == _IN_A_ROW:
                    lines.append(f"step {step}: {name} is {values[name]:.3g}: {CAUSES[name]}")
        loss = values["loss"]
        if len(self._losses) == _LOSSES:
            mean, deviation = statistics.fmean(self._losses), statistics.stdev(self._losses)
            if loss > mean + max(6 * deviation, 0.3 * abs(mean)):
                lines.append(
                    f"step {step}: the loss jumped to {loss:.4g}, from {mean:.4g} on average of {_LOSSES} lines. "
                    + CAUSES["loss"]
                )
                self._losses.clear()
        self._losses.append(loss)
        return lines
