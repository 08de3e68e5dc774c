r"""Anchors, region proposals and RoI pooling of torchvision, changed where Detectron2's differ.

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
        anchors = []
        for feature, stride, cell in zip(features, self.strides, self.cell_anchors, strict=True):
            y, x = (
                torch.arange(self.offset * stride, n * stride, stride, dtype=torch.float32, device=feature.device)
                for n in feature.shape[-2:]
            )
            shift_y, shift_x = (grid.reshape(-1) for grid in torch.meshgrid(y, x, indexing="ij"))
            shifts = torch.stack((shift_x, shift_y, shift_x, shift_y), dim=1)
            anchors.append((shifts[:, None] + cell.to(feature.device)[None]).reshape(-1, 4))
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
        images = len(targets)
        labels, matched = self.assign_targets_to_anchors([anchors] * images, targets)
        # The sampler draws positives, then negatives, image by image: Detectron2's order of random numbers.
        positive, negative = (torch.stack(masks).bool() for masks in self.fg_bg_sampler(labels))
        sampled = positive | negative
        normaliser = self.fg_bg_sampler.batch_size_per_image * images
        cls = F.binary_cross_entropy_with_logits(
            logits[sampled], torch.stack(labels)[sampled].to(logits.dtype), reduction="sum"
        )
        chosen = [anchors[mask] for mask in positive]
        wanted = [boxes[mask] for boxes, mask in zip(matched, positive, strict=True)]
        loc = F.smooth_l1_loss(
            deltas[positive].float(), torch.cat(self.box_coder.encode(wanted, chosen)), beta=self.beta, reduction="sum"
        )
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
        scores, boxes, levels = [], [], []
        for level, (anchor, logit, delta) in enumerate(zip(anchors, logits, deltas, strict=True)):
            best, index = logit.topk(min(self.pre_nms_top_n(), logit.shape[1]), dim=1)
            picked = delta.gather(1, index[..., None].expand(-1, -1, 4)).float()
            scores.append(best)
            boxes.append(
                self.box_coder.decode_single(picked.reshape(-1, 4), anchor[index.reshape(-1)]).reshape(picked.shape)
            )
            levels.append(torch.full_like(index[0], level))
        all_levels, results = torch.cat(levels), []
        for box, score, size in zip(torch.cat(boxes, 1), torch.cat(scores, 1), image_sizes, strict=True):
            finite = torch.isfinite(box).all(1) & torch.isfinite(score)
            if self.training and not finite.all():
                raise FloatingPointError("a proposal's box or score is not finite")
            box = clip_boxes_to_image(box, size)
            keep = finite & (box[:, 2] - box[:, 0] > self.min_size) & (box[:, 3] - box[:, 1] > self.min_size)
            box, score, level = box[keep], score[keep], all_levels[keep]
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
        out = features[0].new_zeros(len(rois), features[0].shape[1], self.resolution, self.resolution)
        for stage, feature in enumerate(features[:4], start=2):
            index = torch.where(level == stage)[0]
            pooled = roi_align(feature, rois[index], self.resolution, 0.5**stage, self.sampling_ratio, aligned=True)
            out.index_put_((index,), pooled.to(out.dtype))
        return out


def match(gt_boxes: Tensor, boxes: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The ground-truth box of the highest IoU (index; 0 where there is none), and whether it reaches ``threshold``."""
    if len(gt_boxes) == 0 or len(boxes) == 0:
        nothing = torch.zeros(len(boxes), dtype=torch.long, device=boxes.device)
        return nothing, nothing.bool()
    iou, index = box_iou(gt_boxes, boxes).max(0)
    return index, iou >= threshold
