"""A fine-tuned Faster, Mask or Keypoint R-CNN -> an ONNX file: one image of any size in, its detections out.

The torchvision engine's own modules are exported. Only what ONNX cannot express is replaced: the pooling of RoIs, NMS
per class and the decoding of keypoints, by functions whose lengths depend on the data in ways that ONNX knows.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor, nn
from torchvision.ops import nms, roi_align

from pretrain.common.errors import UserError
from pretrain.common.files import existing_file
from pretrain.common.image_io import open_upright
from transfer import config
from transfer.convert import find_source
from transfer.proof import compare
from transfer.torchvision_engine import boxes, heads, rpn
from transfer.torchvision_engine.data import load_coco
from transfer.torchvision_engine.mapper import build_mapper
from transfer.torchvision_engine.model import Detector, build_model
from transfer.weights import load_weights, read_weights

from . import onnx_file
from .keypoints import TRANSLATIONS, find_keypoints

_MOST_IMAGES = 20  # of the test set that are searched for one with detections


def export(source: Path, output: Path, image: str = "") -> dict[str, float]:
    """Writes ``output`` and returns the largest relative difference per output.

    Args:
        image: to verify it with; empty: the first of DATASETS.TEST on which the detector finds something.

    Raises:
        UserError: no config.yaml beside the detector, one that the engine cannot honor, nothing found on the image, or
            other detections; nothing was written.
        OSError: the disk is full, or the folder cannot be written.
    """
    path = find_source(source)
    cfg = config.load_config(existing_file(path.parent / "config.yaml", "config.yaml of the detector's training"))
    config.check_supported(cfg)
    weights = read_weights(path)
    model = build_model(cfg, torch.device("cpu"))
    load_weights(model.state_dict, weights, require_heads=True, log=lambda _: None)
    model.eval().requires_grad_(False)
    pixels, wanted = _example(model, cfg, image)

    def prove(run: Callable[..., list[np.ndarray]]) -> dict[str, float]:
        found = [torch.from_numpy(array) for array in run(None, {"image": pixels.numpy()})]
        return compare_detections(wanted, dict(zip(wanted, found, strict=True)))

    module = OneImage(model, flip=cfg.INPUT.FORMAT == "BGR")
    with expressible():
        program = onnx_file.translate(
            module, "image", (3, 160, 224), {1: "height", 2: "width"}, list(wanted), "detections", TRANSLATIONS
        )
    own = {"source": path.name, "source_sha256": weights.sha256, "detector_config": cfg.dump()}
    return onnx_file.write(program, output, {**weights.provenance, **own}, prove)


class OneImage(nn.Module):
    """Pixels (3, H, W) uint8, RGB, of the resized image -> the detector's boxes, scores, labels, masks, keypoints.

    Args:
        flip: the detector was trained on BGR.
    """

    def __init__(self, model: Detector, flip: bool) -> None:
        super().__init__()
        self.model, self.flip = model, flip

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        model, (height, width) = self.model, image.shape[-2:]
        pixels = image.flip(0) if self.flip else image
        pixels = (pixels - model.pixel_mean) / model.pixel_std
        features = model.backbone(F.pad(pixels, (0, -width % 32, 0, -height % 32))[None])
        proposals, _ = model.proposal_generator(features, [(height, width)])
        return tuple(model.roi_heads.detect(features, proposals, [(height, width)])[0].values())


@contextlib.contextmanager
def expressible() -> Iterator[None]:
    """Replaces what ONNX cannot express, as long as the block runs."""
    replaced = [
        (boxes.RoIPooler, "__call__", _pool),
        (rpn, "batched_nms", _nms_per_group),
        (heads, "batched_nms", _nms_per_group),
        (heads, "heatmaps_to_keypoints", find_keypoints),
    ]
    with contextlib.ExitStack() as stack:
        for place, name, function in replaced:
            stack.enter_context(patch.object(place, name, function))
        yield


def _pool(self: boxes.RoIPooler, features: list[Tensor], rois_of_images: list[Tensor]) -> Tensor:
    """`RoIPooler` of one image, with a search per level instead of a split by counts that are read."""
    (corners,) = rois_of_images
    rois = torch.cat([torch.zeros_like(corners[:, :1]), corners], 1)
    side = ((rois[:, 3] - rois[:, 1]) * (rois[:, 4] - rois[:, 2])).sqrt()
    level = torch.floor(4 + torch.log2(side / 224 + 1e-8)).clamp(2, 5)
    out = features[0].new_zeros(len(rois), features[0].shape[1], self.resolution, self.resolution)
    for stage, feature in zip(range(2, 6), features[:4], strict=True):
        index = torch.where(level == stage)[0]
        pooled = roi_align(feature, rois[index], self.resolution, 0.5**stage, self.sampling_ratio, aligned=True)
        out = out.index_put((index,), pooled)
    return out


def _nms_per_group(corners: Tensor, scores: Tensor, groups: Tensor, threshold: float) -> Tensor:
    """`batched_nms`: boxes of different groups are moved so far apart that they do not overlap; also of no box."""
    apart = F.pad(corners.flatten(), (0, 1)).max() + 1
    return nms(corners + (groups * apart)[:, None], scores, threshold)


def _example(model: Detector, cfg: CfgNode, image: str) -> tuple[Tensor, dict[str, Tensor]]:
    """RGB pixels (3, H, W) as the test images are resized, and the detector's (at least one) detections on them."""
    mapper, searched = build_mapper(cfg, train=False, flip=()), image
    if image:
        size = open_upright(image).size
        records: Sequence[dict[str, Any]] = [{"file_name": image, "width": size[0], "height": size[1], "image_id": 0}]
    elif cfg.DATASETS.TEST:
        searched = f"the first {_MOST_IMAGES} of {cfg.DATASETS.TEST[0]}"
        records = load_coco(cfg.DATASETS.TEST[0])[0]
    else:
        raise UserError("the detector has no DATASETS.TEST to be verified with; name an image by --image FILE")
    for record in itertools.islice(records, _MOST_IMAGES):
        pixels = mapper(record, None)["image"]
        wanted = model([{"image": pixels}])[0]
        if len(wanted["boxes"]):
            return pixels.flip(0) if cfg.INPUT.FORMAT == "BGR" else pixels, wanted
    raise UserError(f"the detector finds nothing on {searched}, which proves nothing; name an image by --image FILE")


def compare_detections(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, float]:
    """The largest relative difference per output; of keypoints, that of their scores.

    A keypoint's position is the best pixel, and two neighbors may be equally good: it may differ by one pixel.

    Raises:
        UserError: other detections.
    """
    of = "the exported detector"
    if "keypoints" not in wanted:
        return compare(wanted, found, of)
    (points, scores), (other_points, other_scores) = (x["keypoints"].split((2, 1), -1) for x in (wanted, found))
    errors = compare({**wanted, "keypoints": scores}, {**found, "keypoints": other_scores}, of)
    if not (moved := float((points - other_points).abs().max())) <= 1:
        raise UserError(f"a keypoint of {of} differs by {moved:.1f} pixels, above 1; nothing was written")
    return errors
