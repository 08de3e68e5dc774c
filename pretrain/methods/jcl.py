"""Joint Contrastive Learning: a bound on infinitely many positive keys, from M' of them."""

from torch import Tensor

from ..common.config.limits import ABOVE_0, AT_LEAST_0
from .method import LossOutput
from .ops import check_queue_inputs, info_nce, queue_logsumexp, queue_metrics


def jcl(q_ND: Tensor, keys_MND: Tensor, queue_DK: Tensor, *, temperature: float, lambda_: float) -> LossOutput:
    r"""Compute JCL's loss, Eq. (8)-(9) and Algorithm 1 (Cai et al. 2020).

    .. math:: L_i = \log \Big[ \exp\big(q_i \cdot \mu_i / \tau + \tfrac{\lambda}{2 \tau^2} q_i^T \Sigma_i q_i\big)
              + \sum_{j=1}^K \exp(q_i \cdot n_j / \tau) \Big] - q_i \cdot \mu_i / \tau, \quad L = \frac1N \sum_i L_i

    mu_i and Sigma_i are mean and biased covariance (divided by M') of the query's M' keys. Sigma_i is never formed:
    with s_im = q_i.k_im / tau, its quadratic form q_i^T Sigma_i q_i / tau^2 is the biased variance v_i of s_im over m,
    and q_i.mu_i / tau is their mean m_i. So L_i is lambda v_i / 2 plus InfoNCE of the logit m_i + lambda v_i / 2.

    Args:
        q_ND: (N, D) unit-norm queries.
        keys_MND: (M', N, D) unit-norm keys of the momentum encoder; M' = 1 is MoCo.
        queue_DK: (D, K) negatives.
        temperature: tau > 0.
        lambda_: weight of the covariance, at least 0; 0 is InfoNCE on the mean key.

    Returns:
        The mean loss; the mean keys mu (N, D) to enqueue, not renormalized; queue_accuracy and positive_similarity of
        the mean keys, positive_variance (the mean diagonal entry of Sigma) and query_variance (the mean q^T Sigma q).

    Raises:
        ValueError: tau or lambda out of range, M' = 0 or shapes that disagree.
    """
    ABOVE_0.check("temperature", temperature)
    AT_LEAST_0.check("lambda", lambda_)
    q_ND, keys_MND, queue_DK = check_queue_inputs(q_ND, keys_MND, queue_DK)
    logits_MN = (keys_MND * q_ND).sum(dim=2) / temperature
    mean_N = logits_MN.mean(dim=0)
    variance_N = logits_MN.var(dim=0, correction=0)
    negatives_N, hardest_N = queue_logsumexp(q_ND, queue_DK, temperature)
    covariance_N = lambda_ / 2 * variance_N
    loss = (covariance_N + info_nce(mean_N + covariance_N, negatives_N)).mean()
    metrics = queue_metrics(mean_N, hardest_N, temperature, keys_MND)
    metrics["query_variance"] = variance_N.detach().mean() * temperature**2
    return LossOutput(loss, keys_MND.detach().mean(dim=0), metrics)
