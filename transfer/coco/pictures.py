"""Draws either engine's predictions on images, beside the ground truth: boxes, masks and skeletons."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from pycocotools import mask as coco_mask
from torchvision.transforms.v2 import functional as F
from torchvision.utils import draw_bounding_boxes, draw_keypoints, draw_segmentation_masks

from pretrain.common.image_io import open_upright
from pretrain.common.run_folder import atomic_write

from .data import read

SKELETON = (  # COCO's person, keypoints counted from 1
    (16, 14), (14, 12), (17, 15), (15, 13), (12, 13), (6, 12), (7, 13), (6, 7), (6, 8), (7, 9), (8, 10), (9, 11),
    (2, 3), (1, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 7),
)  # fmt: skip
_MIN_HEIGHT = 480  # smaller images are enlarged, so that labels can be read
_TITLE = 28  # height of the strip above a panel


def draw(
    annotations_json: str | Path,
    image_dir: str | Path,
    predictions: Sequence[Mapping[str, Any]],
    output_dir: str | Path,
    *,
    count: int,
    score_threshold: float = 0.5,
) -> list[Path]:
    """Draws ``count`` images spread evenly over a COCO data set: predictions on the left, ground truth on the right.

    Args:
        predictions: in COCO's result format; those scoring below ``score_threshold`` are skipped, except the best one.

    Returns:
        The pictures written, `<image id>.jpg`; always in ``output_dir``, even if an id is a path.

    Raises:
        UserError: an image that cannot be read.
    """
    content = read(annotations_json)
    categories = {c["id"]: c for c in content["categories"]}
    images = sorted(content["images"], key=lambda image: image["id"])
    truth_of, found_by = _by_image(content["annotations"]), _by_image(predictions)
    count = min(count, len(images))
    written = []
    for image in (images[i * len(images) // count] for i in range(count)):
        truth = truth_of[image["id"]]
        found = sorted(found_by[image["id"]], key=lambda record: -record["score"])
        found = [record for i, record in enumerate(found) if i == 0 or record["score"] >= score_threshold]
        photo = open_upright(os.path.join(image_dir, image["file_name"])).convert("RGB")
        left = _panel(photo, found, categories, f"predictions ({len(found)})")
        right = _panel(photo, truth, categories, f"ground truth ({len(truth)})")
        file = io.BytesIO()
        F.to_pil_image(torch.cat([left, right], dim=2)).save(file, "JPEG", quality=92)
        written.append(Path(output_dir) / _file_name(image["id"]))
        atomic_write(written[-1], file.getvalue())
    return written


def _by_image(records: Iterable[Mapping[str, Any]]) -> defaultdict[Any, list[Mapping[str, Any]]]:
    groups = defaultdict(list)
    for record in records:
        groups[record["image_id"]].append(record)
    return groups


def _file_name(image_id: Any) -> str:
    """`<image id>.jpg`; an id that is a path, or no valid file name, gets a unique name inside the folder."""
    text = str(image_id)
    if re.fullmatch(r"\w[\w.-]{0,99}", text, re.ASCII):
        return f"{text}.jpg"
    plain = re.sub(r"[^\w-]+", "_", text, flags=re.ASCII)[-60:].strip("_")
    return f"{plain}_{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:8]}.jpg"


def _panel(
    photo: Image.Image, items: Sequence[Mapping[str, Any]], categories: Mapping[Any, Mapping[str, Any]], title: str
) -> torch.Tensor:
    """The image with the boxes, masks, keypoints and labels of ``items`` under a title: uint8 (3, H, W)."""
    scale = max(1.0, _MIN_HEIGHT / photo.height)
    size = round(photo.width * scale), round(photo.height * scale)
    panel = F.pil_to_tensor(photo.resize(size, Image.Resampling.BICUBIC))
    colors = [f"hsl({i * 222.5 % 360:.0f}, 80%, 55%)" for i in range(len(items))]  # golden angle: well separated hues
    for item, color in zip(items, colors, strict=True):
        if item.get("segmentation"):
            mask = Image.fromarray(_mask(item["segmentation"], photo.height, photo.width) > 0).resize(size)
            panel = draw_segmentation_masks(panel, torch.from_numpy(np.array(mask)), alpha=0.45, colors=color)
    for item, color in zip(items, colors, strict=True):
        x, y, w, h = item["bbox"]
        box = torch.tensor([[x, y, x + max(w, 0), y + max(h, 0)]]) * scale
        box = torch.minimum(box.clamp(min=0), torch.tensor([*size, *size]))
        panel = draw_bounding_boxes(panel, box, [_label(item, categories)], [color], width=2, fill_labels=True)
        if item.get("keypoints"):
            points = torch.tensor(item["keypoints"]).reshape(1, -1, 3)
            bones = categories.get(item["category_id"], {}).get("skeleton") or SKELETON
            pairs = [(a - 1, b - 1) for a, b in bones if max(a, b) <= points.shape[1]]
            centers, visible = (points[..., :2] + 0.5) * scale, points[..., 2] > 0
            panel = draw_keypoints(panel, centers, pairs, color, radius=3, width=2, visibility=visible)
    strip = Image.new("RGB", (size[0], _TITLE), "white")
    ImageDraw.Draw(strip).text((6, 4), title, "black", ImageFont.load_default(16))
    return F.pad(torch.cat([F.pil_to_tensor(strip), panel], dim=1), [0, 0, 4, 0], fill=255)


def _label(item: Mapping[str, Any], categories: Mapping[Any, Mapping[str, Any]]) -> str:
    name = categories.get(item["category_id"], {}).get("name", str(item["category_id"]))
    score = f" {item['score']:.2f}" if "score" in item else ""
    crowd = " crowd" if item.get("iscrowd") else ""
    return f"{name}{score}{crowd}".encode(errors="replace").decode()  # JSON may hold half a surrogate pair


def _mask(segmentation: Any, height: int, width: int) -> np.ndarray:
    """Polygons or RLE -> uint8 (H, W)."""
    if isinstance(segmentation, list):
        segmentation = coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width))
    elif isinstance(segmentation["counts"], list):
        segmentation = coco_mask.frPyObjects(segmentation, height, width)
    return coco_mask.decode(segmentation)
