"""Counts the optimizer steps that fp16 skips, for both stages."""

from ..errors import UserError

MAX_IN_A_ROW = 50  # the loss scale has then fallen by 2^50, and no smaller one will help


class SkippedSteps:
    """A count of the steps that a gradient scaler skips because scaled gradients overflow: the loss scale then falls.

    Args:
        remedy: tells a user how to turn fp16 off.

    Attributes:
        total: the skipped steps at the last call of `update`; a resumed run sets it to what it was.
        scale: the loss scale then.
    """

    def __init__(self, remedy: str) -> None:
        self.total = 0
        self._in_a_row = 0
        self.scale: float | None = None
        self._remedy = remedy

    def update(self, scale: float, steps_done: int) -> None:
        """Record the loss scale after each step; raise UserError if too many in a row were skipped."""
        skipped = self.total_after(scale) - self.total
        self.total += skipped
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if self._in_a_row >= MAX_IN_A_ROW:
            problem = f"fp16: the {MAX_IN_A_ROW} steps up to step {steps_done} were skipped"
            reason = f"their gradients overflow even at a loss scale of {self.scale:.3g}"
            raise UserError(f"{problem}: {reason}; {self._remedy}, or lower SOLVER.BASE_LR")
        self.scale = scale

    def total_after(self, scale: float) -> int:
        """Return the total including the last step, which left this ``scale``."""
        return self.total + (self.scale is not None and scale < self.scale)

    def metrics(self) -> dict[str, float]:
        """Return the numbers for metrics.json."""
        scale = {} if self.scale is None else {"loss_scale": self.scale}
        return {"skipped_steps": self.total, **scale}


def describe_skipped_steps(skipped: int, steps: int) -> str:
    """Summarize a run that has skipped some of its ``steps`` in a line for its log."""
    return f"fp16: {skipped} of {steps} steps were skipped because their gradients overflowed"
