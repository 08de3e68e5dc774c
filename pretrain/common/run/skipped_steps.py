"""How often fp16 skips an optimizer step, counted alike in every stage and engine."""

from __future__ import annotations

from ..errors import UserError

MAX_IN_A_ROW = 50  # the loss scale has then fallen by 2^50, and no smaller one will help


class SkippedSteps:
    """Counts the steps that a gradient scaler skips because scaled gradients overflow: the loss scale then falls.

    ``total`` counts those before the step whose ``scale`` was seen last; set it to resume a run. ``remedy`` tells
    a user how to turn fp16 off.
    """

    def __init__(self, remedy: str) -> None:
        self.total = self._in_a_row = 0
        self.scale: float | None = None
        self._remedy = remedy

    def see(self, scale: float, step: int) -> None:
        """Takes the loss scale that ``step`` begins with, of every step in turn; UserError if too many were skipped."""
        skipped = self.up_to(scale) - self.total
        self.total += skipped
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if self._in_a_row >= MAX_IN_A_ROW:
            raise UserError(
                f"fp16: the {MAX_IN_A_ROW} steps up to step {step - 1} were all skipped, because their gradients "
                f"overflow even at a loss scale of {self.scale:.3g}; {self._remedy}, or lower SOLVER.BASE_LR"
            )
        self.scale = scale

    def up_to(self, scale: float) -> int:
        """The total including the step whose scale was seen last, which left this ``scale``."""
        return self.total + (self.scale is not None and scale < self.scale)

    def values(self) -> dict[str, float]:
        """The numbers for metrics.json."""
        return {"skipped_steps": self.total} | ({} if self.scale is None else {"loss_scale": self.scale})


def summary(skipped: int, steps: int) -> str:
    """The line for the log at the end of a run that has skipped some of its ``steps``."""
    return f"fp16: {skipped} of {steps} steps were skipped because their gradients overflowed"
