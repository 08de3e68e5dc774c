"""ReSSL: trains the query's similarity distribution over the queue to match the key's; it has no positive pair."""

from torch import Tensor

from ..common.config.limits import ABOVE_0
from .method import LossOutput
from .ops import check_queue_inputs, queue_logsumexp_and_target, queue_metrics


def ressl(
    q_ND: Tensor, keys_MND: Tensor, queue_DK: Tensor, *, temperature: float, key_temperature: float
) -> LossOutput:
    r"""Compute L_ReSSL (Zheng et al. 2021), in the notation of SCE's supplement, Sec. B.

    .. math:: L = -\frac1N \sum_i \sum_{j=1}^K s_{ij} \log \frac{\exp(q_i \cdot n_j / \tau)}{\sum_l
              \exp(q_i \cdot n_l / \tau)}, \quad s_i = \mathrm{softmax}([k_i \cdot n_1, \dots, k_i \cdot n_K] / \tau_m)

    This is SCE at lambda = 0 with the positive taken out of both distributions. No gradient flows through s.

    Args:
        q_ND: (N, D) unit-norm queries, of strong views.
        keys_MND: (1, N, D) unit-norm keys of the momentum encoder, of weak views.
        queue_DK: (D, K) negatives.
        temperature: tau > 0.
        key_temperature: tau_m > 0; it should be below tau, or the features collapse.

    Returns:
        The mean loss; the keys to enqueue (N, D); queue_accuracy and positive_similarity.

    Raises:
        ValueError: tau or tau_m out of range, shapes that disagree, or more than one key per query.
    """
    ABOVE_0.check("temperature", temperature)
    ABOVE_0.check("key_temperature", key_temperature)
    q_ND, keys_MND, queue_DK = check_queue_inputs(q_ND, keys_MND, queue_DK, most_keys=1)
    keys_ND = keys_MND[0].detach()
    negatives_N, hardest_N, target = queue_logsumexp_and_target(q_ND, keys_ND, queue_DK, temperature, key_temperature)
    # sum_j s_j = 1, so -sum_j s_j log p_j = log Z - q.(sum_j s_j n_j) / tau
    loss = (negatives_N - (q_ND * target.mean_ND).sum(dim=1) / temperature).mean()
    positive_N = (q_ND * keys_ND).sum(dim=1) / temperature
    return LossOutput(loss, keys_ND, queue_metrics(positive_N, hardest_N, temperature))
