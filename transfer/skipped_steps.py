"""How often fp16 skips an optimizer step, counted alike by both engines."""

from __future__ import annotations

from pretrain.common.errors import UserError

MAX_IN_A_ROW = 50  # the loss scale has then fallen by 2^50, and no smaller one will help


class SkippedSteps:
    """Counts the steps that a gradient scaler skips, as scaled gradients overflow: the loss scale then falls.

    Attributes:
        total: up to the iteration before the one whose scale was seen last.
        scale: the one seen last; None before the first.
    """

    def __init__(self) -> None:
        self.total = self._in_a_row = 0
        self.scale: float | None = None

    def see(self, scale: float, iteration: int) -> None:
        """Takes the loss scale that ``iteration`` began with, of every iteration in turn.

        Raises:
            UserError: MAX_IN_A_ROW steps before this iteration were all skipped.
        """
        skipped = self.up_to(scale) - self.total
        self.total += skipped
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        self.scale = scale
        if self._in_a_row >= MAX_IN_A_ROW:
            raise UserError(
                f"fp16: the {MAX_IN_A_ROW} steps up to iteration {iteration - 1} were all skipped, their gradients "
                f"overflow even at a loss scale of {2 * scale:.3g}; set SOLVER.AMP.ENABLED False, or lower "
                "SOLVER.BASE_LR"
            )

    def up_to(self, scale: float) -> int:
        """The total including the iteration seen last, which left this ``scale``."""
        return self.total + (self.scale is not None and scale < self.scale)

    def values(self) -> dict[str, float]:
        """For metrics.json."""
        return {"skipped_steps": self.total} | ({} if self.scale is None else {"loss_scale": self.scale})
