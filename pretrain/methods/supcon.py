"""Supervised contrastive learning (SupCon), the baseline of TCL, and SimCLR, which is SupCon without labels."""

from torch import Tensor

from .method import LossOutput
from .tcl import tcl


def supcon(*batch: Tensor, temperature: float) -> LossOutput:
    r"""Compute L_out of SupCon (Khosla et al. 2020), Eq. (2): TCL with k1 = 0 and k2 = 1.

    .. math:: L_i = \frac{-1}{|P_i|} \sum_{p \in P_i} \log \frac{\exp(z_i \cdot z_p / \tau)}
              {\sum_{a \ne i} \exp(z_i \cdot z_a / \tau)}

    With the image as the label, P_i are the image's other views: of two views, NT-Xent, Eq. (1) of SimCLR (Chen et al.
    2020). Arguments, result and errors are those of :func:`pretrain.methods.tcl.tcl`.
    """
    return tcl(*batch, temperature=temperature, k1=0.0, k2=1.0)
