"""MoCo with M' positive keys per image: the vanilla form that JCL's Fig. 1(b) shows, and its baseline."""

from torch import Tensor

from ..common.config.limits import ABOVE_0
from .method import LossOutput
from .ops import check_queue_inputs, info_nce, queue_logsumexp, queue_metrics


def multikey(q_ND: Tensor, keys_MND: Tensor, queue_DK: Tensor, *, temperature: float) -> LossOutput:
    r"""Compute the mean of M' InfoNCE losses, Eq. (2)-(3) of JCL (Cai et al. 2020).

    .. math:: L = \frac1N \sum_i \frac1{M'} \sum_m -\log \frac{\exp(q_i \cdot k_{im} / \tau)}
              {\exp(q_i \cdot k_{im} / \tau) + \sum_{j=1}^K \exp(q_i \cdot n_j / \tau)}

    The negatives' sum does not depend on m, so each query is compared with the queue once for all M' keys.

    Args:
        q_ND: (N, D) unit-norm queries.
        keys_MND: (M', N, D) unit-norm keys of the momentum encoder.
        queue_DK: (D, K) negatives.
        temperature: tau > 0.

    Returns:
        The mean loss; each query's mean key (N, D) to enqueue, not renormalized, as in JCL, so that the two differ in
        their loss only; queue_accuracy and positive_similarity over all N M' pairs, and positive_variance (the mean
        diagonal entry of the keys' covariance).

    Raises:
        ValueError: tau out of range, M' = 0 or shapes that disagree.
    """
    ABOVE_0.check("temperature", temperature)
    q_ND, keys_MND, queue_DK = check_queue_inputs(q_ND, keys_MND, queue_DK)
    positive_MN = (keys_MND * q_ND).sum(dim=2) / temperature
    negatives_N, hardest_N = queue_logsumexp(q_ND, queue_DK, temperature)
    loss = info_nce(positive_MN, negatives_N).mean()
    metrics = queue_metrics(positive_MN, hardest_N, temperature, keys_MND)
    return LossOutput(loss, keys_MND.detach().mean(dim=0), metrics)
