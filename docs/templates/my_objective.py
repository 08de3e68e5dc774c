"""Your own objective: InfoNCE whose positive logit is lowered by a margin.

    python tools/launch.py pretrain --import docs/templates/my_objective.py \
        --config-file configs/examples/demo_mocov2_R18_digits.yaml METHOD.NAME margin METHOD.MARGIN 0.1
"""

from torch import Tensor

from pretrain import METHODS, register
from pretrain.common.config.limits import AT_LEAST_0
from pretrain.methods import TEMPERATURE, Hyperparameter, LossOutput, Method
from pretrain.methods.ops import check_queue_inputs, info_nce, queue_logsumexp, queue_metrics


def margin_info_nce(
    q_ND: Tensor, keys_MND: Tensor, queue_DK: Tensor, *, temperature: float, margin: float
) -> LossOutput:
    """InfoNCE of the logits (q.k - margin) / tau and q.n / tau.

    Args:
        q_ND: (N, D) unit-norm queries, with gradient.
        keys_MND: (1, N, D) unit-norm keys of the momentum encoder.
        queue_DK: (D, K) negatives.
    """
    q_ND, keys_MND, queue_DK = check_queue_inputs(q_ND, keys_MND, queue_DK, most_keys=1)
    positive_N = ((keys_MND[0] * q_ND).sum(dim=1) - margin) / temperature
    negatives_N, hardest_N = queue_logsumexp(q_ND, queue_DK, temperature)
    loss = info_nce(positive_N, negatives_N).mean()
    return LossOutput(loss, keys_MND[0].detach(), queue_metrics(positive_N, hardest_N, temperature))


MARGIN = Hyperparameter("METHOD.MARGIN", 0.0, AT_LEAST_0, "amount subtracted from the positive similarity")
register(METHODS, "margin", Method(margin_info_nce, "queue", {"temperature": TEMPERATURE, "margin": MARGIN}))
