"""Refuses data sets of which nothing would be trained on, or whose masks the detector cannot be trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from fvcore.common.config import CfgNode

from pretrain.common.errors import UserError

ONLY_CROWDS = "has no objects, or only crowds (iscrowd 1)"


def refuse_untrainable(content: Mapping[str, Any], cfg: CfgNode, where: str) -> None:
    """Raises UserError if no image of a data set, as `check.unify` returns it, or no mask format, suits the config."""
    model, labeled = cfg.MODEL, Counter()
    objects = [record for record in content["annotations"] if not record["iscrowd"]]
    if not objects and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS:
        raise UserError(f"{where} {ONLY_CROWDS}, which are not trained on; annotate it, or set their iscrowd 0")
    rle = sum(isinstance(record.get("segmentation"), dict) for record in objects)
    if rle and cfg.INPUT.MASK_FORMAT == "polygon":
        raise UserError(f"{where}: {rle} of its masks are RLE, not polygons; set INPUT.MASK_FORMAT bitmask")
    for record in objects if model.KEYPOINT_ON else ():
        labeled[record["image_id"]] += sum(visible > 0 for visible in record["keypoints"][2::3])
    least = model.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE if model.KEYPOINT_ON else 0
    if max(labeled.values(), default=0) < least:
        raise UserError(
            f"{where}: no image has {least} labeled keypoints (visibility 1 or 2), which "
            "MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE requires; label them"
        )
