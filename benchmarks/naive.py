"""The losses straight from the papers' equations: whole rows of logits and explicit covariances are formed.

`tools/benchmark.py objectives` measures the methods in pretrain/methods against these forms, and the tests compare
values and gradients with them; they therefore share no code with the methods. Arguments are those of the method of the
same name. Shape letters: N queries, M' keys per query (M), D dimensions, K negatives; A anchors, B candidates.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def moco(q_ND: Tensor, keys_MND: Tensor, queue_DK: Tensor, *, temperature: float) -> Tensor:
    """Compute Eq. (1) of JCL: cross-entropy of the logits (N, 1 + K), of which the first is the positive."""
    logits = _compute_logits(q_ND, keys_MND[0], queue_DK) / temperature
    return cross_entropy(logits, torch.zeros(len(q_ND), dtype=torch.long, device=q_ND.device))


def multikey(q_ND: Tensor, keys_MND: Tensor, queue_DK: Tensor, *, temperature: float) -> Tensor:
    """Compute Eq. (2)-(3) of JCL: the mean of Eq. (1) over the M' keys, each with its own logits (N, 1 + K)."""
    return torch.stack([moco(q_ND, key_ND[None], queue_DK, temperature=temperature) for key_ND in keys_MND]).mean()


def jcl(q_ND: Tensor, keys_MND: Tensor, queue_DK: Tensor, *, temperature: float, lambda_: float) -> Tensor:
    """Compute Eq. (8) of JCL: its covariance term raises the mean key's logit in the denominator alone."""
    logits = _compute_logits(q_ND, keys_MND.mean(dim=0), queue_DK) / temperature
    variance_N = torch.einsum("nd,nde,ne->n", q_ND, compute_covariance(keys_MND), q_ND)
    bonus_N = lambda_ / (2 * temperature**2) * variance_N
    positive_N = logits[:, 0]
    logits = torch.cat([(positive_N + bonus_N)[:, None], logits[:, 1:]], dim=1)
    return (logits.logsumexp(dim=1) - positive_N).mean()


def compute_covariance(keys_MND: Tensor) -> Tensor:
    """Compute the biased covariance (N, D, D) of each query's keys, Algorithm 1 of JCL, lines 7 to 9."""
    centered_MND = keys_MND - keys_MND.mean(dim=0)
    return torch.einsum("mnd,mne->nde", centered_MND, centered_MND) / len(keys_MND)


def sce(
    q_ND: Tensor,
    keys_MND: Tensor,
    queue_DK: Tensor,
    *,
    temperature: float,
    key_temperature: float,
    lambda_: float,
    mask_positive: bool,
) -> Tensor:
    """Compute L_SCE (SCE, Sec. 3.2): cross-entropy of p (N, 1 + K) with the target w (N, 1 + K).

    The positive's slot in s is masked (the equation), or has a logit of 0 (the published pseudo-code).
    """
    relations = keys_MND[0] @ queue_DK / key_temperature
    slot = relations.new_full((len(q_ND), 1), float("-inf") if mask_positive else 0.0)
    w = (1 - lambda_) * torch.cat([slot, relations], dim=1).softmax(dim=1)
    w[:, 0] += lambda_
    return cross_entropy(_compute_logits(q_ND, keys_MND[0], queue_DK) / temperature, w)


def ressl(q_ND: Tensor, keys_MND: Tensor, queue_DK: Tensor, *, temperature: float, key_temperature: float) -> Tensor:
    """Compute L_ReSSL (SCE's supplement, Sec. B): cross-entropy of p (N, K) with the target s (N, K)."""
    s_NK = (keys_MND[0] @ queue_DK / key_temperature).softmax(dim=1)
    return cross_entropy(q_ND @ queue_DK / temperature, s_NK)


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
) -> Tensor:
    """Compute Eq. (6) of TCL's supplement, with D of Eq. (19)-(22); an anchor without positives adds 0 to the mean."""
    similarity_AB = anchors_AD @ candidates_BD.T
    same_AB = anchor_labels_A[:, None] == candidate_labels_B
    is_other_AB = self_index_A[:, None] != torch.arange(len(candidates_BD), device=candidates_BD.device)
    positive_AB = (same_AB & is_other_AB).to(similarity_AB.dtype)
    count_A1 = positive_AB.sum(dim=1, keepdim=True)
    pull_AB = positive_AB * ((similarity_AB / temperature).exp() + k1 * (-similarity_AB).exp())
    d_A1 = (pull_AB + k2 * (~same_AB * (similarity_AB / temperature).exp())).sum(dim=1, keepdim=True)
    d_A1 = torch.where(count_A1 > 0, d_A1, 1.0)  # D may be 0 where no positive uses it
    loss_A1 = (positive_AB * (d_A1.log() - similarity_AB / temperature)).sum(dim=1, keepdim=True)
    return (loss_A1 / count_A1.clamp(min=1)).mean()


def supcon(*batch: Tensor, temperature: float) -> Tensor:
    """Compute L_out (SupCon, Eq. (2)), which is TCL's loss with k1 = 0 and k2 = 1."""
    return tcl(*batch, temperature=temperature, k1=0.0, k2=1.0)


def _compute_logits(q_ND: Tensor, key_ND: Tensor, queue_DK: Tensor) -> Tensor:
    """Return the similarities (N, 1 + K) of each query to its key and to all negatives."""
    return torch.cat([(q_ND * key_ND).sum(dim=1, keepdim=True), q_ND @ queue_DK], dim=1)
