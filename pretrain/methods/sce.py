"""Similarity Contrastive Estimation: InfoNCE with a soft target drawn from the key encoder's own similarities."""

import torch
from torch import Tensor

from ..common.config.limits import ABOVE_0, FRACTION
from .method import LossOutput
from .ops import check_queue_inputs, info_nce, queue_logsumexp_and_target, queue_metrics


def sce(
    q_ND: Tensor,
    keys_MND: Tensor,
    queue_DK: Tensor,
    *,
    temperature: float,
    key_temperature: float,
    lambda_: float,
    mask_positive: bool,
) -> LossOutput:
    r"""Compute L_SCE (Denize et al. 2023, Sec. 3.2; Algorithm 1 of its supplement) against a queue.

    .. math:: L = -\frac1N \sum_i \sum_{j=0}^K w_{ij} \log p_{ij}, \quad
              w_{ij} = \lambda 1_{j=0} + (1 - \lambda) s_{ij}, \quad
              p_i = \mathrm{softmax}([q_i \cdot k_i, q_i \cdot n_1, \dots, q_i \cdot n_K] / \tau)

    Slot 0 is the positive. s_i is the softmax of k_i.n_j / tau_m over the negatives. ``mask_positive`` decides its slot
    0: masked (the equation: s_ii = 0), or a logit of 0 (the published pseudo-code). No gradient flows through s.

    Nothing of size N x K is saved: with t_i = sum_{j>0} w_ij n_j and p_i's normalizer Z_i,
    L_i = log Z_i - w_i0 q_i.k_i / tau - q_i.t_i / tau.

    Args:
        q_ND: (N, D) unit-norm queries, of strong views.
        keys_MND: (1, N, D) unit-norm keys of the momentum encoder, of weak views.
        queue_DK: (D, K) negatives.
        temperature: tau > 0.
        key_temperature: tau_m > 0.
        lambda_: weight of the contrastive term, from 0 to 1; 1 is MoCo.
        mask_positive: True is the equation, False the pseudo-code.

    Returns:
        The mean loss; the keys to enqueue (N, D); queue_accuracy, positive_similarity and target_positive (the mean
        w_i0, from 0 to 1).

    Raises:
        ValueError: tau, tau_m or lambda out of range, shapes that disagree, or more than one key per query.
    """
    ABOVE_0.check("temperature", temperature)
    ABOVE_0.check("key_temperature", key_temperature)
    FRACTION.check("lambda", lambda_)
    q_ND, keys_MND, queue_DK = check_queue_inputs(q_ND, keys_MND, queue_DK, most_keys=1)
    keys_ND = keys_MND[0]

    negatives_N, hardest_N, target = queue_logsumexp_and_target(q_ND, keys_ND, queue_DK, temperature, key_temperature)
    positive_fraction_N = torch.zeros_like(target.logsumexp_N)
    if not mask_positive:
        positive_fraction_N = torch.sigmoid(-target.logsumexp_N)  # e^0 / (e^0 + sum_j e^(k.n_j / tau_m))
    weight_N = lambda_ + (1 - lambda_) * positive_fraction_N
    relation_weight_N = (1 - lambda_) * (1 - positive_fraction_N)

    positive_N = (q_ND * keys_ND).sum(dim=1) / temperature
    target_N = (q_ND * target.mean_ND).sum(dim=1) / temperature
    # log Z - positive, and log Z - (mean logit under s), each with its weight in w
    contrastive_N = info_nce(positive_N, negatives_N)
    relational_N = torch.logaddexp(positive_N, negatives_N) - target_N
    loss = (weight_N * contrastive_N + relation_weight_N * relational_N).mean()
    metrics = queue_metrics(positive_N, hardest_N, temperature)
    metrics["target_positive"] = weight_N.mean()
    return LossOutput(loss, keys_ND.detach(), metrics)
