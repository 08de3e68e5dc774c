"""Operations and checks shared by the loss functions.

Shape letters of this package: N queries of one call (a micro-batch of a rank), M' positive keys per query (M), D
dimensions, K negatives in the queue, A anchors of this rank, B candidates of all ranks.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

BlockLoss = Callable[[Tensor, slice], Tensor]

_LOGITS = 2**18  # logits at once with one thread: small enough for its cache
_MANY_LOGITS = 2**21  # with several threads: large enough to amortize synchronization
_GPU_LOGITS = 2**24  # 64 MiB: few launches of large kernels
_SMALLEST_SLICE = 256  # negatives


def check_queue_inputs(
    q_ND: Tensor, keys_MND: Tensor, queue_DK: Tensor, most_keys: float = math.inf
) -> tuple[Tensor, Tensor, Tensor]:
    """Check the shapes of an objective's inputs and return them in at least float32, because exp overflows half types.

    Raises:
        ValueError: their shapes disagree, one of N, M', D and K is 0, or M' is above ``most_keys``.
    """
    shapes = [tuple(x.shape) for x in (q_ND, keys_MND, queue_DK)]
    n = shapes[0][0]
    m = shapes[1][0]
    d = shapes[0][-1]
    k = shapes[2][-1]
    if shapes != [(n, d), (m, n, d), (d, k)] or 0 in (n, m, d, k) or m > most_keys:
        limits = f"(N, D), (M', N, D) and (D, K), none of these 0, and M' at most {most_keys}"
        raise ValueError(f"q, keys and queue are {shapes}; they must be {limits}")
    dtypes = [torch.promote_types(x.dtype, torch.float32) for x in (q_ND, keys_MND, queue_DK)]
    return q_ND.to(dtypes[0]), keys_MND.to(dtypes[1]), queue_DK.to(dtypes[2])


def check_batch_inputs(
    anchors_AD: Tensor, candidates_BD: Tensor, anchor_labels_A: Tensor, candidate_labels_B: Tensor, self_index_A: Tensor
) -> tuple[Tensor, Tensor]:
    """Check the shapes of an in-batch objective's inputs and return the embeddings in at least float32.

    Raises:
        ValueError: their shapes disagree, or one of A, B and D is 0.
    """
    shapes = [tuple(x.shape) for x in (anchors_AD, candidates_BD, anchor_labels_A, candidate_labels_B, self_index_A)]
    a = shapes[0][0]
    b = shapes[1][0]
    d = shapes[0][-1]
    if shapes != [(a, d), (b, d), (a,), (b,), (a,)] or 0 in (a, b, d):
        limits = "(A, D), (B, D), (A,), (B,) and (A,), none of these 0"
        raise ValueError(f"anchors, candidates, their labels and self_index are {shapes}; they must be {limits}")
    dtypes = [torch.promote_types(x.dtype, torch.float32) for x in (anchors_AD, candidates_BD)]
    return anchors_AD.to(dtypes[0]), candidates_BD.to(dtypes[1])


class QueueSoftmax(NamedTuple):
    """Sums over the softmax of each vector's logits over the queue."""

    logsumexp_N: Tensor
    largest_N: Tensor
    mean_ND: Tensor  # the queue's vectors averaged under the softmax: also the gradient of logsumexp_N


def queue_softmax(scaled_ND: Tensor, queue_DK: Tensor) -> QueueSoftmax:
    """Compute the softmax of ``scaled_ND @ queue_DK`` over K, one slice of the queue at a time, without gradient.

    Nothing of size N x K outlives its slice: the running sums are rescaled whenever a slice brings a larger logit.

    Args:
        scaled_ND: vectors already divided by their temperature.
        queue_DK: the queue.
    """
    scaled_ND = scaled_ND.detach()
    queue_DK = queue_DK.detach()
    count = len(scaled_ND)
    most_logits = _LOGITS if torch.get_num_threads() == 1 else _MANY_LOGITS
    if scaled_ND.device.type != "cpu":
        most_logits = _GPU_LOGITS
    slice_size = min(queue_DK.shape[1], max(_SMALLEST_SLICE, most_logits // count))
    largest_N = scaled_ND.new_full((count,), -math.inf)
    total_N = torch.zeros_like(largest_N)
    weighted_DN = scaled_ND.new_zeros(scaled_ND.shape[1], count)  # (D, S) by (S, N) is faster than the other way round
    logits = scaled_ND.new_empty(count * slice_size)
    for slice_DS in queue_DK.split(slice_size, dim=1):
        exp_NS = logits[: count * slice_DS.shape[1]].view(count, -1)
        torch.mm(scaled_ND, slice_DS, out=exp_NS)
        previous_N = largest_N
        largest_N = torch.maximum(largest_N, exp_NS.amax(dim=1))
        exp_NS.sub_(largest_N[:, None]).exp_()
        shrink_N = (previous_N - largest_N).exp()
        total_N.mul_(shrink_N).add_(exp_NS.sum(dim=1))
        weighted_DN.mul_(shrink_N).addmm_(slice_DS, exp_NS.T)
    return QueueSoftmax(total_N.log() + largest_N, largest_N, (weighted_DN / total_N).T)


class _QueueLogsumexp(torch.autograd.Function):
    """`queue_logsumexp`; the forward pass also computes the gradient (the softmax mean), so no logit is saved."""

    @staticmethod
    def forward(ctx, scaled_ND: Tensor, queue_DK: Tensor, keys_ND: Tensor | None) -> tuple[Tensor, ...]:
        count = len(scaled_ND)
        rows = scaled_ND if keys_ND is None else torch.cat([scaled_ND, keys_ND])
        softmax = queue_softmax(rows, queue_DK)
        ctx.save_for_backward(softmax.mean_ND[:count])
        largest_N = softmax.largest_N[:count]
        key_softmax = tuple(tensor[count:] for tensor in softmax)
        ctx.mark_non_differentiable(largest_N, *key_softmax)
        return softmax.logsumexp_N[:count], largest_N, *key_softmax

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_N: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        (mean_ND,) = ctx.saved_tensors
        return grad_N[:, None] * mean_ND, None, None


def queue_logsumexp(q_ND: Tensor, queue_DK: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log sum_j exp(q_i.n_j / tau) over the queue, and the largest q_i.n_j / tau; both (N,).

    The gradient reaches only the queries: the queue is data, and the largest logit serves metrics.
    """
    logsumexp_N, largest_N, *_ = _QueueLogsumexp.apply(q_ND / temperature, queue_DK, None)
    return logsumexp_N, largest_N


def queue_logsumexp_and_target(
    q_ND: Tensor, keys_ND: Tensor, queue_DK: Tensor, temperature: float, key_temperature: float
) -> tuple[Tensor, Tensor, QueueSoftmax]:
    """Return `queue_logsumexp` of the queries, and the keys' softmax over the queue at their own temperature.

    Both come from one pass over the queue, which costs less than two. The target has no gradient.
    """
    scaled_keys_ND = keys_ND.detach() / key_temperature
    logsumexp_N, largest_N, *target = _QueueLogsumexp.apply(q_ND / temperature, queue_DK, scaled_keys_ND)
    return logsumexp_N, largest_N, QueueSoftmax(*target)


def info_nce(positive: Tensor, negatives_lse: Tensor) -> Tensor:
    """Return -log(e^p / (e^p + e^z)) of positive logits p and the negatives' log-sum-exp z, elementwise.

    Computing it as -log sigmoid(p - z) builds no row of K + 1 logits and avoids cancellation near 0.
    """
    return -torch.nn.functional.logsigmoid(positive - negatives_lse)


def queue_metrics(
    positive_logits: Tensor, hardest_N: Tensor, temperature: float, keys_MND: Tensor | None = None
) -> dict[str, Tensor]:
    """Compute the metrics that loss functions with a queue share, from positive logits (..., N).

    ``queue_accuracy``: percentage of the positives whose logit exceeds every negative's.
    ``positive_similarity``: mean q.k, from -1 to 1.
    ``positive_variance``: mean diagonal entry of the biased covariance of a query's keys (JCL, Fig. 3(b), Algorithm 1);
    only with ``keys_MND``, which methods with several keys pass.
    """
    positive_logits = positive_logits.detach()
    metrics = {
        "queue_accuracy": (positive_logits > hardest_N).to(hardest_N.dtype).mean() * 100,
        "positive_similarity": positive_logits.mean() * temperature,
    }
    if keys_MND is not None:
        metrics["positive_variance"] = keys_MND.detach().var(dim=0, correction=0).mean()
    return metrics


_ROWS = 256  # anchors per block


class _ChunkedLoss(torch.autograd.Function):
    """`chunked_loss`; each block computes its gradient with its loss, so nothing of size A x B is saved."""

    @staticmethod
    def forward(ctx, anchors_AD: Tensor, candidates_BD: Tensor, loss_fn: BlockLoss) -> Tensor:
        total = anchors_AD.new_zeros(())
        grad_AD = torch.zeros_like(anchors_AD)
        grad_BD = torch.zeros_like(candidates_BD)
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


def chunked_loss(anchors_AD: Tensor, candidates_BD: Tensor, loss_fn: BlockLoss) -> Tensor:
    """Sum ``loss_fn(similarity_RB, rows)`` over blocks of anchors; it is called once per block.

    Args:
        loss_fn: (similarities (R, B) of the anchors in ``rows`` to all candidates, rows) -> the sum of their losses.
    """
    return _ChunkedLoss.apply(anchors_AD, candidates_BD, loss_fn)
