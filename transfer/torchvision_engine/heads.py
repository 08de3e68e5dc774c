"""The box, mask and keypoint heads (He et al., 2017, "Mask R-CNN") with Detectron2's targets, losses and detections.

Shapes: R RoIs of the batch, of which F are foreground, K classes (class K is the background), M the side of a mask, P
keypoints, S the side of a heat map, D detections of an image.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fvcore.nn import weight_init
from pycocotools import mask as coco_mask
from torch import Tensor, nn
from torchvision.models.detection._utils import encode_boxes
from torchvision.models.detection.roi_heads import heatmaps_to_keypoints, keypoints_to_heatmap
from torchvision.ops import batched_nms, clip_boxes_to_image, roi_align

from .boxes import DeltaWeights, RoIPooler, Sample, decode
from .layers import Conv2d, Norm


class ConvHead(nn.Module):
    """Pools the RoIs and passes them through 3x3 convolutions, which are called ``name`` and their number from 1 on."""

    def __init__(
        self, pooler: RoIPooler, name: str, channels: int, conv_dims: Sequence[int], norm: Norm | None = None
    ) -> None:
        super().__init__()
        self.pooler = pooler
        widths = [channels, *conv_dims]
        self.convs = [Conv2d(*pair, 3, padding=1, norm=norm) for pair in itertools.pairwise(widths)]
        for number, conv in enumerate(self.convs, start=1):
            self.add_module(f"{name}{number}", conv)
            weight_init.c2_msra_fill(conv)
        self.channels = widths[-1]

    def convolve(self, features: list[Tensor], boxes: list[Tensor]) -> Tensor:
        x = self.pooler(features, boxes)
        for conv in self.convs:
            x = F.relu(conv(x))
        return x


class BoxHead(ConvHead):
    """Convolutions, then fully connected layers: (R, ``out_features``)."""

    def __init__(
        self, pooler: RoIPooler, channels: int, conv_dims: Sequence[int], fc_dims: Sequence[int], norm: Norm | None
    ) -> None:
        super().__init__(pooler, "conv", channels, conv_dims, norm)
        widths = [self.channels * pooler.resolution**2, *fc_dims]
        self.fcs = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
        for number, layer in enumerate(self.fcs, start=1):
            self.add_module(f"fc{number}", layer)
            weight_init.c2_xavier_fill(layer)
        self.out_features = widths[-1]

    def forward(self, features: list[Tensor], boxes: list[Tensor]) -> Tensor:
        x = self.convolve(features, boxes).flatten(1)
        for layer in self.fcs:
            x = F.relu(layer(x))
        return x


class BoxPredictor(nn.Module):
    """K + 1 class logits and K x 4 box deltas per RoI.

    Args:
        box_weights: factors of the deltas x, y, w, h in the regression.
        beta: where smooth L1 changes from quadratic to linear.
        score_threshold, nms_threshold: detections have a higher score, and a lower IoU with better ones of their class.
        detections_per_image: the maximum; no limit if negative.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        box_weights: DeltaWeights,
        beta: float,
        score_threshold: float,
        nms_threshold: float,
        detections_per_image: int,
    ) -> None:
        super().__init__()
        self.cls_score = nn.Linear(in_features, num_classes + 1)
        self.bbox_pred = nn.Linear(in_features, num_classes * 4)
        for layer, std in ((self.cls_score, 0.01), (self.bbox_pred, 0.001)):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)
        self.num_classes, self.box_weights, self.beta = num_classes, box_weights, beta
        self.score_threshold, self.nms_threshold = score_threshold, nms_threshold
        self.detections_per_image = detections_per_image

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.cls_score(x), self.bbox_pred(x).view(len(x), self.num_classes, 4)

    def losses(self, x: Tensor, samples: list[Sample]) -> dict[str, Tensor]:
        """Compute cross-entropy over classes and smooth L1 over the true class's deltas, as means over all RoIs."""
        logits, deltas_RK4 = self(x)
        label_R = torch.cat([sample.labels for sample in samples])
        foreground = [sample.foreground for sample in samples]
        deltas_by_image = deltas_RK4.split([len(sample.boxes) for sample in samples])
        pairs = zip(deltas_by_image, foreground, strict=True)
        deltas_FK4 = torch.cat([deltas[: len(sample.boxes)] for deltas, sample in pairs])
        label_F = torch.cat([sample.labels for sample in foreground])
        predicted = deltas_FK4[torch.arange(len(label_F), device=label_F.device), label_F]
        gt_boxes = torch.cat([sample.target["boxes"][sample.matched] for sample in foreground])
        target = encode_boxes(gt_boxes, torch.cat([sample.boxes for sample in foreground]), self.box_weights)
        regression = F.smooth_l1_loss(predicted.float(), target, beta=self.beta, reduction="sum")
        return {
            "loss_cls": F.cross_entropy(logits, label_R) if len(label_R) else logits.sum() * 0.0,
            "loss_box_reg": regression / max(len(label_R), 1),
        }

    def detect(self, x: Tensor, proposals: list[Tensor], image_sizes: list[tuple[int, int]]) -> list[dict[str, Tensor]]:
        """Return the detections of every image, best first: ``boxes`` (D, 4), ``scores`` and ``labels`` (D,)."""
        logits, deltas = self(x)
        boxes_RK4 = decode(deltas.float(), torch.cat(proposals)[:, None], self.box_weights)
        counts = [len(boxes) for boxes in proposals]
        boxes = boxes_RK4.split(counts)
        scores = F.softmax(logits.float(), -1).split(counts)
        return [self._filter(*image) for image in zip(boxes, scores, image_sizes, strict=True)]

    def _filter(self, boxes: Tensor, scores: Tensor, size: tuple[int, int]) -> dict[str, Tensor]:
        """Filter one image's boxes (R, K, 4) and probabilities (R, K + 1): threshold, NMS per class, the best D."""
        finite = torch.isfinite(boxes).flatten(1).all(1) & torch.isfinite(scores).all(1)
        scores = scores[:, :-1]
        rows, labels = torch.where((scores > self.score_threshold) & finite[:, None])
        boxes = clip_boxes_to_image(boxes[rows, labels], size)
        scores = scores[rows, labels]
        limit = self.detections_per_image if self.detections_per_image >= 0 else None
        keep = batched_nms(boxes, scores, labels, self.nms_threshold)[:limit]
        return {"boxes": boxes[keep], "scores": scores[keep], "labels": labels[keep]}


class MaskHead(ConvHead):
    """Convolutions, then one mask of twice the pooler's resolution per class."""

    def __init__(
        self, pooler: RoIPooler, channels: int, num_classes: int, *, num_convs: int, width: int, norm: Norm | None
    ) -> None:
        super().__init__(pooler, "mask_fcn", channels, [width] * num_convs, norm)
        self.deconv = nn.ConvTranspose2d(self.channels, width, 2, stride=2)
        self.predictor = nn.Conv2d(width, num_classes, 1)
        weight_init.c2_msra_fill(self.deconv)
        weight_init.c2_msra_fill(self.predictor)
        nn.init.normal_(self.predictor.weight, std=0.001)

    def forward(self, features: list[Tensor], boxes: list[Tensor], labels: Tensor) -> Tensor:
        """Return the mask logits (R, M, M) of the class ``labels`` (R,) of every RoI."""
        logits_RKMM = self.predictor(F.relu(self.deconv(self.convolve(features, boxes))))
        return logits_RKMM[torch.arange(len(labels), device=labels.device), labels]

    def losses(self, features: list[Tensor], samples: list[Sample]) -> dict[str, Tensor]:
        """Compute the mean binary cross-entropy of the true class's masks."""
        samples = [sample.foreground for sample in samples]
        labels = torch.cat([sample.labels for sample in samples])
        logits = self(features, [sample.boxes for sample in samples], labels)
        if len(logits) == 0:
            return {"loss_mask": logits.sum() * 0.0}
        target = crop_masks(samples, logits.shape[-1])
        return {"loss_mask": F.binary_cross_entropy_with_logits(logits, target.to(logits.dtype))}

    def detect(self, features: list[Tensor], boxes: list[Tensor], labels: Tensor) -> tuple[str, Tensor]:
        """Return the name ``masks`` and probabilities (R, M, M)."""
        return "masks", self(features, boxes, labels).sigmoid()


def crop_masks(samples: Sequence[Sample], side: int) -> Tensor:
    """Crop the matched instance's mask to the box of each foreground sample: (R, side, side), bool.

    Polygons are rasterized at the target's resolution by COCO's routine; bit masks are averaged by RoIAlign, >= 0.5.
    """
    rois = [torch.cat([sample.matched[:, None].to(sample.boxes.dtype), sample.boxes], 1) for sample in samples]
    masks: list[Any] = [sample.target["masks"] for sample in samples]
    if isinstance(masks[0], Tensor):
        crops = [
            roi_align(mask[:, None].to(roi.dtype), roi, side, 1.0, 0, aligned=True)[:, 0] >= 0.5
            for mask, roi in zip(masks, rois, strict=True)
            if len(roi)
        ]
        return torch.cat(crops)
    on_host = torch.cat(rois).cpu().split([len(roi) for roi in rois])
    crops = [
        rasterize(polygons[int(roi[0])], roi[1:], side)
        for polygons, image_rois in zip(masks, on_host, strict=True)
        for roi in image_rois.numpy()
    ]
    return torch.from_numpy(np.stack(crops)).to(rois[0].device)


def rasterize(polygons: list[np.ndarray], box: np.ndarray, side: int) -> np.ndarray:
    """Draw polygons inside ``box`` on a grid of side x side; the sides of the box count as at least 0.1 pixel."""
    # As in Detectron2, float32 numbers act on float64 polygons: other types flip border cells.
    ratios = [side / max(box[i + 2] - box[i], 0.1) for i in (0, 1)]
    scaled: Any = [((polygon.reshape(-1, 2) - box[:2]) * ratios).reshape(-1) for polygon in polygons]
    return coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(scaled, side, side))).astype(bool)


class KeypointHead(ConvHead):
    """Convolutions, then one heat map of four times the pooler's resolution per keypoint."""

    def __init__(self, pooler: RoIPooler, channels: int, num_keypoints: int, *, conv_dims: Sequence[int]) -> None:
        super().__init__(pooler, "conv_fcn", channels, conv_dims)
        self.score_lowres = nn.ConvTranspose2d(self.channels, num_keypoints, 4, stride=2, padding=1)
        weight_init.c2_msra_fill(self.score_lowres)

    def forward(self, features: list[Tensor], boxes: list[Tensor]) -> Tensor:
        """Return the heat maps' logits (R, P, S, S)."""
        x = self.score_lowres(self.convolve(features, boxes))
        return F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)

    def losses(self, features: list[Tensor], samples: list[Sample]) -> dict[str, Tensor]:
        """Compute cross-entropy over the S x S cells of every visible keypoint inside its RoI."""
        boxes = []
        gt_keypoints = []
        for sample in (sample.foreground for sample in samples):
            keypoints = sample.target["keypoints"][sample.matched]
            index = torch.where(has_visible_inside(keypoints, sample.boxes))[0]
            boxes.append(sample.boxes[index])
            gt_keypoints.append(keypoints[index])
        logits = self(features, boxes)
        cells, valid = keypoints_to_heatmap(torch.cat(gt_keypoints), torch.cat(boxes), logits.shape[-1])
        valid = torch.where(valid.flatten())[0]
        if len(valid) == 0:
            return {"loss_keypoint": logits.sum() * 0.0}
        loss = F.cross_entropy(logits.flatten(2).flatten(0, 1)[valid], cells.flatten()[valid], reduction="sum")
        return {"loss_keypoint": loss / len(valid)}

    def detect(self, features: list[Tensor], boxes: list[Tensor], labels: Tensor) -> tuple[str, Tensor]:
        """Return the name ``keypoints`` and (R, P, 3): x, y in pixels, the probability of the best of S x S cells."""
        maps = self(features, boxes).float()
        points, best = heatmaps_to_keypoints(maps, torch.cat(boxes))
        score = 1.0 / (maps - best[..., None, None]).exp().sum((2, 3))
        return "keypoints", torch.cat([points[..., :2], score[..., None]], -1)


def has_visible_inside(keypoints: Tensor, boxes: Tensor) -> Tensor:
    """Return whether each instance (R, P, 3) has a labeled keypoint inside its box (R, 4), borders included."""
    x, y, visibility = keypoints.unbind(-1)
    x0, y0, x1, y1 = boxes[:, None].unbind(-1)
    return ((x >= x0) & (x <= x1) & (y >= y0) & (y <= y1) & (visibility >= 1)).any(1)
