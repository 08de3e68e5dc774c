"""The box head: class and box of every RoI (Girshick, 2015), with Detectron2's losses and detections.

Shapes: R RoIs of the batch, K classes, D detections of an image. Class K is the background.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from fvcore.nn import weight_init
from torch import Tensor, nn
from torchvision.ops import batched_nms, clip_boxes_to_image

from .boxes import DeltaWeights, RoIPooler, Sample, decode, encode
from .layers import Norm, head_convs


class BoxHead(nn.Module):
    """Pools the RoIs and passes them through convolutions, then fully connected layers: (R, ``out_features``)."""

    def __init__(
        self, pooler: RoIPooler, channels: int, conv_dims: Sequence[int], fc_dims: Sequence[int], norm: Norm | None
    ) -> None:
        super().__init__()
        self.pooler = pooler
        self.convs = head_convs(self, "conv", channels, conv_dims, norm)
        widths = [[channels, *conv_dims][-1] * pooler.resolution**2, *fc_dims]
        self.fcs = [nn.Linear(before, width) for before, width in zip(widths, fc_dims, strict=False)]
        for number, layer in enumerate(self.fcs, start=1):
            self.add_module(f"fc{number}", layer)
            weight_init.c2_xavier_fill(layer)
        self.out_features = widths[-1]

    def forward(self, features: list[Tensor], boxes: list[Tensor]) -> Tensor:
        x = self.pooler(features, boxes)
        for conv in self.convs:
            x = F.relu(conv(x))
        x = x.flatten(1)
        for layer in self.fcs:
            x = F.relu(layer(x))
        return x


class BoxPredictor(nn.Module):
    """K + 1 class logits and K x 4 box deltas per RoI.

    Args:
        box_weights: factors of the deltas x, y, w, h in the regression.
        beta: smooth L1 turns from quadratic to linear here.
        score_threshold, nms_threshold: detections have a higher score, and a lower IoU with better ones of their class.
        detections_per_image: the largest number; negative: no limit.
    """

    def __init__(
        self, in_features: int, num_classes: int, *, box_weights: DeltaWeights, beta: float, box_loss_weight: float,
        score_threshold: float, nms_threshold: float, detections_per_image: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.cls_score = nn.Linear(in_features, num_classes + 1)
        self.bbox_pred = nn.Linear(in_features, num_classes * 4)
        for layer, std in ((self.cls_score, 0.01), (self.bbox_pred, 0.001)):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)
        self.num_classes, self.box_weights, self.beta = num_classes, box_weights, beta
        self.box_loss_weight = box_loss_weight
        self.score_threshold, self.nms_threshold = score_threshold, nms_threshold
        self.detections_per_image = detections_per_image

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.cls_score(x), self.bbox_pred(x).view(len(x), self.num_classes, 4)

    def losses(self, x: Tensor, samples: list[Sample]) -> dict[str, Tensor]:
        """Cross-entropy over K + 1 classes and smooth L1 over the true class's deltas, both averaged over all RoIs."""
        logits, deltas_RK4 = self(x)
        label_R = torch.cat([sample.labels for sample in samples])
        foreground = [sample.foreground for sample in samples]
        parts = deltas_RK4.split([len(sample.boxes) for sample in samples])
        deltas_FK4 = torch.cat([part[: len(front.boxes)] for part, front in zip(parts, foreground, strict=True)])
        label_F = torch.cat([front.labels for front in foreground])
        found = deltas_FK4[torch.arange(len(label_F), device=label_F.device), label_F]
        gt = torch.cat([front.target["boxes"][front.matched] for front in foreground])
        wanted = encode(gt, torch.cat([front.boxes for front in foreground]), self.box_weights)
        regression = F.smooth_l1_loss(found.float(), wanted, beta=self.beta, reduction="sum")
        return {
            "loss_cls": F.cross_entropy(logits, label_R) if len(label_R) else logits.sum() * 0.0,
            "loss_box_reg": regression / max(len(label_R), 1) * self.box_loss_weight,
        }

    def detect(self, x: Tensor, proposals: list[Tensor], image_sizes: list[tuple[int, int]]) -> list[dict[str, Tensor]]:
        """Detections of every image, best first: ``boxes`` (D, 4), ``scores`` and ``labels`` (D,)."""
        logits, deltas = self(x)
        boxes_RK4 = decode(deltas.float(), torch.cat(proposals)[:, None], self.box_weights)
        counts = [len(p) for p in proposals]
        parts = boxes_RK4.split(counts), F.softmax(logits.float(), -1).split(counts)
        return [self._filter(*image) for image in zip(*parts, image_sizes, strict=True)]

    def _filter(self, boxes: Tensor, scores: Tensor, size: tuple[int, int]) -> dict[str, Tensor]:
        """One image's decoded boxes (R, K, 4) and probabilities (R, K + 1): threshold, NMS per class, the best D."""
        finite = torch.isfinite(boxes).flatten(1).all(1) & torch.isfinite(scores).all(1)
        scores = scores[:, :-1]
        rows, labels = torch.where((scores > self.score_threshold) & finite[:, None])
        boxes, scores = clip_boxes_to_image(boxes[rows, labels], size), scores[rows, labels]
        keep = batched_nms(boxes, scores, labels, self.nms_threshold)
        if self.detections_per_image >= 0:
            keep = keep[: self.detections_per_image]
        return {"boxes": boxes[keep], "scores": scores[keep], "labels": labels[keep]}
