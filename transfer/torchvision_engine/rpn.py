"""Anchors and region proposals (Ren et al., 2015) as Detectron2 computes them.

Shapes: N images, A anchors over all levels, R proposals of an image.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection._utils import encode_boxes
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import batched_nms, clip_boxes_to_image

from .boxes import DeltaWeights, decode, match, subsample
from .mapper import Target


class Anchors(AnchorGenerator):
    """Boxes of fixed sizes and shapes around every cell of every level, which are not rounded as torchvision's are.

    Args:
        sizes: square roots of areas in pixels, one list for all levels, or one list per level.
        aspect_ratios: heights divided by widths, likewise.
        strides: strides of the levels in pixels.
    """

    def __init__(
        self, sizes: Sequence[Sequence[float]], aspect_ratios: Sequence[Sequence[float]], strides: Sequence[int]
    ) -> None:
        sizes = list(sizes) * (len(strides) if len(sizes) == 1 else 1)
        aspect_ratios = list(aspect_ratios) * (len(strides) if len(aspect_ratios) == 1 else 1)
        super().__init__(sizes, aspect_ratios)
        if len(set(self.num_anchors_per_location())) > 1:
            counts = self.num_anchors_per_location()
            raise ValueError(f"each level must have the same number of anchors per location, not {counts}")
        self.strides: list[Any] = [(stride, stride) for stride in strides]

    def generate_anchors(self, scales: Sequence[float], aspect_ratios: Sequence[float], *_: Any) -> Tensor:
        """Return the anchors (sizes x ratios, 4) around 0."""
        widths = [((size**2.0 / ratio) ** 0.5, ratio) for size in scales for ratio in aspect_ratios]
        return torch.tensor([[-w / 2.0, -ratio * w / 2.0, w / 2.0, ratio * w / 2.0] for w, ratio in widths])

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        """Return one image's anchors (H * W * anchors per cell, 4) per level; float32 under mixed precision, too."""
        self.set_cell_anchors(torch.float32, features[0].device)
        return self.grid_anchors([list(feature.shape[-2:]) for feature in features], self.strides)


class RPNHead(nn.Module):
    """An objectness logit and four box deltas for every anchor."""

    def __init__(self, channels: int, anchors_per_cell: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.objectness_logits = nn.Conv2d(channels, anchors_per_cell, 1)
        self.anchor_deltas = nn.Conv2d(channels, anchors_per_cell * 4, 1)
        for conv in self.children():
            nn.init.normal_(conv.get_parameter("weight"), std=0.01)
            nn.init.zeros_(conv.get_parameter("bias"))

    def forward(self, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Map a level's features to logits (N, A) and deltas (N, A, 4) of its anchors, in the anchors' order."""
        x = F.relu(self.conv(feature))
        logits = self.objectness_logits(x)
        deltas = self.anchor_deltas(x)
        return logits.permute(0, 2, 3, 1).flatten(1), deltas.permute(0, 2, 3, 1).reshape(len(feature), -1, 4)


class RPN(nn.Module):
    """Region proposals and their losses.

    The losses are sums over the sampled anchors divided by ``batch_size_per_image`` x images. Proposals are ranked by
    logit; the best ``pre_nms_top_n`` per level and image are decoded and clipped. Boxes with a side of at most
    ``min_size`` pixels are dropped, NMS runs per level, and the best ``post_nms_top_n`` per image remain.

    Args:
        box_weights: factors of the deltas x, y, w, h in the regression.
        iou_thresholds: an anchor is background below the first, foreground from the second on.
        positive_fraction: maximum fraction of foreground among the sampled anchors.
        beta: where smooth L1 changes from quadratic to linear.
        pre_nms_top_n, post_nms_top_n: numbers of proposals in training and in evaluation.
    """

    def __init__(
        self,
        anchors: Anchors,
        head: RPNHead,
        *,
        box_weights: DeltaWeights,
        iou_thresholds: tuple[float, float],
        batch_size_per_image: int,
        positive_fraction: float,
        beta: float,
        min_size: float,
        nms_threshold: float,
        pre_nms_top_n: tuple[int, int],
        post_nms_top_n: tuple[int, int],
    ) -> None:
        super().__init__()
        self.anchor_generator, self.rpn_head = anchors, head
        self.box_weights, self.iou_thresholds = box_weights, iou_thresholds
        self.batch_size_per_image, self.positive_fraction = batch_size_per_image, positive_fraction
        self.beta, self.min_size, self.nms_threshold = beta, min_size, nms_threshold
        self.pre_nms_top_n, self.post_nms_top_n = pre_nms_top_n, post_nms_top_n

    def forward(
        self, features: list[Tensor], image_sizes: list[tuple[int, int]], targets: list[Target] | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the proposals (R, 4) of every image, best first, and, with ``targets``, the losses.

        The losses are NaN if a proposal's box or score is not finite: they are read anyway, and a test of the proposals
        themselves would be another host-device synchronization.
        """
        anchors = self.anchor_generator(features)
        logits, deltas = map(list, zip(*map(self.rpn_head, features), strict=True))
        losses = {}
        if targets is not None:
            losses = self.losses(torch.cat(anchors), torch.cat(logits, 1), torch.cat(deltas, 1), targets)
        with torch.no_grad():
            proposals, finite = self.select_proposals(anchors, logits, deltas, image_sizes)
        return proposals, {name: loss.where(finite, torch.nan) for name, loss in losses.items()}

    def losses(
        self, anchors: Tensor, logits_NA: Tensor, deltas_NA4: Tensor, targets: list[Target]
    ) -> dict[str, Tensor]:
        """Compute cross-entropy of foreground and background, and smooth L1 over the foreground's deltas."""
        samples = []
        for image, target in enumerate(targets):
            index, label = match(target["boxes"], anchors, *self.iou_thresholds, keep_best=True)
            positive, negative = subsample(label, self.batch_size_per_image, self.positive_fraction)
            pairs = target["boxes"][index[positive]], anchors[positive]
            samples.append((positive + image * len(anchors), negative + image * len(anchors), *pairs))
        positive, negative, matched_boxes, positive_anchors = map(torch.cat, zip(*samples, strict=True))
        sampled = logits_NA.flatten()[torch.cat([positive, negative])]
        is_object = torch.zeros_like(sampled)
        is_object[: len(positive)] = 1.0
        cls = F.binary_cross_entropy_with_logits(sampled, is_object, reduction="sum")
        target_deltas = encode_boxes(matched_boxes, positive_anchors, self.box_weights)
        predicted = deltas_NA4.flatten(0, 1)[positive].float()
        loc = F.smooth_l1_loss(predicted, target_deltas, beta=self.beta, reduction="sum")
        normalizer = self.batch_size_per_image * len(targets)
        return {"loss_rpn_cls": cls / normalizer, "loss_rpn_loc": loc / normalizer}

    def select_proposals(
        self, anchors: list[Tensor], logits: list[Tensor], deltas: list[Tensor], image_sizes: list[tuple[int, int]]
    ) -> tuple[list[Tensor], Tensor]:
        """Return the proposals (R, 4) of every image, best first, and whether all boxes and scores are finite.

        Args:
            anchors, logits, deltas: one entry per level.
        """
        pre_nms = self.pre_nms_top_n[not self.training]
        post_nms = self.post_nms_top_n[not self.training]
        candidates = []
        for level, (anchor, logit, delta) in enumerate(zip(anchors, logits, deltas, strict=True)):
            best, index = logit.float().topk(min(pre_nms, logit.shape[1]), dim=1)
            best_deltas = delta.gather(1, index[..., None].expand(-1, -1, 4)).float()
            candidates.append((best, best_deltas, anchor[index], torch.full_like(index, level)))
        score_NR, delta_NR4, anchor_NR4, level_NR = (torch.cat(levels, 1) for levels in zip(*candidates, strict=True))
        box_NR4 = decode(delta_NR4, anchor_NR4, self.box_weights)
        finite_NR = torch.isfinite(box_NR4).all(2) & torch.isfinite(score_NR)
        proposals = []
        for box, score, level, finite, size in zip(box_NR4, score_NR, level_NR, finite_NR, image_sizes, strict=True):
            box = clip_boxes_to_image(box, size)
            is_large = (box[:, 2] - box[:, 0] > self.min_size) & (box[:, 3] - box[:, 1] > self.min_size)
            index = torch.where(finite & is_large)[0]
            box = box[index]
            proposals.append(box[batched_nms(box, score[index], level[index], self.nms_threshold)[:post_nms]])
        return proposals, finite_NR.all()
