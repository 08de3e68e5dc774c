"""Learning rate and EMA momentum as pure functions of the step, by the fraction of training steps done before it.

The cosine is fvcore's. Warm-up and steps are not: fvcore rounds progress to a millionth of the run and milestones to
whole updates, whereas recipes give exact epochs.
"""

import bisect
from collections.abc import Sequence

from fvcore.common.param_scheduler import CosineParamScheduler

_half_cosine = CosineParamScheduler(1.0, 0.0)  # MoCo v2; Loshchilov & Hutter 2017 without restarts


def compute_ema_momentum(step: int, *, total_steps: int, base: float, kind: str) -> float:
    """Return m of the key encoder at a step: ``constant``, or ``cosine`` from ``base`` to 1 (BYOL's schedule)."""
    return base if kind == "constant" else CosineParamScheduler(base, 1.0)(step / total_steps)


def compute_learning_rate(
    step: int,
    steps_per_epoch: int,
    epochs: int,
    *,
    base_lr: float,
    kind: str,
    milestones: Sequence[float] = (),
    gamma: float = 0.1,
    warmup_epochs: float = 0.0,
    per_step: bool = True,
) -> float:
    """Return the learning rate of one optimizer step: a linear warm-up from 0, then ``kind``.

    Args:
        step: optimizer steps done before this one.
        kind: ``cosine``: a half cosine over the rest of training; ``step``: ``base_lr``, times ``gamma`` at each of
            ``milestones`` (epochs).
        per_step: False holds the rate within an epoch (MoCo's scripts). Warm-up always changes it at each step, and
            where warm-up ends within an epoch, the rest of that epoch has the rate at its end.
    """
    epoch = step / steps_per_epoch
    if not per_step and epoch >= warmup_epochs:
        epoch = max(step // steps_per_epoch, warmup_epochs)
    progress = epoch / epochs
    warmup = min(warmup_epochs / epochs, 1.0)
    if progress < warmup:
        return base_lr * (progress / warmup)
    if kind == "cosine":
        return base_lr * _half_cosine((progress - warmup) / (1 - warmup))
    return base_lr * gamma ** bisect.bisect_right(sorted(m / epochs for m in milestones), progress)
