"""Your own objective within the batch: decoupled contrastive learning, InfoNCE without the positive in its denominator.

    python tools/launch.py pretrain --import docs/templates/my_batch_objective.py \
        --config-file configs/pretrain/data/digits.yaml METHOD.NAME decoupled METHOD.TEMPERATURE 0.1
"""

from torch import Tensor

from pretrain import METHODS, register
from pretrain.methods import TEMPERATURE, LossOutput, Method
from pretrain.methods.ops import check_batch_inputs


def decoupled(
    anchors_AD: Tensor,
    candidates_BD: Tensor,
    anchor_labels_A: Tensor,
    candidate_labels_B: Tensor,
    self_index_A: Tensor,
    *,
    temperature: float,
) -> LossOutput:
    """Compute the decoupled loss (Yeh et al. 2022): log sum_n exp(z_i.z_n / tau) - z_i.z_p / tau, averaged over i.

    Args:
        anchors_AD: (A, D) unit-norm embeddings of all views on this process, with gradient.
        candidates_BD: (B, D) unit-norm embeddings of all views on all processes, with gradient; contains the anchors.
        anchor_labels_A: (A,) number of each anchor's image: views with the same number are positives.
        candidate_labels_B: (B,) number of each candidate's image.
        self_index_A: (A,) row of each anchor among the candidates, which is no positive of itself.
    """
    anchors_AD, candidates_BD = check_batch_inputs(
        anchors_AD, candidates_BD, anchor_labels_A, candidate_labels_B, self_index_A
    )
    logits_AB = anchors_AD @ candidates_BD.T / temperature
    same_AB = anchor_labels_A[:, None] == candidate_labels_B
    positive_AB = same_AB.scatter(1, self_index_A[:, None], False)

    negative_logits_AB = logits_AB.masked_fill(same_AB, float("-inf"))
    positive_A = (logits_AB * positive_AB).sum(dim=1) / positive_AB.sum(dim=1)
    loss = (negative_logits_AB.logsumexp(dim=1) - positive_A).mean()

    positive_A = positive_A.detach()
    hardest_A = negative_logits_AB.detach().amax(dim=1)
    metrics = {
        "batch_accuracy": (positive_A > hardest_A).float().mean() * 100,
        "positive_similarity": positive_A.mean() * temperature,
    }
    return LossOutput(loss, None, metrics)


register(METHODS, "decoupled", Method(decoupled, "batch", {"temperature": TEMPERATURE}))
