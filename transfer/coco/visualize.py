"""Draws either engine's predictions on images, next to the ground truth: boxes, masks and skeletons."""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont
from pycocotools import mask as coco_mask
from torchvision.transforms.v2 import functional as F
from torchvision.utils import draw_bounding_boxes, draw_keypoints, draw_segmentation_masks

from pretrain.common.files import atomic_write
from pretrain.common.images import open_upright

from .masks import outlines

_MIN_HEIGHT = 480  # smaller images are enlarged, so that labels can be read
_CELL = 360  # sides of a panel of `compare`
_FONT = f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf"
_TITLE = 28  # height of the strip above a panel
SCORE_THRESHOLD = 0.5


def draw(
    content: Mapping[str, Any], image_dir: str | Path, predictions: Sequence[Mapping[str, Any]],
    output_dir: str | Path, *, count: int,
) -> None:  # fmt: skip
    """Draws ``count`` images spread evenly over a COCO data set: predictions on the left, ground truth on the right.

    Args:
        content: of the annotation file.
        predictions: in COCO's result format; those that score below SCORE_THRESHOLD are skipped, except the best one.
        output_dir: gets a picture per image; see `picture_file`.

    Raises:
        UserError: an image that cannot be read.
    """
    categories = {c["id"]: c for c in content["categories"]}
    images = sorted(content["images"], key=itemgetter("id"))
    truth_of, predictions_on = _by_image(content["annotations"]), _by_image(predictions)
    count = min(count, len(images))
    for image in (images[i * len(images) // count] for i in range(count)):
        photo = _photo(os.path.join(image_dir, image["file_name"]))
        panels = {"predictions": _strong(predictions_on[image["id"]]), "ground truth": truth_of[image["id"]]}
        drawn = [_panel(photo, *panel, categories) for panel in panels.items()]
        _write(picture_file(output_dir, image["file_name"]), torch.cat(drawn, dim=2))


def draw_predictions(
    image: str | Path, predictions: Sequence[Mapping[str, Any]], categories: Sequence[Mapping[str, Any]],
    threshold: float, output: Path,
) -> None:  # fmt: skip
    """Draws those predictions on an image that score at least ``threshold``.

    Raises:
        UserError: an image that cannot be read, or an output that cannot be written.
    """
    photo = _photo(image)
    shown = [prediction for prediction in predictions if prediction["score"] >= threshold]
    _write(output, _drawn(photo, shown, {c["id"]: c for c in categories}))


def picture_file(folder: str | Path, name: str) -> Path:
    """Where the picture of an image lies: under the image's own name and subfolders; as JPEG if it is not PNG."""
    path = Path(folder, *(part for part in Path(name).parts if part not in ("/", "..")))
    return path if path.suffix.lower() in (".jpg", ".jpeg", ".png") else path.with_name(f"{path.name}.jpg")


def first_annotated(content: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The first ``count`` images, by id, that have an object."""
    annotated = {record["image_id"] for record in content["annotations"]}
    return [i for i in sorted(content["images"], key=itemgetter("id")) if i["id"] in annotated][:count]


def compare(
    content: Mapping[str, Any], images: Sequence[Mapping[str, Any]], image_dir: str | Path,
    predictions: Mapping[str, Sequence[Mapping[str, Any]]], output: str | Path,
) -> None:  # fmt: skip
    """Draws a PNG with one row per image: the ground truth, then each detector's predictions, in panels of one size.

    Args:
        content: of the annotation file.
        predictions: the title of a column -> predictions in COCO's result format, selected as in `draw`.

    Raises:
        UserError: an image that cannot be read, or an output that cannot be written.
    """
    categories = {c["id"]: c for c in content["categories"]}
    truth_of = _by_image(content["annotations"])
    predictions_of = {title: _by_image(records) for title, records in predictions.items()}
    rows = []
    for image in images:
        photo = _photo(os.path.join(image_dir, image["file_name"]))
        panels = {"ground truth": truth_of[image["id"]]}
        panels |= {title: _strong(of[image["id"]]) for title, of in predictions_of.items()}
        drawn = [_panel(photo, *panel, categories, _CELL) for panel in panels.items()]
        rows.append(torch.cat(drawn, dim=2))
    _write(Path(output), torch.cat(rows, dim=1))


def _photo(path: str | Path) -> Image.Image:
    return open_upright(str(path)).convert("RGB")


def _strong(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The predictions on one image that score at least SCORE_THRESHOLD, and the best one in any case; best first."""
    ranked = sorted(records, key=lambda record: -record["score"])
    return [record for i, record in enumerate(ranked) if i == 0 or record["score"] >= SCORE_THRESHOLD]


def _write(path: Path, picture: torch.Tensor) -> None:
    file = io.BytesIO()
    F.to_pil_image(picture).save(file, "PNG" if path.suffix.lower() == ".png" else "JPEG", quality=92)
    atomic_write(path, file.getvalue())


def _by_image(records: Iterable[Mapping[str, Any]]) -> defaultdict[Any, list[Mapping[str, Any]]]:
    groups = defaultdict(list)
    for record in records:
        groups[record["image_id"]].append(record)
    return groups


def _panel(
    photo: Image.Image, title: str, items: Sequence[Mapping[str, Any]], categories: Mapping[Any, Mapping[str, Any]],
    cell: int = 0,
) -> torch.Tensor:  # fmt: skip
    """`_drawn` under a title: uint8 (3, H, W); with ``cell``, in a square of this side with white margins."""
    panel = _drawn(photo, items, categories, cell / max(photo.size))
    panel = F.pad(panel, [0, 0, max(0, cell - panel.shape[2]), max(0, cell - panel.shape[1])], fill=255)
    strip = Image.new("RGB", (panel.shape[2], _TITLE), "white")
    ImageDraw.Draw(strip).text((6, 4), f"{title} ({len(items)})", "black", ImageFont.load_default(16))
    return F.pad(torch.cat([F.pil_to_tensor(strip), panel], dim=1), [0, 0, 4, 0], fill=255)


def _drawn(
    photo: Image.Image, items: Sequence[Mapping[str, Any]], categories: Mapping[Any, Mapping[str, Any]],
    scale: float = 0,
) -> torch.Tensor:  # fmt: skip
    """The image with the boxes, masks, keypoints and labels of ``items``, enlarged if it is small: uint8 (3, H, W)."""
    scale = scale or max(1.0, _MIN_HEIGHT / photo.height)
    size = max(1, round(photo.width * scale)), max(1, round(photo.height * scale))
    panel = F.pil_to_tensor(photo.resize(size, Image.Resampling.BICUBIC))
    colors: list[Any] = [f"hsl({i * 222.5 % 360:.0f}, 80%, 55%)" for i in range(len(items))]  # golden angle
    for item, color in zip(items, colors, strict=True):
        shape = item.get("segmentation")
        if shape := outlines(shape) if isinstance(shape, list) else shape:
            mask = Image.fromarray(_mask(shape, photo.height, photo.width) > 0).resize(size)
            panel = draw_segmentation_masks(panel, torch.from_numpy(np.array(mask)), alpha=0.45, colors=color)
        if item.get("keypoints"):
            points = torch.tensor(item["keypoints"]).reshape(1, -1, 3)
            bones = categories.get(item["category_id"], {}).get("skeleton") or ()
            pairs = [(a - 1, b - 1) for a, b in bones if max(a, b) <= points.shape[1]]
            centers, visible = (points[..., :2] + 0.5) * scale, points[..., 2] > 0
            panel = draw_keypoints(panel, centers, pairs, color, radius=3, width=2, visibility=visible)
    if items:
        x, y, w, h = torch.tensor([item["bbox"] for item in items]).unbind(1)
        boxes = torch.stack([x, y, x + w.clamp(min=0), y + h.clamp(min=0)], dim=1) * scale
        boxes = torch.minimum(boxes.clamp(min=0), torch.tensor([*size, *size]))
        labels = [_label(item, categories) for item in items]
        side = max(size)
        panel = draw_bounding_boxes(
            panel, boxes, labels, colors, width=max(2, side // 400), fill_labels=True, label_colors="black",
            font=_FONT, font_size=max(11, side // 80),
        )  # fmt: skip
    return panel


def _label(item: Mapping[str, Any], categories: Mapping[Any, Mapping[str, Any]]) -> str:
    name = categories.get(item["category_id"], {}).get("name", str(item["category_id"]))
    score = f" {item['score']:.2f}" if "score" in item else ""
    return f"{name}{score}{' crowd' if item.get('iscrowd') else ''}"


def _mask(segmentation: Any, height: int, width: int) -> np.ndarray:
    """Polygons or RLE -> uint8 (H, W)."""
    if isinstance(segmentation, list):
        segmentation = coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width))
    elif isinstance(segmentation["counts"], list):
        segmentation = coco_mask.frPyObjects(segmentation, height, width)
    return coco_mask.decode(segmentation)
