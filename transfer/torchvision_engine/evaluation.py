"""Conversion of the model's detections to COCO's result format."""

from typing import Any

import torch
import torch.nn.functional as F
from pycocotools import mask as coco_mask
from torch import Tensor

from pretrain.common.device import to_device

from ..coco.results import Detection
from ..training.samplers import ModelInput

_PIXELS_AT_ONCE = 2**26  # pixels of the masks that a GPU pastes at once: three quarters of a GiB


def to_coco(detections: dict[str, Tensor], image: ModelInput, category_ids: list[int]) -> list[Detection]:
    """Convert one image's detections to COCO results in the pixels of the original image.

    Keypoints are pixel indices (- 0.5) with their scores.
    """
    height = image["height"]
    width = image["width"]
    scale_y = height / image["image"].shape[-2]
    scale_x = width / image["image"].shape[-1]
    boxes = detections["boxes"].cpu() * torch.tensor([scale_x, scale_y, scale_x, scale_y])
    boxes = torch.minimum(boxes.clamp(min=0), torch.tensor([width, height, width, height]))
    is_kept = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    boxes = boxes[is_kept]
    xywh = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1).tolist()
    labels = detections["labels"].cpu()[is_kept].tolist()
    scores = detections["scores"].cpu()[is_kept].tolist()
    results: list[Detection] = [
        {"image_id": image["image_id"], "category_id": category_ids[label], "bbox": box, "score": score}
        for box, label, score in zip(xywh, labels, scores, strict=True)
    ]
    if "masks" in detections and results:
        masks = detections["masks"]
        masks = masks[to_device(is_kept, masks.device)]
        # A GPU pastes many together, but for a CPU it is faster to see nothing but a mask's own box.
        at_once = 1 if masks.device.type == "cpu" else max(1, _PIXELS_AT_ONCE // (height * width))
        for result, segmentation in zip(results, encode(masks, boxes, (height, width), at_once), strict=True):
            result["segmentation"] = segmentation
    if "keypoints" in detections:
        points = detections["keypoints"].cpu()[is_kept]
        points = points * torch.tensor([scale_x, scale_y, 1.0]) - torch.tensor([0.5, 0.5, 0.0])
        for result, row in zip(results, points.flatten(1).tolist(), strict=True):
            result["keypoints"] = row
    return results


def encode(masks_RMM: Tensor, boxes_R4: Tensor, size: tuple[int, int], at_once: int) -> list[dict[str, Any]]:
    """Encode masks in an image of ``size`` as COCO's compressed run lengths; paste them on the masks' device.

    Args:
        masks_RMM: probabilities in the boxes.
        boxes_R4: x0, y0, x1, y1 in the image, on the CPU.
        size: height and width.
        at_once: masks to paste together.
    """
    encoded: list[Any] = []
    for some_RMM, some_R4 in zip(masks_RMM.split(at_once), boxes_R4.split(at_once), strict=True):
        pasted_RHC, left = paste(some_RMM, some_R4, size)
        right = size[1] - left - pasted_RHC.shape[2]
        whole_RWH = F.pad(pasted_RHC.transpose(1, 2).to(torch.uint8), (0, 0, left, right)).cpu()
        encoded += coco_mask.encode(whole_RWH.contiguous().numpy().T)  # (H, W, R) in Fortran's order
    return [{"size": list(rle["size"]), "counts": rle["counts"].decode()} for rle in encoded]


def paste(masks_RMM: Tensor, boxes_R4: Tensor, size: tuple[int, int]) -> tuple[Tensor, int]:
    """Paste each mask by itself into the columns of an image of ``size`` that contain all boxes.

    Each pixel's center is looked up bilinearly in the probabilities (R, M, M); at least 0.5 is inside.

    Returns:
        (R, H, columns) bool; the number of the first column.
    """
    height, width = size
    device = masks_RMM.device
    x0, y0 = (boxes_R4[:, :2].amin(0).floor() - 1).clamp(min=0).int().tolist()
    x1, y1 = (boxes_R4[:, 2:].amax(0).ceil() + 1).int().tolist()
    x1 = min(x1, width)
    y1 = min(y1, height)
    corner_R2, opposite_R2 = to_device(boxes_R4, device).split(2, dim=1)
    side_R2 = opposite_R2 - corner_R2
    x = (torch.arange(x0, x1, device=device) + 0.5 - corner_R2[:, :1]) / side_R2[:, :1] * 2 - 1
    y = (torch.arange(y0, y1, device=device) + 0.5 - corner_R2[:, 1:]) / side_R2[:, 1:] * 2 - 1
    shape = (len(x), y1 - y0, x1 - x0)
    grid = torch.stack([x[:, None, :].expand(shape), y[:, :, None].expand(shape)], dim=-1)
    values_Rhw = F.grid_sample(masks_RMM[:, None].float(), grid, align_corners=False)[:, 0]
    return F.pad(values_Rhw >= 0.5, (0, 0, y0, height - y1)), x0
