"""Learning rate, EMA momentum and lambda as pure functions of progress in [0, 1) (the share of training steps done)."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence


def cosine(progress: float, warmup: float = 0.0) -> float:
    """Multiplier of the base learning rate: linear from 0 over ``warmup`` (a share of training), then a half cosine.

    Without warm-up: (1 + cos(pi progress)) / 2 (MoCo v2; Loshchilov & Hutter 2017 without restarts).
    """
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def step(progress: float, milestones: Sequence[float], gamma: float, warmup: float = 0.0) -> float:
    """Multiplier of the base learning rate: ``gamma`` once for each milestone (a share of training) reached."""
    if progress < warmup:
        return progress / warmup
    return gamma ** bisect.bisect_right(sorted(milestones), progress)


def ema_momentum(progress: float, base: float, kind: str) -> float:
    """m of the key encoder: ``constant``, or ``cosine`` from ``base`` to 1 (BYOL's schedule)."""
    return base if kind == "constant" else 1 - (1 - base) * 0.5 * (1 + math.cos(math.pi * progress))


def strength(epoch: int, epochs: int, base: float, kind: str) -> float:
    """JCL's lambda: ``constant`` (the paper), or ``linear``: base (epoch + 1) / epochs (its released code)."""
    return base if kind == "constant" else base * (epoch + 1) / epochs


def learning_rate(
    step_index: int,
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
    """The learning rate of one optimiser step.

    Args:
        step_index: optimiser steps done before this one.
        kind: ``cosine`` or ``step``.
        milestones: epochs at which ``step`` multiplies by ``gamma``.
        per_step: False holds the rate within an epoch (MoCo's scripts); warm-up always moves by the step, and where it
            ends within an epoch, the rest of that epoch has the rate at its end.
    """
    exact = step_index / steps_per_epoch
    epoch = exact if per_step or exact < warmup_epochs else max(step_index // steps_per_epoch, warmup_epochs)
    warmup = min(warmup_epochs / epochs, 1.0)
    if kind == "cosine":
        return base_lr * cosine(epoch / epochs, warmup)
    return base_lr * step(epoch / epochs, [m / epochs for m in milestones], gamma, warmup)
