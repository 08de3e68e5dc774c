"""Runs a detector on the test images and turns its detections into COCO's result format and metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from pycocotools import mask as coco_mask
from torch import Tensor

from pretrain.common.interrupt import stop_requested

from ..coco.results import Metrics, score
from ..distributed import raise_if_stopped
from .data import load_coco
from .loader import evaluation_batches, share_of
from .model import Detector

log = logging.getLogger("transfer")


def evaluate(cfg: CfgNode, model: Detector, rank: int, world: int, pictures: int = 0) -> dict[str, Metrics]:
    """Metrics of every data set in DATASETS.TEST; all ranks take part; rank 0 returns them, the other ranks {}.

    Predictions go to OUTPUT_DIR/inference/<data set>/coco_instances_results.json; ``pictures`` images with predictions
    and ground truth to OUTPUT_DIR/visualizations.

    Returns:
        ``{data set: {"bbox": {"AP": ..., ...}, ...}}``.
    """
    results: dict[str, Metrics] = {}
    for name in cfg.DATASETS.TEST:
        records, info = load_coco(name)
        predictions = predict(cfg, model, records, info.category_ids, rank, world)
        if rank > 0:
            continue
        results[name] = score(cfg, name, predictions, log.info, pictures)
    return results


@torch.no_grad()
def predict(
    cfg: CfgNode, model: Detector, records: Sequence[dict[str, Any]], category_ids: list[int], rank: int, world: int
) -> list[dict[str, Any]]:
    """The model's detections on ``records`` in COCO's result format, gathered on rank 0 (other ranks: []).

    Raises:
        Stopped: a stop was requested on one of the ranks.
    """
    was_training = model.training
    model.eval()
    found: list[dict[str, Any]] = []
    share = share_of(records, rank, world)
    start = shown = time.perf_counter()
    for done, batch in enumerate(evaluation_batches(cfg, share), start=1):
        if stop_requested():
            break
        found += to_coco(model(batch)[0], batch[0], category_ids)
        if time.perf_counter() - shown > 30:
            shown = time.perf_counter()
            rate = done / (shown - start)
            left = (len(share) - done) / rate
            log.info(f"evaluated {done} / {len(share)} images, {rate:.1f} images/s, {left:.0f} s left")
    model.train(was_training)
    raise_if_stopped()
    if world > 1:
        gathered: list[Any] | None = [None] * world if rank == 0 else None
        dist.gather_object(found, gathered)
        found = [p for part in gathered or () for p in part]
    return found


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
    kept = {key: value.cpu()[keep] for key, value in detections.items()}
    xywh = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1).tolist()
    results: list[dict[str, Any]] = [
        {"image_id": record["image_id"], "category_id": category_ids[label], "bbox": box, "score": score}
        for box, label, score in zip(xywh, kept["labels"].tolist(), kept["scores"].tolist(), strict=True)
    ]
    for index, result in enumerate(results):
        if "masks" in kept:
            mask = paste_mask(kept["masks"][index], boxes[index], size)
            rle = coco_mask.encode(np.asfortranarray(mask.numpy().astype(np.uint8)))
            counts: Any = rle["counts"]  # bytes, whatever pycocotools' stubs say
            result["segmentation"] = {"size": list(rle["size"]), "counts": counts.decode()}
        if "keypoints" in kept:
            points = kept["keypoints"][index] * torch.tensor([scale_x, scale_y, 1.0])
            result["keypoints"] = (points - torch.tensor([0.5, 0.5, 0.0])).flatten().tolist()
    return results


def paste_mask(mask: Tensor, box: Tensor, size: tuple[int, int]) -> Tensor:
    """The binary mask (H, W) of an image of ``size`` from probabilities (M, M) in ``box``.

    Each pixel's center is looked up bilinearly in the probabilities; at least 0.5 is inside.
    """
    height, width = size
    pasted = torch.zeros(height, width, dtype=torch.bool)
    x0, y0 = (box[:2].floor() - 1).clamp(min=0).int().tolist()
    x1, y1 = min(int(box[2].ceil()) + 1, width), min(int(box[3].ceil()) + 1, height)
    x = (torch.arange(x0, x1) + 0.5 - box[0]) / (box[2] - box[0]) * 2 - 1
    y = (torch.arange(y0, y1) + 0.5 - box[1]) / (box[3] - box[1]) * 2 - 1
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)
    values = F.grid_sample(mask[None, None].float(), grid[None], align_corners=False)[0, 0]
    pasted[y0:y1, x0:x1] = values >= 0.5
    return pasted
