"""Detectron2's RoI heads, changed where the recipes or the precision need it."""

from collections.abc import Callable
from functools import partial
from typing import Any

from detectron2.layers import ROIAlign, get_norm
from detectron2.modeling.roi_heads import ROI_HEADS_REGISTRY, Res5ROIHeads
from fvcore.common.config import CfgNode
from torch import Tensor, nn


def keep_rois_in_float32(model: nn.Module) -> None:
    """Pool features in float32: Detectron2 casts RoIs to the features' type, in bfloat16 a grid of 4 to 8 pixels."""
    pools: list[Any] = [module for module in model.modules() if isinstance(module, ROIAlign)]
    for pool in pools:
        pool.forward = partial(_pool_in_float32, pool.forward)


def _pool_in_float32(pool: Callable[[Tensor, Tensor], Tensor], features: Tensor, rois: Tensor) -> Tensor:
    return pool(features.float(), rois).to(features.dtype)


@ROI_HEADS_REGISTRY.register()
class Res5ROIHeadsExtraNorm(Res5ROIHeads):
    """MoCo's C4 head (He et al. 2020, Appendix): res5 ends in a norm of MODEL.RESNETS.NORM, which is not pretrained.

    It gives the box and mask predictors, which have no norm, inputs of the same scale whatever the backbone's.
    """

    @classmethod
    def _build_res5_block(cls, cfg: CfgNode) -> tuple[nn.Sequential, int]:
        res5, channels = super()._build_res5_block(cfg)
        res5.add_module("norm", get_norm(cfg.MODEL.RESNETS.NORM, channels))
        return res5, channels
