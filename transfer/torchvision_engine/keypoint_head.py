"""The keypoint head (He et al., 2017, "Mask R-CNN", Section 5), with Detectron2's loss and keypoints.

Shapes: R RoIs of the batch, P keypoints, S the side of a heat map, D detections of an image.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from fvcore.nn import weight_init
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import heatmaps_to_keypoints, keypoints_to_heatmap

from .boxes import RoIPooler, Sample
from .layers import head_convs


class KeypointHead(nn.Module):
    """Convolutions, then one heat map of four times the pooler's resolution per keypoint.

    Args:
        normalizer: divides the loss together with the number of images; None: the visible keypoints divide it.
    """

    def __init__(
        self, pooler: RoIPooler, channels: int, num_keypoints: int, *, conv_dims: Sequence[int], loss_weight: float,
        normalizer: float | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.pooler, self.loss_weight, self.normalizer = pooler, loss_weight, normalizer
        self.convs = head_convs(self, "conv_fcn", channels, conv_dims, None)
        self.score_lowres = nn.ConvTranspose2d([channels, *conv_dims][-1], num_keypoints, 4, stride=2, padding=1)
        weight_init.c2_msra_fill(self.score_lowres)

    def forward(self, features: list[Tensor], boxes: list[Tensor]) -> Tensor:
        """The heat maps' logits (R, P, S, S)."""
        x = self.pooler(features, boxes)
        for conv in self.convs:
            x = F.relu(conv(x))
        return F.interpolate(self.score_lowres(x), scale_factor=2.0, mode="bilinear", align_corners=False)

    def losses(self, features: list[Tensor], samples: list[Sample]) -> dict[str, Tensor]:
        """Cross-entropy over the S x S cells of every visible keypoint inside its RoI."""
        boxes, truth = [], []
        for sample in (sample.foreground for sample in samples):
            keypoints = sample.target["keypoints"][sample.matched]
            seen = torch.where(visible_inside(keypoints, sample.boxes))[0]
            boxes.append(sample.boxes[seen])
            truth.append(keypoints[seen])
        logits = self(features, boxes)
        cells, valid = keypoints_to_heatmap(torch.cat(truth), torch.cat(boxes), logits.shape[-1])
        valid = torch.where(valid.flatten())[0]
        if len(valid) == 0:
            return {"loss_keypoint": logits.sum() * 0.0}
        loss = F.cross_entropy(logits.flatten(2).flatten(0, 1)[valid], cells.flatten()[valid], reduction="sum")
        count = len(valid) if self.normalizer is None else self.normalizer * len(samples)
        return {"loss_keypoint": loss / count * self.loss_weight}

    def detect(self, features: list[Tensor], detections: list[dict[str, Tensor]]) -> None:
        """Adds ``keypoints`` (D, P, 3) to every image's detections."""
        boxes = [found["boxes"] for found in detections]
        keypoints = decode_keypoints(self(features, boxes).float(), torch.cat(boxes))
        for found, part in zip(detections, keypoints.split([len(box) for box in boxes]), strict=True):
            found["keypoints"] = part


def visible_inside(keypoints: Tensor, boxes: Tensor) -> Tensor:
    """Whether an instance (R, P, 3) has a labeled keypoint inside its box (R, 4), borders included."""
    x, y, visibility = keypoints.unbind(-1)
    x0, y0, x1, y1 = boxes[:, None].unbind(-1)
    return ((x >= x0) & (x <= x1) & (y >= y0) & (y <= y1) & (visibility >= 1)).any(1)


def decode_keypoints(maps: Tensor, boxes: Tensor) -> Tensor:
    """(R, P, 3): x, y in pixels and the probability of the best cell, normalized over the S x S map."""
    points, best = heatmaps_to_keypoints(maps, boxes)
    score = 1.0 / (maps - best[..., None, None]).exp().sum((2, 3))
    return torch.cat([points[..., :2], score[..., None]], -1)
