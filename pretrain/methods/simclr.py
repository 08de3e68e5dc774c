"""SimCLR: InfoNCE between two views of an image, with the rest of the batch as negatives."""

from __future__ import annotations

from torch import Tensor

from .common import Objective
from .supcon import supcon


def simclr(
    anchors_AD: Tensor,
    candidates_BD: Tensor,
    anchor_labels_A: Tensor,
    candidate_labels_B: Tensor,
    self_index_A: Tensor,
    *,
    temperature: float,
) -> Objective:
    r"""NT-Xent, Eq. (1) of SimCLR (Chen et al. 2020): SupCon where the label is the image and has two views.

    .. math:: L_i = -\log \frac{\exp(z_i \cdot z_{p(i)} / \tau)}{\sum_{a \ne i} \exp(z_i \cdot z_a / \tau)}

    p(i) is the other view of i's image. With V > 2 views the loss is the mean over the V - 1 positives.
    Arguments, result and errors are those of :func:`pretrain.methods.tcl.tcl`; labels are image indices.
    """
    return supcon(anchors_AD, candidates_BD, anchor_labels_A, candidate_labels_B, self_index_A, temperature=temperature)
