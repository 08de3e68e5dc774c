"""Runs a detector on the test images and turns its detections into COCO's result format and metrics."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from pycocotools import mask as coco_mask
from torch import Tensor

from pretrain.common.async_copy import to_device
from pretrain.common.distributed import is_main, rank_slice

from ..coco.results import Metrics, score
from ..distributed import predict
from .data import evaluation_batches, load_coco
from .model import Detector

log = logging.getLogger("transfer")
_PIXELS_AT_ONCE = 2**26  # of masks that a GPU pastes: three quarters of a GiB


def evaluate(cfg: CfgNode, model: Detector, pictures: int, *, final: bool) -> dict[str, Metrics]:
    """Metrics of every data set in DATASETS.TEST on rank 0, {} on the others; see `score` for what it writes."""
    metrics: dict[str, Metrics] = {}
    for name in cfg.DATASETS.TEST:
        records, category_ids, _ = load_coco(name, cfg.OUTPUT_DIR)
        share = range(len(records))[rank_slice(len(records))]
        detect = partial(results, model, category_ids=category_ids)
        predictions = predict(model, evaluation_batches(cfg, records, share), len(share), detect, log.info)
        if is_main():
            metrics[name] = score(cfg, name, predictions, pictures)
    return metrics


def results(model: Detector, batch: list[dict[str, Any]], category_ids: list[int]) -> list[dict[str, Any]]:
    """The model's detections on all images of a batch in COCO's result format."""
    pairs = zip(model(batch), batch, strict=True)
    return [result for detections, record in pairs for result in to_coco(detections, record, category_ids)]


def to_coco(detections: dict[str, Tensor], record: dict[str, Any], category_ids: list[int]) -> list[dict[str, Any]]:
    """Converts one image's detections to COCO results in the pixels of the original image.

    Boxes are x, y, w, h; masks RLE; keypoints pixel indices (- 0.5) with their scores.
    """
    size = record["height"], record["width"]
    scale_y, scale_x = (whole / now for whole, now in zip(size, record["image"].shape[-2:], strict=True))
    boxes = detections["boxes"].cpu() * torch.tensor([scale_x, scale_y, scale_x, scale_y])
    boxes = torch.minimum(boxes.clamp(min=0), torch.tensor([size[1], size[0]] * 2))
    keep = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    boxes = boxes[keep]
    visible = {k: v[to_device(keep, v.device)] if k == "masks" else v.cpu()[keep] for k, v in detections.items()}
    xywh = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1).tolist()
    results: list[dict[str, Any]] = [
        {"image_id": record["image_id"], "category_id": category_ids[label], "bbox": box, "score": score}
        for box, label, score in zip(xywh, visible["labels"].tolist(), visible["scores"].tolist(), strict=True)
    ]
    if "masks" in visible and results:
        # A GPU pastes many together, but for a CPU it is faster to see nothing but a mask's own box.
        at_once = 1 if visible["masks"].device.type == "cpu" else max(1, _PIXELS_AT_ONCE // (size[0] * size[1]))
        for result, segmentation in zip(results, encode(visible["masks"], boxes, size, at_once), strict=True):
            result["segmentation"] = segmentation
    if "keypoints" in visible:
        points = visible["keypoints"] * torch.tensor([scale_x, scale_y, 1.0]) - torch.tensor([0.5, 0.5, 0.0])
        for result, row in zip(results, points.flatten(1).tolist(), strict=True):
            result["keypoints"] = row
    return results


def encode(masks_RMM: Tensor, boxes_R4: Tensor, size: tuple[int, int], at_once: int) -> list[dict[str, Any]]:
    """COCO's compressed run lengths of masks in an image of ``size``, pasted on the masks' device.

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
    """The columns of an image of ``size`` that hold the boxes, with each mask by itself, and the first column.

    Each pixel's center is looked up bilinearly in the probabilities (R, M, M); at least 0.5 is inside.

    Returns:
        (R, H, columns) bool; the number of the first column.
    """
    (height, width), device = size, masks_RMM.device
    x0, y0 = (boxes_R4[:, :2].amin(0).floor() - 1).clamp(min=0).int().tolist()
    x1, y1 = (boxes_R4[:, 2:].amax(0).ceil() + 1).int().tolist()
    x1, y1 = min(x1, width), min(y1, height)
    corner_R2, opposite_R2 = to_device(boxes_R4, device).split(2, dim=1)
    side_R2 = opposite_R2 - corner_R2
    x = (torch.arange(x0, x1, device=device) + 0.5 - corner_R2[:, :1]) / side_R2[:, :1] * 2 - 1
    y = (torch.arange(y0, y1, device=device) + 0.5 - corner_R2[:, 1:]) / side_R2[:, 1:] * 2 - 1
    shape = (len(x), y1 - y0, x1 - x0)
    grid = torch.stack([x[:, None, :].expand(shape), y[:, :, None].expand(shape)], dim=-1)
    values_Rhw = F.grid_sample(masks_RMM[:, None].float(), grid, align_corners=False)[:, 0]
    return F.pad(values_Rhw >= 0.5, (0, 0, y0, height - y1)), x0
