r"""Box, mask and keypoint heads made of torchvision's layers, with Detectron2's targets, losses and outputs.

Shapes: R RoIs of the batch, K classes, M the side of a mask, P keypoints, S the side of a heat map, D detections. The
background is class K, the last one, as in Detectron2. Targets of an image: ``boxes`` (G, 4), ``labels`` (G,) in [0, K),
``masks`` (a list of G lists of polygons, or a bool tensor (G, H, W)), ``keypoints`` (G, P, 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pycocotools import mask as coco_mask
from torch import Tensor, nn
from torchvision.models.detection._utils import BoxCoder
from torchvision.models.detection.roi_heads import heatmaps_to_keypoints, keypoints_to_heatmap
from torchvision.ops import batched_nms, clip_boxes_to_image, roi_align

from .rpn import RoIPooler, match, subsample

Target = dict[str, Any]


class BoxPredictor(nn.Module):
    """K + 1 class logits and K x 4 box deltas a RoI; torchvision's own predictor would regress the background too."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.cls_score = nn.Linear(in_channels, num_classes + 1)
        self.bbox_pred = nn.Linear(in_channels, num_classes * 4)
        nn.init.normal_(self.cls_score.weight, std=0.01)
        nn.init.normal_(self.bbox_pred.weight, std=0.001)
        nn.init.zeros_(self.cls_score.bias)
        nn.init.zeros_(self.bbox_pred.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.flatten(1)
        return self.cls_score(x), self.bbox_pred(x)


class RoIHeads(nn.Module):
    """The second stage: samples proposals, runs the heads, returns losses (training) or detections.

    Args:
        box_pooler, box_head, box_predictor: RoIs -> features -> logits and deltas.
        mask, keypoint: ``(pooler, layers)`` or None.
        keypoint_normaliser: None divides the keypoint loss by the visible keypoints, a number by that number x images.
    """

    def __init__(
        self,
        *,
        box_pooler: RoIPooler,
        box_head: nn.Module,
        box_predictor: BoxPredictor,
        mask: tuple[RoIPooler, nn.Module] | None,
        keypoint: tuple[RoIPooler, nn.Module] | None,
        num_classes: int,
        iou_threshold: float,
        batch_size_per_image: int,
        positive_fraction: float,
        append_gt: bool,
        box_weights: tuple[float, float, float, float],
        beta: float,
        box_loss_weight: float,
        keypoint_loss_weight: float,
        keypoint_normaliser: float | None,
        score_thresh: float,
        nms_thresh: float,
        detections_per_image: int,
    ) -> None:
        super().__init__()
        self.box_pooler, self.box_head, self.box_predictor = box_pooler, box_head, box_predictor
        self.has_mask, self.has_keypoint = mask is not None, keypoint is not None
        if mask:
            self.mask_pooler, self.mask_head = mask
        if keypoint:
            self.keypoint_pooler, self.keypoint_head = keypoint
        self.num_classes, self.iou_threshold, self.append_gt = num_classes, iou_threshold, append_gt
        self.batch_size_per_image, self.positive_fraction = batch_size_per_image, positive_fraction
        self.box_coder = BoxCoder(box_weights)
        self.beta, self.box_loss_weight = beta, box_loss_weight
        self.keypoint_loss_weight, self.keypoint_normaliser = keypoint_loss_weight, keypoint_normaliser
        self.score_thresh, self.nms_thresh, self.detections_per_image = score_thresh, nms_thresh, detections_per_image

    def losses(self, features: list[Tensor], proposals: list[Tensor], targets: list[Target]) -> dict[str, Tensor]:
        """Losses under Detectron2's names."""
        boxes, labels, matched = self.sample(proposals, targets)
        logits, deltas = self.box_predictor(self.box_head(self.box_pooler(features, boxes)))
        losses = self.box_losses(logits, deltas, boxes, labels, matched, targets)
        boxes, labels = _in_front(boxes, matched), _in_front(labels, matched)
        if self.has_mask:
            logits = self.mask_head(self.mask_pooler(features, boxes))
            losses["loss_mask"] = mask_loss(logits, boxes, labels, matched, targets)
        if self.has_keypoint:
            losses["loss_keypoint"] = self.keypoint_loss(features, boxes, matched, targets)
        return losses

    @torch.no_grad()
    def sample(self, proposals: list[Tensor], targets: list[Target]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Every image's proposals to train on: boxes (R_i, 4), classes (R_i,), and of the F_i in front, which are not

        background, the ground-truth indices (F_i,).
        """
        boxes, labels, matched = [], [], []
        for proposal, target in zip(proposals, targets, strict=True):
            if self.append_gt:
                proposal = torch.cat([proposal, target["boxes"]])
            index, positive = match(target["boxes"], proposal, self.iou_threshold)
            foreground, background = subsample(positive, self.batch_size_per_image, self.positive_fraction)
            matched.append(index[foreground])
            boxes.append(proposal[torch.cat([foreground, background])])
            labels.append(torch.cat([target["labels"][matched[-1]], torch.full_like(background, self.num_classes)]))
        return boxes, labels, matched

    def box_losses(
        self,
        logits: Tensor,
        deltas: Tensor,
        boxes: list[Tensor],
        labels: list[Tensor],
        matched: list[Tensor],
        targets: list[Target],
    ) -> dict[str, Tensor]:
        """Cross-entropy over K + 1 classes and smooth L1 over the true class's deltas, both averaged over all RoIs."""
        label, true_class = torch.cat(labels), torch.cat(_in_front(labels, matched))
        each = deltas.view(-1, self.num_classes, 4).split([len(box) for box in boxes])
        chosen = torch.cat(_in_front(each, matched))[torch.arange(len(true_class), device=label.device), true_class]
        gt = torch.cat([t["boxes"][i] for t, i in zip(targets, matched, strict=True)])
        wanted = self.box_coder.encode_single(gt, torch.cat(_in_front(boxes, matched)))
        regression = F.smooth_l1_loss(chosen.float(), wanted, beta=self.beta, reduction="sum")
        return {
            "loss_cls": F.cross_entropy(logits, label) if len(label) else logits.sum() * 0.0,
            "loss_box_reg": regression / max(len(label), 1) * self.box_loss_weight,
        }

    def keypoint_loss(
        self, features: list[Tensor], boxes: list[Tensor], matched: list[Tensor], targets: list[Target]
    ) -> Tensor:
        """Cross-entropy over the S x S cells of every visible keypoint inside its RoI (Mask R-CNN, Section 5)."""
        truth = [t["keypoints"][i] for t, i in zip(targets, matched, strict=True)]
        seen = [torch.where(visible_inside(k, b))[0] for k, b in zip(truth, boxes, strict=True)]
        boxes, truth = ([x[i] for x, i in zip(xs, seen, strict=True)] for xs in (boxes, truth))
        logits = self.keypoint_head(self.keypoint_pooler(features, boxes))
        cells, valid = keypoints_to_heatmap(torch.cat(truth), torch.cat(boxes), logits.shape[-1])
        valid = torch.where(valid.flatten())[0]
        if len(valid) == 0:
            return logits.sum() * 0.0
        loss = F.cross_entropy(logits.flatten(2).flatten(0, 1)[valid], cells.flatten()[valid], reduction="sum")
        count = len(valid) if self.keypoint_normaliser is None else self.keypoint_normaliser * len(targets)
        return loss / count * self.keypoint_loss_weight

    def detect(
        self, features: list[Tensor], proposals: list[Tensor], image_sizes: list[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        """Detections an image, best first: boxes (D, 4), scores, labels (D,), masks (D, M, M), keypoints (D, P, 3)."""
        logits, deltas = self.box_predictor(self.box_head(self.box_pooler(features, proposals)))
        counts = [len(p) for p in proposals]
        decoded = self.box_coder.decode_single(deltas.float(), torch.cat(proposals)).view(-1, self.num_classes, 4)
        scores = F.softmax(logits.float(), -1)
        results = [
            self.filter(box, score, size)
            for box, score, size in zip(decoded.split(counts), scores.split(counts), image_sizes, strict=True)
        ]
        boxes = [r["boxes"] for r in results]
        found = [len(b) for b in boxes]
        if self.has_mask:
            logits = self.mask_head(self.mask_pooler(features, boxes))
            label = torch.cat([r["labels"] for r in results])
            masks = logits[torch.arange(len(label), device=label.device), label].sigmoid()
            for result, mask in zip(results, masks.split(found), strict=True):
                result["masks"] = mask
        if self.has_keypoint:
            maps = self.keypoint_head(self.keypoint_pooler(features, boxes)).float()
            for result, keypoints in zip(results, decode_keypoints(maps, torch.cat(boxes)).split(found), strict=True):
                result["keypoints"] = keypoints
        return results

    def filter(self, boxes: Tensor, scores: Tensor, size: tuple[int, int]) -> dict[str, Tensor]:
        """One image's decoded boxes (R, K, 4) and probabilities (R, K + 1): threshold, NMS a class, the best D."""
        finite = torch.isfinite(boxes).flatten(1).all(1) & torch.isfinite(scores).all(1)
        scores = scores[:, :-1]
        rows, labels = torch.where((scores > self.score_thresh) & finite[:, None])
        boxes, scores = clip_boxes_to_image(boxes[rows, labels], size), scores[rows, labels]
        keep = batched_nms(boxes, scores, labels, self.nms_thresh)
        if self.detections_per_image >= 0:
            keep = keep[: self.detections_per_image]
        return {"boxes": boxes[keep], "scores": scores[keep], "labels": labels[keep]}


def _in_front(parts: Sequence[Tensor], matched: Sequence[Tensor]) -> list[Tensor]:
    """Of every image's RoIs those with a ground-truth box: they come first, so nothing has to be looked for."""
    return [part[: len(index)] for part, index in zip(parts, matched, strict=True)]


def mask_loss(
    logits: Tensor, boxes: list[Tensor], labels: list[Tensor], matched: list[Tensor], targets: list[Target]
) -> Tensor:
    """Mean binary cross-entropy of the true class's mask logits, (R, K, M, M)."""
    if len(logits) == 0:
        return logits.sum() * 0.0
    wanted = crop_masks([t["masks"] for t in targets], boxes, matched, logits.shape[-1])
    label = torch.cat(labels)
    chosen = logits[torch.arange(len(label), device=label.device), label]
    return F.binary_cross_entropy_with_logits(chosen, wanted.to(chosen.dtype))


def crop_masks(masks: Sequence[Any], boxes: list[Tensor], matched: list[Tensor], side: int) -> Tensor:
    """Mask targets (R, side, side), bool, of all images: the matched instance's mask inside each box.

    Polygons are rasterised at the target's resolution by COCO's routine; bit masks are averaged by RoIAlign, >= 0.5.
    """
    rois = [torch.cat([i[:, None].to(b.dtype), b], 1) for b, i in zip(boxes, matched, strict=True)]
    if isinstance(masks[0], Tensor):
        crops = [
            roi_align(mask[:, None].to(roi.dtype), roi, side, 1.0, 0, aligned=True)[:, 0] >= 0.5
            for mask, roi in zip(masks, rois, strict=True)
            if len(roi)
        ]
        return torch.cat(crops)
    on_host = torch.cat(rois).cpu().split([len(roi) for roi in rois])
    crops = [
        rasterise(polygons[int(roi[0])], roi[1:], side)
        for polygons, part in zip(masks, on_host, strict=True)
        for roi in part.numpy()
    ]
    return torch.from_numpy(np.stack(crops)).to(boxes[0].device)


def rasterise(polygons: list[np.ndarray], box: np.ndarray, side: int) -> np.ndarray:
    """The polygons' mask inside ``box`` on a grid of side x side; the sides of the box count as at least 0.1 pixel."""
    # float32 scalars on float64 polygons, as in Detectron2: a border cell flips at the last digit
    ratios = [side / max(box[i + 2] - box[i], 0.1) for i in (0, 1)]
    scaled = []
    for polygon in polygons:
        points = polygon.copy()
        points[0::2] = (points[0::2] - box[0]) * ratios[0]
        points[1::2] = (points[1::2] - box[1]) * ratios[1]
        scaled.append(points)
    return coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(scaled, side, side))).astype(bool)


def visible_inside(keypoints: Tensor, boxes: Tensor) -> Tensor:
    """Whether an instance (R, P, 3) has a labelled keypoint inside its box (R, 4), borders included."""
    x, y, visibility = keypoints.unbind(-1)
    x0, y0, x1, y1 = boxes[:, None].unbind(-1)
    return ((x >= x0) & (x <= x1) & (y >= y0) & (y <= y1) & (visibility >= 1)).any(1)


def decode_keypoints(maps: Tensor, boxes: Tensor) -> Tensor:
    """(R, P, 3): x, y in pixels and the probability of the best cell, normalised over the S x S map."""
    points, best = heatmaps_to_keypoints(maps, boxes)
    score = 1.0 / (maps - best[..., None, None]).exp().sum((2, 3))
    return torch.cat([points[..., :2], score[..., None]], -1)
