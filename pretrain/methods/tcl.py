"""Tuned Contrastive Learning: SupCon with weights for hard positives and negatives."""

import math

import torch
from torch import Tensor

from ..common.config.limits import ABOVE_0, AT_LEAST_0
from .method import LossOutput
from .ops import check_batch_inputs, chunked_loss


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
) -> LossOutput:
    r"""Compute TCL (Animesh and Chandraker): the loss per sample of its supplement, Eq. (6), with D of Eq. (19)-(22).

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
        The mean loss; nothing to enqueue; batch_accuracy (percentage of positive pairs more similar than the anchor's
        most similar negative), positive_similarity (mean over positive pairs, from -1 to 1) and
        positives_per_anchor.

    Raises:
        ValueError: tau, k1 or k2 out of range, or shapes that disagree.
    """
    ABOVE_0.check("temperature", temperature)
    AT_LEAST_0.check("k1", k1)
    AT_LEAST_0.check("k2", k2)
    labels = (anchor_labels_A, candidate_labels_B)
    anchors_AD, candidates_BD = check_batch_inputs(anchors_AD, candidates_BD, *labels, self_index_A)
    columns_B = torch.arange(candidates_BD.shape[0], device=candidates_BD.device)
    sums: list[dict[str, Tensor]] = []

    def loss_fn(similarity_RB: Tensor, rows: slice) -> Tensor:
        same_RB = anchor_labels_A[rows, None] == candidate_labels_B[None, :]
        positive_RB = same_RB & (columns_B[None, :] != self_index_A[rows, None])
        count_R = positive_RB.sum(dim=1)
        log_d_R = _compute_log_denominator(similarity_RB, positive_RB, same_RB, temperature, k1, k2)
        mean_R = torch.where(positive_RB, similarity_RB / temperature, 0.0).sum(dim=1) / count_R.clamp(min=1)
        sums.append(_sum_batch(similarity_RB.detach(), positive_RB, same_RB))
        return torch.where(count_R > 0, log_d_R - mean_R, 0.0).sum()

    loss = chunked_loss(anchors_AD, candidates_BD, loss_fn) / len(anchors_AD)
    totals = {name: torch.stack([block[name] for block in sums]).sum(dim=0) for name in sums[0]}
    pairs = totals["pairs"]
    metrics = {
        "batch_accuracy": totals["correct"] / pairs.clamp(min=1) * 100,
        "positive_similarity": totals["similar"] / pairs.clamp(min=1),
        "positives_per_anchor": pairs / len(anchors_AD),
    }
    return LossOutput(loss, None, metrics)


def _compute_log_denominator(
    similarity_AB: Tensor, positive_AB: Tensor, same_AB: Tensor, temperature: float, k1: float, k2: float
) -> Tensor:
    """Return log D (A,), Eq. (19)-(22)."""
    # exp(lowest - x) is 0, as for -inf, but a row without terms keeps a finite value and gradient.
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
    """Reduce over B, through exp2: on a CPU, exp is a hundred times slower where it underflows (masked terms)."""
    largest_A1 = x_AB.detach().amax(dim=1, keepdim=True)
    return ((x_AB - largest_A1) / math.log(2)).exp2().sum(dim=1).log() + largest_A1[:, 0]


def _sum_batch(similarity_AB: Tensor, positive_AB: Tensor, same_AB: Tensor) -> dict[str, Tensor]:
    """Count positive pairs and those more similar than the anchor's most similar negative; sum their similarities."""
    hardest_A = similarity_AB.masked_fill(same_AB, -math.inf).amax(dim=1)
    correct = (positive_AB & (similarity_AB > hardest_A[:, None])).sum()
    similar = torch.where(positive_AB, similarity_AB, 0.0).sum()
    pairs = positive_AB.sum()
    return {"pairs": pairs.to(similar.dtype), "correct": correct.to(similar.dtype), "similar": similar}
