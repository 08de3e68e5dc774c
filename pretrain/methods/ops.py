"""The steps and checks that objectives share.

Shape letters of this package: N queries of this rank, M' positive keys per query (M), D dimensions, K negatives in the
queue, A anchors of this rank, B candidates of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LossOfRows = Callable[[Tensor, slice], Tensor]

_LOGITS = 2**18  # held at a time by one thread: they stay in its cache
_MANY_LOGITS = 2**21  # by several, or a GPU: threads wait for each other after every operation, which must be long


def at_least_float32(x: Tensor) -> Tensor:
    """Half types become float32, because exp(1 / 0.01) overflows them; float32 and float64 stay."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def check_queue_inputs(
    q_ND: Tensor, keys_MND: Tensor, queue_DK: Tensor, most_keys: float = math.inf
) -> tuple[Tensor, Tensor, Tensor]:
    """The three tensors in at least float32.

    Raises:
        ValueError: their shapes disagree, one of N, M', D and K is 0, or M' is above ``most_keys``.
    """
    shapes = [tuple(x.shape) for x in (q_ND, keys_MND, queue_DK)]
    n, m, d, k = shapes[0][0], shapes[1][0], shapes[0][-1], shapes[2][-1]
    if shapes != [(n, d), (m, n, d), (d, k)] or 0 in (n, m, d, k) or m > most_keys:
        raise ValueError(
            f"q, keys and queue are {shapes}; they must be (N, D), (M', N, D) and (D, K), "
            f"none of these may be 0, and M' is at most {most_keys}"
        )
    return at_least_float32(q_ND), at_least_float32(keys_MND), at_least_float32(queue_DK)


class QueueSoftmax(NamedTuple):
    """Sums over the softmax of each vector's logits over the queue."""

    logsumexp_N: Tensor
    largest_N: Tensor
    mean_ND: Tensor  # the queue's vectors averaged under the softmax: also the gradient of logsumexp_N


def queue_softmax(scaled_ND: Tensor, queue_DK: Tensor) -> QueueSoftmax:
    """Softmax of ``scaled_ND @ queue_DK`` over K, one slice of the queue at a time; without gradient.

    Nothing of size N x K outlives its slice: the running sums are rescaled whenever a slice brings a larger logit.

    Args:
        scaled_ND: vectors already divided by their temperature.
        queue_DK: the queue.
    """
    scaled_ND, queue_DK = scaled_ND.detach(), queue_DK.detach()
    count, slice_size = len(scaled_ND), min(queue_DK.shape[1], _slice_size(scaled_ND))
    largest_N = scaled_ND.new_full((count,), -math.inf)
    total_N = torch.zeros_like(largest_N)
    weighted_DN = scaled_ND.new_zeros(scaled_ND.shape[1], count)  # (D, S) by (S, N) is faster than the other way round
    logits = scaled_ND.new_empty(count * slice_size)
    for slice_DS in queue_DK.split(slice_size, dim=1):
        exp_NS = logits[: count * slice_DS.shape[1]].view(count, -1)
        torch.mm(scaled_ND, slice_DS, out=exp_NS)
        previous_N, largest_N = largest_N, torch.maximum(largest_N, exp_NS.amax(dim=1))
        exp_NS.sub_(largest_N[:, None]).exp_()
        shrink_N = (previous_N - largest_N).exp()
        total_N.mul_(shrink_N).add_(exp_NS.sum(dim=1))
        weighted_DN.mul_(shrink_N).addmm_(slice_DS, exp_NS.T)
    return QueueSoftmax(total_N.log() + largest_N, largest_N, (weighted_DN / total_N).T)


def _slice_size(scaled_ND: Tensor) -> int:
    """How many negatives to compare with all vectors at once."""
    alone = scaled_ND.device.type == "cpu" and torch.get_num_threads() == 1
    return max(256, (_LOGITS if alone else _MANY_LOGITS) // len(scaled_ND))


class _Negatives(torch.autograd.Function):
    """The forward pass already finds the gradient (the softmax mean), so no logit is kept for the backward pass."""

    @staticmethod
    def forward(ctx, scaled_ND: Tensor, queue_DK: Tensor, others_RD: Tensor | None) -> tuple[Tensor, ...]:
        count = len(scaled_ND)
        rows = scaled_ND if others_RD is None else torch.cat([scaled_ND, others_RD])
        softmax = queue_softmax(rows, queue_DK)
        ctx.save_for_backward(softmax.mean_ND[:count])
        largest_N, others = softmax.largest_N[:count], tuple(part[count:] for part in softmax)
        ctx.mark_non_differentiable(largest_N, *others)
        return softmax.logsumexp_N[:count], largest_N, *others

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_N: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        (mean_ND,) = ctx.saved_tensors
        return grad_N[:, None] * mean_ND, None, None


def queue_logsumexp(q_ND: Tensor, queue_DK: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log sum_j exp(q_i.n_j / tau) over the queue, and the largest q_i.n_j / tau; both (N,).

    The gradient reaches the queries only: the queue is data, and the largest logit serves metrics.
    """
    logsumexp_N, largest_N, *_ = _Negatives.apply(q_ND / temperature, queue_DK, None)
    return logsumexp_N, largest_N


def queue_logsumexp_and_target(
    q_ND: Tensor, keys_ND: Tensor, queue_DK: Tensor, temperature: float, key_temperature: float
) -> tuple[Tensor, Tensor, QueueSoftmax]:
    """`negatives` of the queries, and the keys' softmax over the queue at their own temperature, without gradient.

    Both in one pass over the queue, which costs less than two.
    """
    scaled_ND, keys_ND = q_ND / temperature, keys_ND.detach() / key_temperature
    logsumexp_N, largest_N, *relation = _Negatives.apply(scaled_ND, queue_DK, keys_ND)
    return logsumexp_N, largest_N, QueueSoftmax(*relation)


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


_ROWS = 256  # anchors whose similarities to all candidates are held at a time


class _ChunkedLoss(torch.autograd.Function):
    """The gradient is found with the loss, block by block: nothing of size A x B is kept for the backward pass."""

    @staticmethod
    def forward(ctx, anchors_AD: Tensor, candidates_BD: Tensor, loss_fn: LossOfRows) -> Tensor:
        total = anchors_AD.new_zeros(())
        grad_AD, grad_BD = torch.zeros_like(anchors_AD), torch.zeros_like(candidates_BD)
        for start in range(0, len(anchors_AD), _ROWS):
            rows = slice(start, start + _ROWS)
            with torch.enable_grad():
                similarity_RB = (anchors_AD[rows] @ candidates_BD.T).detach().requires_grad_()
                loss = loss_fn(similarity_RB, rows)
                (grad_RB,) = torch.autograd.grad(loss, similarity_RB)
            total += loss.detach()
            torch.mm(grad_RB, candidates_BD, out=grad_AD[rows])
            grad_BD.addmm_(grad_RB.T, anchors_AD[rows])
        ctx.save_for_backward(grad_AD, grad_BD)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_AD, grad_BD = ctx.saved_tensors
        return grad * grad_AD, grad * grad_BD, None


def chunked_loss(anchors_AD: Tensor, candidates_BD: Tensor, loss_fn: LossOfRows) -> Tensor:
    """The sum of ``loss_fn(similarity_RB, rows)`` over blocks of anchors; it is called once per block.

    Args:
        loss_of: from the similarities (R, B) of the anchors in ``rows`` to all candidates, the sum of their losses.
    """
    return _ChunkedLoss.apply(anchors_AD, candidates_BD, loss_fn)
