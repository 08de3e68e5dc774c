"""What every objective returns, and the checks they share.

Shape letters of this package: N queries here, M' positive keys a query (M), D dimensions, K negatives in the queue,
A anchors here, B candidates (all ranks), V views.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Objective(NamedTuple):
    """Result of an objective.

    Attributes:
        loss: scalar, the mean over the N queries (or the A anchors) given.
        enqueue_ND: vectors to push on the queue, detached; None for objectives without a queue.
        metrics: named detached scalars (``queue_accuracy`` from 0 to 100, ``positive_similarity``, ...).
    """

    loss: Tensor
    enqueue_ND: Tensor | None
    metrics: dict[str, Tensor]
