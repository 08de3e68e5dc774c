r"""Anchors, region proposals and RoI pooling of torchvision, changed where Detectron2's differ.

What needs an answer from the device makes the host wait for all it has queued; there is as little of it as can be.

Shapes: N images, A anchors over all levels, R proposals or RoIs, C channels. Boxes are x0, y0, x1, y1 in pixels of the
resized image; level p(l) has stride 2**l.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead, concat_box_prediction_layers
from torchvision.ops import batched_nms, box_iou, clip_boxes_to_image, roi_align


class Anchors(AnchorGenerator):
    """torchvision's anchors without rounding, with fixed strides and an offset, in float32 under mixed precision too.

    Args:
        sizes, aspect_ratios: one list for every level, or one list a level.
        strides: of every level, in pixels.
        offset: of the first centre, in strides.
    """

    def __init__(
        self,
        sizes: Sequence[Sequence[float]],
        aspect_ratios: Sequence[Sequence[float]],
        strides: Sequence[int],
        offset: float,
    ) -> None:
        sizes, aspect_ratios = (x * len(strides) if len(x) == 1 else x for x in (list(sizes), list(aspect_ratios)))
        super().__init__(tuple(map(tuple, sizes)), tuple(map(tuple, aspect_ratios)))
        self.strides, self.offset = list(strides), offset

    def generate_anchors(self, scales, aspect_ratios, dtype=torch.float32, device=torch.device("cpu")) -> Tensor:  # noqa: B008
        boxes = []
        for size in scales:
            for ratio in aspect_ratios:  # height / width
                width = (size**2.0 / ratio) ** 0.5
                height = ratio * width
                boxes.append([-width / 2.0, -height / 2.0, width / 2.0, height / 2.0])
        return torch.tensor(boxes, dtype=dtype, device=device)

    def per_level(self, features: Sequence[Tensor]) -> list[Tensor]:
        """The anchors of one image, (H * W * anchors a cell, 4) a level."""
        self.cell_anchors = [cell.to(features[0].device) for cell in self.cell_anchors]  # moves them once
        anchors = []
        for feature, stride, cell in zip(features, self.strides, self.cell_anchors, strict=True):
            y, x = (
                torch.arange(self.offset * stride, n * stride, stride, dtype=torch.float32, device=feature.device)
                for n in feature.shape[-2:]
            )
            shift_y, shift_x = (grid.reshape(-1) for grid in torch.meshgrid(y, x, indexing="ij"))
            shifts = torch.stack((shift_x, shift_y, shift_x, shift_y), dim=1)
            anchors.append((shifts[:, None] + cell[None]).reshape(-1, 4))
        return anchors


class RegionProposals(RegionProposalNetwork):
    """torchvision's RPN with Detectron2's loss, normaliser and selection of proposals.

    The losses are sums over the sampled anchors divided by ``batch_size_per_image`` x images. Proposals are ranked by
    logit, the best ``pre_nms_top_n`` a level and image are decoded, clipped, freed of boxes with a side of at most
    ``min_size`` pixels, and put through NMS a level; the best ``post_nms_top_n`` an image remain.
    """

    def __init__(
        self,
        anchors: Anchors,
        head: RPNHead,
        *,
        box_weights: tuple[float, float, float, float],
        min_size: float,
        beta: float,
        loss_weight: float,
        box_loss_weight: float,
        **kwargs,
    ) -> None:
        super().__init__(anchors, head, **kwargs)
        self.anchors = anchors
        self.box_coder.weights = box_weights
        self.min_size, self.beta = min_size, beta
        self.loss_weight, self.box_loss_weight = loss_weight, box_loss_weight

    def forward(  # type: ignore[override]
        self,
        image_sizes: list[tuple[int, int]],
        features: list[Tensor],
        targets: list[dict[str, Tensor]] | None = None,
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Proposals (R, 4) of every image and, with ``targets``, the losses ``loss_rpn_cls`` and ``loss_rpn_loc``."""
        logits, deltas = self.head(features)
        anchors = self.anchors.per_level(features)
        counts = [len(a) for a in anchors]
        logits, deltas = concat_box_prediction_layers(logits, deltas)
        logits_NA, deltas_NA4 = logits.reshape(len(image_sizes), -1), deltas.reshape(len(image_sizes), -1, 4)
        losses = self.losses(torch.cat(anchors), logits_NA, deltas_NA4, targets) if targets is not None else {}
        with torch.no_grad():
            proposals = self.select(
                anchors, logits_NA.float().split(counts, 1), deltas_NA4.split(counts, 1), image_sizes
            )
        return proposals, losses

    def losses(
        self, anchors: Tensor, logits: Tensor, deltas: Tensor, targets: list[dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Losses of the sampled anchors; logits (N, A), deltas (N, A, 4)."""
        labels, matched = self.assign_targets_to_anchors([anchors] * len(targets), targets)
        size, fraction = self.fg_bg_sampler.batch_size_per_image, self.fg_bg_sampler.positive_fraction
        positives, negatives = zip(*(subsample(label, size, fraction) for label in labels), strict=True)
        normaliser = size * len(targets)
        positive, negative = (
            torch.cat([index + image * len(anchors) for image, index in enumerate(indices)])
            for indices in (positives, negatives)
        )
        sampled = logits.flatten()[torch.cat([positive, negative])]
        wanted = torch.zeros_like(sampled)
        wanted[: len(positive)] = 1.0
        cls = F.binary_cross_entropy_with_logits(sampled, wanted, reduction="sum")
        boxes = torch.cat([box[index] for box, index in zip(matched, positives, strict=True)])
        chosen = torch.cat([anchors[index] for index in positives])
        loc = F.smooth_l1_loss(
            deltas.reshape(-1, 4)[positive].float(), self.box_coder.encode_single(boxes, chosen), beta=self.beta,
            reduction="sum",
        )  # fmt: skip
        return {
            "loss_rpn_cls": cls / normaliser * self.loss_weight,
            "loss_rpn_loc": loc / normaliser * (self.loss_weight * self.box_loss_weight),
        }

    def select(
        self,
        anchors: list[Tensor],
        logits: Sequence[Tensor],
        deltas: Sequence[Tensor],
        image_sizes: list[tuple[int, int]],
    ) -> list[Tensor]:
        """Proposals (R, 4) of every image, best first; one entry a level in the other lists.

        Raises:
            FloatingPointError: a box or score is not finite in training.
        """
        scores, picked, bases, levels = [], [], [], []
        for level, (anchor, logit, delta) in enumerate(zip(anchors, logits, deltas, strict=True)):
            best, index = logit.topk(min(self.pre_nms_top_n(), logit.shape[1]), dim=1)
            scores.append(best)
            picked.append(delta.gather(1, index[..., None].expand(-1, -1, 4)).float())
            bases.append(anchor[index])
            levels.append(torch.full_like(index[0], level))
        all_deltas, score_NR, all_levels = torch.cat(picked, 1), torch.cat(scores, 1), torch.cat(levels)
        box_NR4 = self.box_coder.decode_single(all_deltas.flatten(0, 1), torch.cat(bases, 1).flatten(0, 1))
        box_NR4 = box_NR4.reshape(all_deltas.shape)
        finite_NR = torch.isfinite(box_NR4).all(2) & torch.isfinite(score_NR)
        if self.training and not finite_NR.all():
            raise FloatingPointError("a proposal's box or score is not finite")
        results = []
        for box, score, finite, size in zip(box_NR4, score_NR, finite_NR, image_sizes, strict=True):
            box = clip_boxes_to_image(box, size)
            keep = finite & (box[:, 2] - box[:, 0] > self.min_size) & (box[:, 3] - box[:, 1] > self.min_size)
            kept = torch.where(keep)[0]
            box, score, level = box[kept], score[kept], all_levels[kept]
            results.append(box[batched_nms(box, score, level, self.nms_thresh)[: self.post_nms_top_n()]])
        return results


class RoIPooler(nn.Module):
    """RoIAlign (aligned) over levels p2-p5, a RoI's level by Eq. (1) of the FPN paper, as Detectron2 assigns it."""

    def __init__(self, resolution: int, sampling_ratio: int) -> None:
        super().__init__()
        self.resolution, self.sampling_ratio = resolution, sampling_ratio

    def forward(self, features: list[Tensor], boxes: list[Tensor]) -> Tensor:
        """(R, C, resolution, resolution) features of the boxes (R_i, 4) of every image, in order."""
        rois = torch.cat([F.pad(b, (1, 0), value=i) for i, b in enumerate(boxes)])
        side = ((rois[:, 3] - rois[:, 1]) * (rois[:, 4] - rois[:, 2])).sqrt()
        level = torch.floor(4 + torch.log2(side / 224 + 1e-8)).clamp(2, 5).long()
        # Sorted by level, one reading of the counts cuts them: looking for each level's RoIs would wait four times.
        order = torch.argsort(level, stable=True)
        counts = (level[:, None] == torch.arange(2, 6, device=level.device)).sum(0).tolist()
        out = features[0].new_empty(len(rois), features[0].shape[1], self.resolution, self.resolution)
        for stage, feature, index in zip(range(2, 6), features[:4], order.split(counts), strict=True):
            pooled = roi_align(feature, rois[index], self.resolution, 0.5**stage, self.sampling_ratio, aligned=True)
            out.index_put_((index,), pooled.to(out.dtype))
        return out


def subsample(labels: Tensor, size: int, positive_fraction: float) -> tuple[Tensor, Tensor]:
    """Indices of positives (labels above 0) and negatives (0), drawn at random: positives first, as Detectron2 draws.

    Args:
        labels: (R,); what is below 0 is ignored.
        size: positives and negatives together, at most.
        positive_fraction: of ``size``, at most so many positives; negatives take what is left.
    """
    positive, negative = torch.where(labels > 0)[0], torch.where(labels == 0)[0]
    taken = min(len(positive), int(size * positive_fraction))
    positive = positive[torch.randperm(len(positive), device=labels.device)[:taken]]
    return positive, negative[torch.randperm(len(negative), device=labels.device)[: size - taken]]


def match(gt_boxes: Tensor, boxes: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The ground-truth box of the highest IoU (index; 0 where there is none), and whether it reaches ``threshold``."""
    if len(gt_boxes) == 0 or len(boxes) == 0:
        nothing = torch.zeros(len(boxes), dtype=torch.long, device=boxes.device)
        return nothing, nothing.bool()
    iou, index = box_iou(gt_boxes, boxes).max(0)
    return index, iou >= threshold
