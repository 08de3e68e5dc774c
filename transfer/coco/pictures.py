"""Predictions drawn over images, the ground truth beside them: boxes, masks, skeletons. For either engine."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from fvcore.common.config import CfgNode
from pycocotools import mask as coco_mask

from pretrain.common.image_io import open_upright
from pretrain.common.run_folder import atomic_write

from . import data as coco_data

SKELETON = (  # COCO's person, keypoints counted from 1
    (16, 14), (14, 12), (17, 15), (15, 13), (12, 13), (6, 12), (7, 13), (6, 7), (6, 8), (7, 9), (8, 10), (9, 11),
    (2, 3), (1, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 7),
)  # fmt: skip


def folder_of(cfg: CfgNode, name: str) -> Path:
    """Where the pictures of a test set go: OUTPUT_DIR/visualizations, with several sets a folder each below."""
    folder = Path(cfg.OUTPUT_DIR) / "visualizations"
    return folder / coco_data.folder_name(name) if len(cfg.DATASETS.TEST) > 1 else folder


def draw(
    annotations_json: str | Path,
    image_dir: str | Path,
    predictions: Sequence[dict[str, Any]],
    output_dir: str | Path,
    *,
    count: int,
    score_threshold: float = 0.5,
) -> list[Path]:
    """Draws ``count`` images spread evenly over a COCO data set: predictions on the left, ground truth on the right.

    Args:
        predictions: in COCO's result format; those scoring below ``score_threshold`` are left out, save the best one.

    Returns:
        The pictures written, `<image id>.jpg` in ``output_dir``, never elsewhere, whatever the id.

    Raises:
        UserError: an image that cannot be read.
    """
    data = coco_data.read(annotations_json)
    categories = {c["id"]: c for c in data["categories"]}
    images = sorted(data["images"], key=lambda image: image["id"])
    chosen = (
        [images[i * len(images) // count] for i in range(min(count, len(images)))] if count < len(images) else images
    )
    truth = _by_image(data.get("annotations", []))
    found = _by_image(sorted(predictions, key=lambda p: -p["score"]))
    written = []
    for image in chosen:
        upright = open_upright(os.path.join(image_dir, image["file_name"]))
        pixels = cv2.cvtColor(np.asarray(upright.convert("RGB")), cv2.COLOR_RGB2BGR)
        kept = [p for i, p in enumerate(found.get(image["id"], [])) if i == 0 or p["score"] >= score_threshold]
        sides = [_panel(pixels, items, categories) for items in (kept, truth.get(image["id"], []))]
        titles = (f"predictions ({len(kept)})", f"ground truth ({len(truth.get(image['id'], []))})")
        canvas = np.concatenate([_titled(*pair) for pair in zip(sides, titles, strict=True)], 1)
        written.append(Path(output_dir) / _file_name(image["id"]))
        atomic_write(written[-1], cv2.imencode(".jpg", canvas, [cv2.IMWRITE_JPEG_QUALITY, 92])[1].tobytes())
    return written


def _file_name(image_id: Any) -> str:
    """`<image id>.jpg`; an id that is a path, or no file's name, gets a name inside the folder, and one of its own."""
    text = str(image_id)
    if re.fullmatch(r"\w[\w.-]{0,99}", text, re.ASCII):
        return f"{text}.jpg"
    plain = re.sub(r"[^\w-]+", "_", text, flags=re.ASCII)[-60:].strip("_")
    return f"{plain}_{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:8]}.jpg"


def _by_image(items: Sequence[dict[str, Any]]) -> dict[Any, list[dict[str, Any]]]:
    groups: dict[Any, list[dict[str, Any]]] = {}
    for item in items:
        groups.setdefault(item["image_id"], []).append(item)
    return groups


def _panel(pixels: np.ndarray, items: Sequence[dict[str, Any]], categories: dict[int, dict[str, Any]]) -> np.ndarray:
    """The image, at least 480 pixels high, with boxes, masks, keypoints and labels of ``items``."""
    scale = max(1.0, 480 / pixels.shape[0])
    height, width = pixels.shape[:2]
    panel = cv2.resize(pixels, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC)
    colours = [_colour(i) for i in range(len(items))]
    for item, colour in zip(items, colours, strict=True):
        mask = _mask(item.get("segmentation"), height, width)
        if mask is not None:
            inside = cv2.resize(mask, panel.shape[1::-1], interpolation=cv2.INTER_NEAREST).astype(bool)
            panel[inside] = (0.55 * panel[inside] + 0.45 * np.array(colour)).astype(np.uint8)
    for item, colour in zip(items, colours, strict=True):
        x, y, w, h = (round(v * scale) for v in item["bbox"])
        cv2.rectangle(panel, (x, y), (x + w, y + h), colour, 2)
        category = categories.get(item["category_id"], {})
        if item.get("keypoints"):
            _skeleton(
                panel, np.reshape(item["keypoints"], (-1, 3)), category.get("skeleton") or SKELETON, scale, colour
            )
        score = f" {item['score']:.2f}" if "score" in item else ""
        crowd = " crowd" if item.get("iscrowd") else ""
        _label(panel, f"{category.get('name', item['category_id'])}{score}{crowd}", (x, y), colour)
    return panel


def _skeleton(panel: np.ndarray, points: np.ndarray, bones: Sequence[Sequence[int]], scale: float, colour: Any) -> None:
    """Bones between keypoints that are labelled (visibility or score above 0); a dot on each."""
    xy = np.rint((points[:, :2] + 0.5) * scale).astype(int)
    seen = points[:, 2] > 0
    for a, b in bones:
        if max(a, b) <= len(points) and seen[a - 1] and seen[b - 1]:
            cv2.line(panel, tuple(xy[a - 1].tolist()), tuple(xy[b - 1].tolist()), colour, 2, cv2.LINE_AA)
    for point in xy[seen].tolist():
        cv2.circle(panel, tuple(point), 3, (255, 255, 255), -1, cv2.LINE_AA)
        cv2.circle(panel, tuple(point), 3, colour, 1, cv2.LINE_AA)


def _label(panel: np.ndarray, text: str, corner: tuple[int, int], colour: Any) -> None:
    """Text on a filled strip above the box, or inside it at the image's upper border."""
    text = text.encode(errors="replace").decode()  # JSON may hold half a surrogate pair, which crashes OpenCV
    (w, h), below = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, 0.45, 1)
    x = min(max(corner[0], 0), max(panel.shape[1] - w - 4, 0))
    y = corner[1] if corner[1] >= h + below + 4 else corner[1] + h + below + 4
    cv2.rectangle(panel, (x, y - h - below - 4), (x + w + 4, y), colour, -1)
    dark = sum(colour) > 380
    cv2.putText(
        panel,
        text,
        (x + 2, y - below - 1),
        cv2.FONT_HERSHEY_SIMPLEX,
        0.45,
        (0,) * 3 if dark else (255,) * 3,
        1,
        cv2.LINE_AA,
    )


def _titled(panel: np.ndarray, title: str) -> np.ndarray:
    strip = np.full((28, panel.shape[1], 3), 255, np.uint8)
    cv2.putText(strip, title, (6, 20), cv2.FONT_HERSHEY_SIMPLEX, 0.55, (0, 0, 0), 1, cv2.LINE_AA)
    return cv2.copyMakeBorder(np.concatenate([strip, panel]), 0, 0, 0, 4, cv2.BORDER_CONSTANT, value=(255, 255, 255))


def _mask(segmentation: Any, height: int, width: int) -> np.ndarray | None:
    if not segmentation:
        return None
    if isinstance(segmentation, list):
        segmentation = coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width))
    elif isinstance(segmentation["counts"], list):
        segmentation = coco_mask.frPyObjects(segmentation, height, width)
    return coco_mask.decode(segmentation)


def _colour(index: int) -> tuple[int, int, int]:
    """Well separated hues (golden angle), BGR."""
    hsv = np.array([[[int(index * 68.75) % 180, 200, 235]]], np.uint8)
    b, g, r = cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR)[0, 0].tolist()
    return b, g, r
