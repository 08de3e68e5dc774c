"""Tuned Contrastive Learning: SupCon with weights on what hard positives and hard negatives contribute."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..common.limits import ABOVE_0, AT_LEAST_0
from .method import TEMPERATURE, Hyperparameter, Method, Objective

if TYPE_CHECKING:
    from torch import Tensor


def tcl(
    anchors_AD: Tensor,
    candidates_BD: Tensor,
    anchor_labels_A: Tensor,
    candidate_labels_B: Tensor,
    self_index_A: Tensor,
    *,
    temperature: float,
    k1: float,
    k2: float,
) -> Objective:
    r"""TCL (Animesh and Chandraker): the loss per sample of its supplement, Eq. (6), with D of Eq. (19)-(22).

    .. math:: L_i = \log D_i - \frac{1}{\tau |P_i|} \sum_{p \in P_i} z_i \cdot z_p, \quad
              D_i = \sum_{p \in P_i} \big( e^{z_i \cdot z_p / \tau} + k_1 e^{-z_i \cdot z_p} \big)
              + k_2 \sum_{n \in N_i} e^{z_i \cdot z_n / \tau}, \quad L = \frac1A \sum_i L_i

    P_i are the candidates with the anchor's label, without the anchor itself; N_i those with another label. The k1 term
    has no temperature. Self-supervised, the label is the image's index.

    An anchor without positives adds 0 to the sum but still counts in A, so that the mean over ranks of equal A is the
    global mean.

    Args:
        anchors_AD: (A, D) unit-norm embeddings: this rank's rows of the candidates.
        candidates_BD: (B, D) unit-norm embeddings of all views on all ranks.
        anchor_labels_A: (A,) integers.
        candidate_labels_B: (B,) integers.
        self_index_A: (A,) each anchor's row among the candidates.
        temperature: tau > 0.
        k1: weight of the positives' term, at least 0.
        k2: weight of the negatives' term, at least 0. k1 = 0 and k2 = 1 is SupCon.

    Returns:
        The mean loss; nothing to enqueue; batch_accuracy (share of positive pairs more similar than the anchor's most
        similar negative, from 0 to 100), positive_similarity (mean over positive pairs, from -1 to 1) and
        positives_per_anchor; with k1 or k2 of its own, also the means of what
        :func:`hard_gradient_sums` gives.

    Raises:
        ValueError: tau, k1 or k2 out of range, or shapes that disagree.
    """
    import torch

    from .common import at_least_float32, sum_over_rows

    ABOVE_0.check("temperature", temperature)
    AT_LEAST_0.check("k1", k1)
    AT_LEAST_0.check("k2", k2)
    _check_shapes(anchors_AD, candidates_BD, anchor_labels_A, candidate_labels_B, self_index_A)
    columns_B = torch.arange(candidates_BD.shape[0], device=candidates_BD.device)
    sums: list[dict[str, Tensor]] = []

    def loss_of(similarity_RB: Tensor, rows: slice) -> Tensor:
        same_RB = anchor_labels_A[rows, None] == candidate_labels_B[None, :]
        positive_RB = same_RB & (columns_B[None, :] != self_index_A[rows, None])
        count_R = positive_RB.sum(dim=1)
        log_d_R = _log_denominator(similarity_RB, positive_RB, same_RB, temperature, k1, k2)
        mean_R = torch.where(positive_RB, similarity_RB / temperature, 0.0).sum(dim=1) / count_R.clamp(min=1)
        sums.append(_batch_sums(similarity_RB.detach(), positive_RB, same_RB))
        if (k1, k2) != (0, 1):
            sums[-1] |= hard_gradient_sums(similarity_RB.detach(), positive_RB, same_RB, temperature, k1, k2)
        return torch.where(count_R > 0, log_d_R - mean_R, 0.0).sum()

    loss = sum_over_rows(at_least_float32(anchors_AD), at_least_float32(candidates_BD), loss_of) / len(anchors_AD)
    totals = {name: torch.stack([one[name] for one in sums]).sum(dim=0) for name in sums[0]}
    pairs, anchors = totals.pop("pairs"), totals.pop("anchors", None)
    metrics = {
        "batch_accuracy": totals.pop("right") / pairs.clamp(min=1) * 100,
        "positive_similarity": totals.pop("similar") / pairs.clamp(min=1),
        "positives_per_anchor": pairs / len(anchors_AD),
    }
    if anchors is not None:
        metrics |= {name: total / anchors.clamp(min=1) for name, total in totals.items()}
    return Objective(loss, None, metrics)


def hard_gradient_sums(
    similarity_AB: Tensor, positive_AB: Tensor, same_AB: Tensor, temperature: float, k1: float, k2: float
) -> dict[str, Tensor]:
    r"""What Theorems 1 and 2 compare (TCL supplement, Sec. 1), as sums over the anchors that have both kinds of pairs.

    A candidate weighs in the gradient of its anchor, Eq. (1), in units of 1 / tau, with

    .. math:: \text{positive: } |X_{ip} - P_{ip}^t + Y_{ip}^t| \text{, Eq. (2)-(4);} \quad
              \text{negative: } P_{in}^t \text{, Eq. (5)}

    Both are taken for the hardest candidate of each anchor: its least similar positive and its most similar negative.

    Returns:
        hard_positive_gradient and hard_negative_gradient; the same with ``_supcon``, for the same embeddings under
        SupCon (k1 = 0, k2 = 1: Theorem 1, Eq. (15)); hard_negative_gradient_k2_1, at this k1 and k2 = 1 (Theorem 2);
        anchors, how many there are.
    """
    import torch

    count_A = positive_AB.sum(dim=1)
    has_both_A = (count_A > 0) & ~same_AB.all(dim=1)
    scaled_AB, lowest = similarity_AB / temperature, torch.finfo(similarity_AB.dtype).min
    pull_A = _logsumexp(torch.where(positive_AB, scaled_AB, lowest))
    tuned_A = _logsumexp(torch.where(positive_AB, -similarity_AB, lowest))
    negatives_AB = torch.where(same_AB, lowest, scaled_AB)
    push_A = _logsumexp(negatives_AB)
    positive_A = torch.where(positive_AB, similarity_AB, math.inf).amin(dim=1)
    negative_A = negatives_AB.amax(dim=1) * temperature

    def total(weight_A: Tensor) -> Tensor:
        return torch.where(has_both_A, weight_A, 0.0).sum()

    def weights(k1: float, k2: float) -> tuple[Tensor, Tensor]:
        terms = [pull_A, *([tuned_A + math.log(k1)] if k1 else []), *([push_A + math.log(k2)] if k2 else [])]
        log_d_A = torch.stack(terms).logsumexp(dim=0)
        share_A = (positive_A / temperature - log_d_A).exp()
        own_A = temperature * k1 * (-positive_A - log_d_A).exp()
        return total((1 / count_A - share_A + own_A).abs()), total(k2 * (negative_A / temperature - log_d_A).exp())

    (positive, negative), (positive_supcon, negative_supcon) = weights(k1, k2), weights(0, 1)
    return {
        "hard_positive_gradient": positive,
        "hard_positive_gradient_supcon": positive_supcon,
        "hard_negative_gradient": negative,
        "hard_negative_gradient_supcon": negative_supcon,
        "hard_negative_gradient_k2_1": weights(k1, 1)[1],
        "anchors": has_both_A.sum(),
    }


def _log_denominator(
    similarity_AB: Tensor, positive_AB: Tensor, same_AB: Tensor, temperature: float, k1: float, k2: float
) -> Tensor:
    """(A,) log D, Eq. (19)-(22)."""
    import torch

    # exp(lowest - anything) is 0 as for -inf, but a row of nothing else keeps a finite value and gradient
    lowest = torch.finfo(similarity_AB.dtype).min
    scaled_AB = similarity_AB / temperature
    terms_AB = torch.where(positive_AB, scaled_AB, lowest)
    if k2 > 0:
        terms_AB = torch.where(same_AB, terms_AB, scaled_AB + math.log(k2))
    log_d_A = _logsumexp(terms_AB)
    if k1 > 0:
        tuned_AB = torch.where(positive_AB, math.log(k1) - similarity_AB, lowest)
        log_d_A = torch.logaddexp(log_d_A, _logsumexp(tuned_AB))
    return log_d_A


def _logsumexp(x_AB: Tensor) -> Tensor:
    """Over B, through exp2: on a CPU, torch's exp is a hundred times slower where it underflows (masked terms)."""
    largest_A1 = x_AB.detach().amax(dim=1, keepdim=True)
    return ((x_AB - largest_A1) / math.log(2)).exp2().sum(dim=1).log() + largest_A1[:, 0]


def _batch_sums(similarity_AB: Tensor, positive_AB: Tensor, same_AB: Tensor) -> dict[str, Tensor]:
    """Positive pairs, those more similar than the anchor's most similar negative, and the sum of their similarities."""
    import torch

    hardest_A = similarity_AB.masked_fill(same_AB, -math.inf).amax(dim=1)
    right = (positive_AB & (similarity_AB > hardest_A[:, None])).sum()
    similar = torch.where(positive_AB, similarity_AB, 0.0).sum()
    pairs = positive_AB.sum()
    return {"pairs": pairs.to(similar.dtype), "right": right.to(similar.dtype), "similar": similar}


def _check_shapes(
    anchors_AD: Tensor, candidates_BD: Tensor, anchor_labels_A: Tensor, candidate_labels_B: Tensor, self_index_A: Tensor
) -> None:
    named = {"anchors": anchors_AD, "candidates": candidates_BD, "anchor labels": anchor_labels_A}
    named |= {"candidate labels": candidate_labels_B, "self index": self_index_A}
    (count, *dims), (candidates, *same_dims) = anchors_AD.shape, candidates_BD.shape
    if (
        len(dims) != 1
        or same_dims != dims
        or 0 in (count, candidates, *dims)
        or {anchor_labels_A.shape, self_index_A.shape} != {(count,)}
        or candidate_labels_B.shape != (candidates,)
    ):
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items())
        raise ValueError(f"{shapes}: they must be (A, D), (B, D), (A,), (B,) and (A,), and none of these may be 0")


METHOD = Method(
    tcl,
    "batch",
    {
        "temperature": TEMPERATURE,
        "k1": Hyperparameter("METHOD.K1", 1.0, AT_LEAST_0, "weight of the positives' term"),
        "k2": Hyperparameter("METHOD.K2", 1.0, AT_LEAST_0, "weight of the negatives' term"),
    },
    supervised=True,
)
