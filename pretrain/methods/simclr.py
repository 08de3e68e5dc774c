"""SimCLR: InfoNCE between two views of an image, with the rest of the batch as negatives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .method import TEMPERATURE, Method, Objective
from .tcl import tcl

if TYPE_CHECKING:
    from torch import Tensor


def simclr(*batch: Tensor, temperature: float) -> Objective:
    r"""NT-Xent, Eq. (1) of SimCLR (Chen et al. 2020): TCL with k1 = 0, k2 = 1, where the label is the image.

    .. math:: L_i = -\log \frac{\exp(z_i \cdot z_{p(i)} / \tau)}{\sum_{a \ne i} \exp(z_i \cdot z_a / \tau)}

    p(i) is the other view of i's image. With V > 2 views the loss is the mean over the V - 1 positives.
    Arguments, result and errors are those of :func:`pretrain.methods.tcl.tcl`; labels are image indices.
    """
    return tcl(*batch, temperature=temperature, k1=0.0, k2=1.0)


METHOD = Method(simclr, "batch", {"temperature": TEMPERATURE})
