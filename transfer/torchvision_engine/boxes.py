"""Operations on boxes for region proposals and heads: decode, match, sample, pool.

Boxes are x0, y0, x1, y1 in pixels of the resized image. Reading a value from the device is a host-device
synchronization, which waits for all queued work, so there are as few as possible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import box_iou, roi_align

from .mapper import Target

_MAX_LOG_SCALE = math.log(1000.0 / 16)  # decoded boxes grow by this factor at most, as in Detectron2
DeltaWeights = Any  # four factors of the deltas x, y, w, h, which need not be the tensor that torchvision names


def decode(deltas: Tensor, anchors: Tensor, weights: DeltaWeights) -> Tensor:
    """Apply ``deltas`` (..., 4) to ``anchors``, whose shape need only be broadcastable; return boxes (..., 4)."""
    x0, y0, x1, y1 = anchors.unbind(-1)
    anchor_w = x1 - x0
    anchor_h = y1 - y0
    dx, dy, dw, dh = (delta / weight for delta, weight in zip(deltas.unbind(-1), weights, strict=True))
    x = dx * anchor_w + (x0 + 0.5 * anchor_w)
    y = dy * anchor_h + (y0 + 0.5 * anchor_h)
    w = dw.clamp(max=_MAX_LOG_SCALE).exp() * anchor_w
    h = dh.clamp(max=_MAX_LOG_SCALE).exp() * anchor_h
    return torch.stack([x - 0.5 * w, y - 0.5 * h, x + 0.5 * w, y + 0.5 * h], -1)


def match(gt_boxes: Tensor, boxes: Tensor, low: float, high: float, keep_best: bool) -> tuple[Tensor, Tensor]:
    """Assign the ground-truth box of the highest IoU to every box.

    Args:
        low, high: below ``low`` a box is background, from ``high`` on foreground, and ignored in between.
        keep_best: the boxes with the highest IoU for a ground-truth box are foreground, whatever that IoU is.

    Returns:
        Indices of ground-truth boxes (R,), 0 where there are none, and labels (R,): 1 foreground, 0 background, -1
        ignored.
    """
    if len(gt_boxes) == 0:
        zeros = torch.zeros(len(boxes), dtype=torch.long, device=boxes.device)
        return zeros, zeros
    iou_GR = box_iou(gt_boxes, boxes)
    best_R, index_R = iou_GR.max(0)
    label_R = (best_R >= high).long() - ((best_R >= low) & (best_R < high)).long()
    if keep_best:
        label_R = label_R.masked_fill((iou_GR == iou_GR.max(1, keepdim=True).values).any(0), 1)
    return index_R, label_R


def subsample(labels: Tensor, size: int, positive_fraction: float) -> tuple[Tensor, Tensor]:
    """Draw indices of positives (labels above 0) and negatives (0) at random: positives first, as Detectron2 does.

    Args:
        labels: (R,); those below 0 are ignored.
        size: maximum number of positives and negatives together.
        positive_fraction: maximum fraction of positives in ``size``; negatives fill the remainder.
    """
    positive = torch.where(labels > 0)[0]
    negative = torch.where(labels == 0)[0]
    num_positive = min(len(positive), int(size * positive_fraction))
    positive = positive[torch.randperm(len(positive), device=labels.device)[:num_positive]]
    return positive, negative[torch.randperm(len(negative), device=labels.device)[: size - num_positive]]


@dataclass(frozen=True)
class Sample:
    """R proposals of one image to train the heads on, the F foreground ones first.

    Attributes:
        boxes: (R, 4).
        labels: (R,) in [0, K]; K is the background.
        matched: (F,) indices of the foreground's ground-truth instances.
        target: the image's ground truth.
    """

    boxes: Tensor
    labels: Tensor
    matched: Tensor
    target: Target

    @property
    def foreground(self) -> Sample:
        count = len(self.matched)
        return Sample(self.boxes[:count], self.labels[:count], self.matched, self.target)


@dataclass(frozen=True)
class RoIPooler:
    """RoIAlign over p2 .. p5, the level of a RoI by Eq. (1) of the FPN paper (Lin et al., 2017)."""

    resolution: int
    sampling_ratio: int

    def __call__(self, features: list[Tensor], boxes: list[Tensor]) -> Tensor:
        """Return features (R, C, resolution, resolution) of the boxes (R_i, 4) of every image, in order."""
        rois = torch.cat([F.pad(b, (1, 0), value=i) for i, b in enumerate(boxes)])
        side = ((rois[:, 3] - rois[:, 1]) * (rois[:, 4] - rois[:, 2])).sqrt()
        level = torch.floor(4 + torch.log2(side / 224 + 1e-8)).clamp(2, 5).long()
        # Sorting the RoIs by level needs one host-device synchronization, for the counts; a search per level, one each.
        order = torch.argsort(level, stable=True)
        counts = (level[:, None] == torch.arange(2, 6, device=level.device)).sum(0).tolist()
        out = features[0].new_empty(len(rois), features[0].shape[1], self.resolution, self.resolution)
        for stage, feature, index in zip(range(2, 6), features[:4], order.split(counts), strict=True):
            pooled = roi_align(feature, rois[index], self.resolution, 0.5**stage, self.sampling_ratio, aligned=True)
            out.index_put_((index,), pooled.to(out.dtype))
        return out
