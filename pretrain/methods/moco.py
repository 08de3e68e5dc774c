"""MoCo v1 and v2: InfoNCE of one positive key against a queue. The versions differ in their recipes only."""

from torch import Tensor

from ..common.config.limits import ABOVE_0
from .method import LossOutput
from .ops import check_queue_inputs, info_nce, queue_logsumexp, queue_metrics


def moco(q_ND: Tensor, keys_MND: Tensor, queue_DK: Tensor, *, temperature: float) -> LossOutput:
    r"""Compute InfoNCE, Eq. (1) of JCL (Cai et al. 2020); MoCo (He et al. 2020), Eq. (1).

    .. math:: L = -\frac1N \sum_i \log \frac{\exp(q_i \cdot k_i / \tau)}
              {\exp(q_i \cdot k_i / \tau) + \sum_{j=1}^K \exp(q_i \cdot n_j / \tau)}

    Args:
        q_ND: (N, D) unit-norm queries.
        keys_MND: (1, N, D) unit-norm keys of the momentum encoder, one per query.
        queue_DK: (D, K) negatives.
        temperature: tau > 0.

    Returns:
        The mean loss; the keys to enqueue (N, D); queue_accuracy and positive_similarity.

    Raises:
        ValueError: tau out of range, shapes that disagree, or more than one key per query.
    """
    ABOVE_0.check("temperature", temperature)
    q_ND, keys_MND, queue_DK = check_queue_inputs(q_ND, keys_MND, queue_DK, most_keys=1)
    positive_N = (q_ND * keys_MND[0]).sum(dim=1) / temperature
    negatives_N, hardest_N = queue_logsumexp(q_ND, queue_DK, temperature)
    loss = info_nce(positive_N, negatives_N).mean()
    return LossOutput(loss, keys_MND[0].detach(), queue_metrics(positive_N, hardest_N, temperature))
