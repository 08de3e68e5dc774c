"""What every objective returns, and the steps and checks they share.

Shape letters of this package: N queries here, M' positive keys a query (M), D dimensions, K negatives in the queue,
A anchors here, B candidates (all ranks), V views.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_SLICE = 8192  # negatives a slice: as fast as the whole queue at once, with a fraction of its memory


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


def at_least_float32(x: Tensor) -> Tensor:
    """Half types become float32: exp(1 / 0.01) has no place in them. float32 and float64 stay."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def check_positive(name: str, value: float) -> None:
    """Raises ValueError unless ``value`` is finite and above 0."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value}; it must be finite and above 0")


def check_range(name: str, value: float, high: float = math.inf) -> None:
    """Raises ValueError unless ``value`` is finite and within [0, high]."""
    if not (math.isfinite(value) and 0 <= value <= high):
        limit = "finite and at least 0" if high == math.inf else f"within [0, {high:g}]"
        raise ValueError(f"{name} is {value}; it must be {limit}")


def check_queue_shapes(q_ND: Tensor, keys_MND: Tensor, queue_DK: Tensor, most_keys: int | None = None) -> None:
    """Raises ValueError unless the three shapes agree and none of N, M', D and K is 0 (M' at most ``most_keys``)."""
    shapes = f"q {tuple(q_ND.shape)}, keys {tuple(keys_MND.shape)}, queue {tuple(queue_DK.shape)}"
    if (q_ND.ndim, keys_MND.ndim, queue_DK.ndim) != (2, 3, 2):
        raise ValueError(f"{shapes}: they must have 2, 3 and 2 axes: (N, D), (M', N, D), (D, K)")
    if keys_MND.shape[1:] != q_ND.shape or queue_DK.shape[0] != q_ND.shape[1]:
        raise ValueError(f"{shapes}: they must agree as (N, D), (M', N, D), (D, K)")
    if 0 in (*keys_MND.shape, queue_DK.shape[1]):
        raise ValueError(f"{shapes}: N, M', D and K must be at least 1")
    if most_keys is not None and keys_MND.shape[0] > most_keys:
        raise ValueError(f"{shapes}: M' is {keys_MND.shape[0]}; this objective takes at most {most_keys}")


def check_batch_shapes(
    anchors_AD: Tensor,
    candidates_BD: Tensor,
    anchor_labels_A: Tensor,
    candidate_labels_B: Tensor,
    self_index_A: Tensor,
) -> None:
    """Raises ValueError unless the five shapes agree and none of A, B and D is 0."""
    named = {"anchors": anchors_AD, "candidates": candidates_BD, "anchor labels": anchor_labels_A}
    named |= {"candidate labels": candidate_labels_B, "self index": self_index_A}
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items())
    if (anchors_AD.ndim, candidates_BD.ndim) != (2, 2) or anchors_AD.shape[1] != candidates_BD.shape[1]:
        raise ValueError(f"{shapes}: anchors and candidates must be (A, D) and (B, D)")
    if anchor_labels_A.shape != anchors_AD.shape[:1] or self_index_A.shape != anchors_AD.shape[:1]:
        raise ValueError(f"{shapes}: anchor labels and self index must be (A,)")
    if candidate_labels_B.shape != candidates_BD.shape[:1]:
        raise ValueError(f"{shapes}: candidate labels must be (B,)")
    if 0 in (*anchors_AD.shape, candidates_BD.shape[0]):
        raise ValueError(f"{shapes}: A, B and D must be at least 1")


class QueueSoftmax(NamedTuple):
    """The softmax of each query's logits over the queue, summed up."""

    logsumexp_N: Tensor
    largest_N: Tensor
    mean_ND: Tensor  # the queue's vectors averaged under the softmax: also the gradient of logsumexp_N


def queue_softmax(scaled_ND: Tensor, queue_DK: Tensor) -> QueueSoftmax:
    """Softmax of ``scaled_ND @ queue_DK`` over K, a slice of the queue at a time; without gradient.

    Nothing of size N x K outlives its slice: the running sums are rescaled whenever a slice brings a larger logit.

    Args:
        scaled_ND: vectors already divided by their temperature.
        queue_DK: the queue.
    """
    scaled_ND, queue_DK = scaled_ND.detach(), queue_DK.detach()
    largest_N = scaled_ND.new_full((scaled_ND.shape[0],), -math.inf)
    total_N = torch.zeros_like(largest_N)
    weighted_ND = torch.zeros_like(scaled_ND)
    for slice_DS in queue_DK.split(_SLICE, dim=1):
        exp_NS = scaled_ND @ slice_DS
        previous_N, largest_N = largest_N, torch.maximum(largest_N, exp_NS.amax(dim=1))
        exp_NS.sub_(largest_N[:, None]).exp_()
        shrink_N = (previous_N - largest_N).exp()
        total_N = total_N * shrink_N + exp_NS.sum(dim=1)
        weighted_ND = weighted_ND * shrink_N[:, None] + exp_NS @ slice_DS.T
    return QueueSoftmax(total_N.log() + largest_N, largest_N, weighted_ND / total_N[:, None])


class _Negatives(torch.autograd.Function):
    """The forward pass already finds the gradient (the softmax mean), so no logit is kept for the backward pass."""

    @staticmethod
    def forward(ctx, scaled_ND: Tensor, queue_DK: Tensor) -> tuple[Tensor, Tensor]:
        found = queue_softmax(scaled_ND, queue_DK)
        ctx.save_for_backward(found.mean_ND)
        ctx.mark_non_differentiable(found.largest_N)
        return found.logsumexp_N, found.largest_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_N: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (mean_ND,) = ctx.saved_tensors
        return grad_N[:, None] * mean_ND, None


def negatives(q_ND: Tensor, queue_DK: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log sum_j exp(q_i.n_j / tau) over the queue, and the largest q_i.n_j / tau; both (N,).

    The gradient reaches the queries only: the queue is data, and the largest logit serves metrics.
    """
    return _Negatives.apply(q_ND / temperature, queue_DK)


def info_nce(positive: Tensor, negatives_lse: Tensor) -> Tensor:
    """-log(e^p / (e^p + e^z)) of positive logits p and negatives' log-sum-exp z, elementwise.

    As -log sigmoid(p - z) no row of K + 1 logits is built, and a loss near 0 keeps its digits.
    """
    return -torch.nn.functional.logsigmoid(positive - negatives_lse)


def queue_metrics(positive_logits: Tensor, hardest_N: Tensor, temperature: float) -> dict[str, Tensor]:
    """The metrics all queue objectives share, from positive logits (..., N).

    ``queue_accuracy``: share of the positives whose logit exceeds every negative's, from 0 to 100.
    ``positive_similarity``: mean q.k, from -1 to 1.
    """
    positive_logits = positive_logits.detach()
    return {
        "queue_accuracy": (positive_logits > hardest_N).to(hardest_N.dtype).mean() * 100,
        "positive_similarity": positive_logits.mean() * temperature,
    }


def keys_variance(keys_MND: Tensor) -> Tensor:
    """Mean diagonal entry of the keys' covariance, over the queries: JCL's Fig. 3(b). Biased, as in its Algorithm 1."""
    return keys_MND.detach().var(dim=0, correction=0).mean()
