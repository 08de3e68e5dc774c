"""The disk that a detector's checkpoints take, from its config alone."""

from __future__ import annotations

from itertools import pairwise

from fvcore.common.config import CfgNode

from pretrain.common import disk


def checkpoint_bytes(cfg: CfgNode) -> int:
    """What the checkpoints of a training take at most: those that are kept (and a new one, while it is written), the
    final one, the best one and one that is removed after the evaluation. Heads of the user's own are counted as this
    project's.
    """
    backbone = disk.BACKBONE.get(f"resnet{cfg.MODEL.RESNETS.DEPTH}", disk.BACKBONE["resnet101"])
    heads = _heads(cfg.MODEL)
    momentum = heads + (0 if cfg.MODEL.BACKBONE.FREEZE_AT >= 5 else backbone)
    periodic, keep = cfg.SOLVER.MAX_ITER // cfg.SOLVER.CHECKPOINT_PERIOD, cfg.SOLVER.get("CHECKPOINT_KEEP", 0)
    count = min(periodic, keep + 1 if keep else periodic) + 2 + bool(cfg.TEST.get("BEST", ""))
    averages = momentum if cfg.SOLVER.get("EMA", 0.0) else 0
    return (backbone + heads + momentum + averages) * disk.BYTES * count


def _heads(model: CfgNode) -> int:
    """Weights of FPN, RPN and heads."""
    if "fpn" not in model.BACKBONE.NAME:
        return _c4_heads(model)
    channels, classes = model.FPN.OUT_CHANNELS, model.ROI_HEADS.NUM_CLASSES
    fpn = sum(disk.linear(model.RESNETS.RES2_OUT_CHANNELS * scale, channels) for scale in (1, 2, 4, 8))
    fpn += 4 * _conv3(channels, channels)
    anchors = len(model.ANCHOR_GENERATOR.ASPECT_RATIOS[0]) * len(model.ANCHOR_GENERATOR.SIZES[0])
    rpn = _conv3(channels, channels) + disk.linear(channels, 5 * anchors)
    box = model.ROI_BOX_HEAD
    widths = [channels] + [box.CONV_DIM] * box.NUM_CONV
    flat = [widths[-1] * box.POOLER_RESOLUTION**2] + [box.FC_DIM] * box.NUM_FC
    total = fpn + rpn + _convs(widths) + sum(disk.linear(a, b) for a, b in pairwise(flat))
    total += disk.linear(flat[-1], 5 * classes + 1)
    if model.MASK_ON:
        mask = model.ROI_MASK_HEAD
        widths = [channels] + [mask.CONV_DIM] * mask.NUM_CONV
        total += _convs(widths) + 4 * widths[-1] * mask.CONV_DIM + disk.linear(mask.CONV_DIM, classes)
    if model.KEYPOINT_ON:
        keypoint = model.ROI_KEYPOINT_HEAD
        widths = [channels, *keypoint.CONV_DIMS]
        total += _convs(widths) + 16 * widths[-1] * keypoint.NUM_KEYPOINTS
    return total


def _c4_heads(model: CfgNode) -> int:
    """Weights of RPN and heads around res5, which is counted with the backbone."""
    channels, classes = 4 * model.RESNETS.RES2_OUT_CHANNELS, model.ROI_HEADS.NUM_CLASSES
    anchors = len(model.ANCHOR_GENERATOR.ASPECT_RATIOS[0]) * len(model.ANCHOR_GENERATOR.SIZES[0])
    total = _conv3(channels, channels) + disk.linear(channels, 5 * anchors) + disk.linear(2 * channels, 5 * classes + 1)
    if model.MASK_ON:
        width = model.ROI_MASK_HEAD.CONV_DIM
        total += 4 * 2 * channels * width + disk.linear(width, classes)
    return total


def _conv3(inputs: int, outputs: int) -> int:
    return (9 * inputs + 1) * outputs


def _convs(widths: list[int]) -> int:
    return sum(_conv3(a, b) for a, b in pairwise(widths))
