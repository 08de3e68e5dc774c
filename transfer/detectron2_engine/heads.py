"""The head of MoCo's C4 detectors: Detectron2's, with one more batch norm (He et al. 2020, Appendix)."""

from __future__ import annotations

from detectron2.layers import get_norm
from detectron2.modeling.roi_heads import ROI_HEADS_REGISTRY, Res5ROIHeads
from fvcore.common.config import CfgNode
from torch import nn


@ROI_HEADS_REGISTRY.register()
class Res5ROIHeadsExtraNorm(Res5ROIHeads):
    """Res5ROIHeads whose res5 ends in a norm of MODEL.RESNETS.NORM, which is not pretrained.

    It gives the box and mask predictors, which have no norm, inputs of the same scale whatever the backbone's.
    """

    @classmethod
    def _build_res5_block(cls, cfg: CfgNode) -> tuple[nn.Sequential, int]:
        res5, channels = super()._build_res5_block(cfg)
        res5.add_module("norm", get_norm(cfg.MODEL.RESNETS.NORM, channels))
        return res5, channels
