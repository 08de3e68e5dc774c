"""The mask head (He et al., 2017, "Mask R-CNN"), with Detectron2's targets, loss and masks.

Shapes: R RoIs of the batch, K classes, M the side of a mask, D detections of an image.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from fvcore.nn import weight_init
from pycocotools import mask as coco_mask
from torch import Tensor, nn
from torchvision.ops import roi_align

from .boxes import RoIPooler, Sample
from .layers import Norm, head_convs


class MaskHead(nn.Module):
    """Convolutions, then one mask of twice the pooler's resolution per class."""

    def __init__(
        self, pooler: RoIPooler, channels: int, num_classes: int, *, num_convs: int, width: int, norm: Norm | None
    ) -> None:
        super().__init__()
        self.pooler = pooler
        self.convs = head_convs(self, "mask_fcn", channels, [width] * num_convs, norm)
        self.deconv = nn.ConvTranspose2d(width if num_convs else channels, width, 2, stride=2)
        self.predictor = nn.Conv2d(width, num_classes, 1)
        weight_init.c2_msra_fill(self.deconv)
        weight_init.c2_msra_fill(self.predictor)
        nn.init.normal_(self.predictor.weight, std=0.001)

    def forward(self, features: list[Tensor], boxes: list[Tensor], labels: Tensor) -> Tensor:
        """The mask logits (R, M, M) of the class ``labels`` (R,) of every RoI."""
        x = self.pooler(features, boxes)
        for conv in self.convs:
            x = F.relu(conv(x))
        logits_RKMM = self.predictor(F.relu(self.deconv(x)))
        return logits_RKMM[torch.arange(len(labels), device=labels.device), labels]

    def losses(self, features: list[Tensor], samples: list[Sample]) -> dict[str, Tensor]:
        """Mean binary cross-entropy of the true class's masks."""
        samples = [sample.foreground for sample in samples]
        labels = torch.cat([sample.labels for sample in samples])
        logits = self(features, [sample.boxes for sample in samples], labels)
        if len(logits) == 0:
            return {"loss_mask": logits.sum() * 0.0}
        wanted = crop_masks(samples, logits.shape[-1])
        return {"loss_mask": F.binary_cross_entropy_with_logits(logits, wanted.to(logits.dtype))}

    def detect(self, features: list[Tensor], detections: list[dict[str, Tensor]]) -> None:
        """Adds ``masks`` (D, M, M), probabilities, to every image's detections."""
        labels = torch.cat([found["labels"] for found in detections])
        masks = self(features, [found["boxes"] for found in detections], labels).sigmoid()
        for found, part in zip(detections, masks.split([len(found["boxes"]) for found in detections]), strict=True):
            found["masks"] = part


def crop_masks(samples: Sequence[Sample], side: int) -> Tensor:
    """Mask targets (R, side, side), bool, of foreground samples: the matched instance's mask inside each box.

    Polygons are rasterized at the target's resolution by COCO's routine; bit masks are averaged by RoIAlign, >= 0.5.
    """
    rois = [torch.cat([sample.matched[:, None].to(sample.boxes.dtype), sample.boxes], 1) for sample in samples]
    masks = [sample.target["masks"] for sample in samples]
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
        for polygons, part in zip(masks, on_host, strict=True)
        for roi in part.numpy()
    ]
    return torch.from_numpy(np.stack(crops)).to(rois[0].device)


def rasterize(polygons: list[np.ndarray], box: np.ndarray, side: int) -> np.ndarray:
    """The polygons' mask inside ``box`` on a grid of side x side; the sides of the box count as at least 0.1 pixel."""
    # The float32 scalars on float64 polygons are Detectron2's: other types flip border cells.
    ratios = [side / max(box[i + 2] - box[i], 0.1) for i in (0, 1)]
    scaled = []
    for polygon in polygons:
        points = polygon.copy()
        points[0::2] = (points[0::2] - box[0]) * ratios[0]
        points[1::2] = (points[1::2] - box[1]) * ratios[1]
        scaled.append(points)
    return coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(scaled, side, side))).astype(bool)
