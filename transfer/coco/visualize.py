"""Draws either engine's predictions on images, next to the ground truth: boxes, masks and skeletons."""

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont
from pycocotools.coco import COCO
from torch import Tensor
from torchvision.transforms.v2 import functional as F
from torchvision.utils import draw_bounding_boxes, draw_keypoints, draw_segmentation_masks

from pretrain.common.files import atomic_write
from pretrain.common.images import read_image

from .checks.masks import are_numbers, select_outlines

_MIN_HEIGHT = 480  # smaller images are enlarged, so that labels can be read
_MAX_ENLARGED = 4096  # pixels of the longer side: a line of a few pixels' height would exceed JPEG's limit
_MAX_JPEG = 65_500  # longest side in pixels that JPEG allows; line-scan cameras write longer images
_CELL = 360  # sides of a panel of `draw_comparison`
_FONT = f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf"
_TITLE = 28  # height of the strip above a panel
_TRUTH = "ground truth"
SCORE_THRESHOLD = 0.5
Content = Mapping[str, Any]  # content of an annotation file
Records = Sequence[Mapping[str, Any]]  # predictions in COCO's result format, or annotations
Categories = Mapping[Any, Mapping[str, Any]]  # by id


def draw(content: Content, image_dir: str | Path, predictions: Records, output_dir: str | Path, *, count: int) -> None:
    """Draw ``count`` images spread evenly over a COCO data set: predictions on the left, ground truth on the right.

    Args:
        predictions: those that score below SCORE_THRESHOLD are skipped, except the best one on an image.
        output_dir: the folder for one figure per image; see `name_figures`.

    Raises:
        UserError: an image that cannot be read.
    """
    images = sorted(content["images"], key=itemgetter("id"))
    count = min(count, len(images))
    images = [images[i * len(images) // count] for i in range(count)]
    columns = {"predictions": predictions, _TRUTH: content["annotations"]}
    figures = name_figures(output_dir, [image["file_name"] for image in images])
    for image, row in zip(images, _render_rows(content, images, image_dir, columns), strict=True):
        _write(figures[image["file_name"]], row)


def draw_predictions(
    image: str | Path, predictions: Records, categories: Records, threshold: float, output: Path
) -> None:
    """Draw the predictions on an image that score at least ``threshold``.

    Raises:
        UserError: an image that cannot be read, or an output that cannot be written.
    """
    confident = [prediction for prediction in predictions if prediction["score"] >= threshold]
    _write(output, _render(Image.fromarray(read_image(str(image))), confident, {c["id"]: c for c in categories}))


def name_figures(folder: str | Path, names: Sequence[str]) -> dict[str, Path]:
    """Return each image's own file in ``folder``, with its own name and subfolders; it is a JPEG unless it is a PNG.

    Where a.bmp would become a.bmp.jpg, which another image is called, it becomes a.bmp_2.jpg.
    """
    figures = {name: _name_figure(folder, name) for name in names}
    paths: dict[str, Path] = {}
    taken: set[Path] = set()
    for name in sorted(figures, key=lambda name: figures[name].name != Path(name).name):  # those that keep theirs first
        path = figures[name]
        number = 2
        while path in taken:
            path = figures[name].with_stem(f"{figures[name].stem}_{number}")
            number += 1
        paths[name] = path
        taken.add(path)
    return paths


def _name_figure(folder: str | Path, name: str) -> Path:
    path = Path(folder, *(part for part in Path(name).parts if part not in ("/", "..")))
    return path if path.suffix.lower() in (".jpg", ".jpeg", ".png") else path.with_name(f"{path.name}.jpg")


def draw_comparison(
    content: Content, images: Records, image_dir: str | Path, predictions: Mapping[str, Records], output: str | Path
) -> None:
    """Draw a PNG with one row per image: the ground truth, then each detector's predictions, in panels of one size.

    Args:
        predictions: the title of a column -> predictions, selected as in `draw`.

    Raises:
        UserError: an image that cannot be read, or an output that cannot be written.
    """
    columns = {_TRUTH: content["annotations"], **predictions}
    _write(Path(output), torch.cat(list(_render_rows(content, images, image_dir, columns, _CELL)), dim=1))


def _select_confident(records: Records) -> Records:
    """Select the predictions on an image that score at least SCORE_THRESHOLD, and always the best one; best first."""
    ranked = sorted(records, key=lambda record: -record["score"])
    return [record for i, record in enumerate(ranked) if i == 0 or record["score"] >= SCORE_THRESHOLD]


def _write(path: Path, figure: Tensor) -> None:
    file = io.BytesIO()
    is_png = path.suffix.lower() == ".png" or max(figure.shape) > _MAX_JPEG
    F.to_pil_image(figure).save(file, "PNG" if is_png else "JPEG", quality=92)
    atomic_write(path, file.getvalue())


def _render_rows(
    content: Content, images: Records, image_dir: str | Path, columns: Mapping[str, Records], cell: int = 0
) -> Iterator[Tensor]:
    """Render each image once per column, whose title is its key: uint8 (3, H, W)."""
    categories = {c["id"]: c for c in content["categories"]}
    for image in images:
        photo = Image.fromarray(read_image(os.path.join(image_dir, image["file_name"])))
        panels = []
        for title, records in columns.items():
            items = [record for record in records if record["image_id"] == image["id"]]
            items = items if title == _TRUTH else _select_confident(items)
            panels.append(_render_panel(photo, title, items, categories, cell))
        yield torch.cat(panels, dim=2)


def _render_panel(photo: Image.Image, title: str, items: Records, categories: Categories, cell: int) -> Tensor:
    """Render ``items`` under a title; with ``cell`` above 0, in a square of this side with white margins."""
    panel = _render(photo, items, categories, cell / max(photo.size))
    panel = F.pad(panel, [0, 0, max(0, cell - panel.shape[2]), max(0, cell - panel.shape[1])], fill=255)
    strip = Image.new("RGB", (panel.shape[2], _TITLE), "white")
    ImageDraw.Draw(strip).text((6, 4), f"{title} ({len(items)})", "black", ImageFont.load_default(16))
    return F.pad(torch.cat([F.pil_to_tensor(strip), panel], dim=1), [0, 0, 4, 0], fill=255)


def _render(photo: Image.Image, items: Records, categories: Categories, scale: float = 0) -> Tensor:
    """Render the image with boxes, masks, keypoints and labels of ``items``, enlarged if it is small: uint8 (3, H, W).

    Args:
        scale: 0 means to enlarge the image to _MIN_HEIGHT.
    """
    scale = scale or max(1.0, min(_MIN_HEIGHT / photo.height, _MAX_ENLARGED / max(photo.size)))
    size = max(1, round(photo.width * scale)), max(1, round(photo.height * scale))
    canvas = F.pil_to_tensor(photo.resize(size, Image.Resampling.BICUBIC))
    colors = _choose_colors(items, categories)
    coco: Any = COCO()  # which decodes polygons and run lengths
    coco.imgs = {0: {"height": photo.height, "width": photo.width}}
    for item, color in zip(items, colors, strict=True):
        shape = item.get("segmentation")
        if isinstance(shape, list):
            shape = select_outlines(shape)
        if shape:
            mask = Image.fromarray(coco.annToMask({"image_id": 0, "segmentation": shape}) > 0).resize(size)
            canvas = draw_segmentation_masks(canvas, torch.from_numpy(np.array(mask)), alpha=0.45, colors=color)
        if item.get("keypoints"):
            points = torch.tensor(item["keypoints"]).reshape(1, -1, 3)
            bones = categories.get(item["category_id"], {}).get("skeleton") or ()
            bones = [bone for bone in bones if are_numbers(bone) and len(bone) == 2]  # some tools write names
            pairs = [(int(a) - 1, int(b) - 1) for a, b in bones if min(a, b) >= 1 and max(a, b) <= points.shape[1]]
            centers = (points[..., :2] + 0.5) * scale
            visible = points[..., 2] > 0
            canvas = draw_keypoints(canvas, centers, pairs, color, radius=3, width=2, visibility=visible)
    return _draw_boxes(canvas, items, categories, scale, colors) if items else canvas


def _choose_colors(items: Records, categories: Categories) -> list[Any]:
    """Choose one color per class, on which black text can be read."""
    numbers = {category_id: number for number, category_id in enumerate(categories)}
    hues = [numbers.get(item["category_id"], len(numbers)) * 222.5 % 360 for item in items]  # the golden angle
    return [f"hsl({hue:.0f}, 90%, 65%)" for hue in hues]


def _draw_boxes(canvas: Tensor, items: Records, categories: Categories, scale: float, colors: list[Any]) -> Tensor:
    height, width = canvas.shape[1:]
    x, y, w, h = torch.tensor([item["bbox"] for item in items]).unbind(1)
    boxes = torch.stack([x, y, x + w.clamp(min=0), y + h.clamp(min=0)], dim=1) * scale
    boxes = torch.minimum(boxes.clamp(min=0), torch.tensor([width, height, width, height]))
    side = max(width, height)
    canvas = draw_bounding_boxes(canvas, boxes, colors=colors, width=max(2, side // 400))
    labels = [_format_label(item, categories) for item in items]
    return _draw_labels(canvas, boxes.tolist(), labels, colors, font_size=max(15, side // 60))


def _draw_labels(
    canvas: Tensor, boxes: Sequence[Sequence[float]], labels: Sequence[str], colors: Sequence[Any], font_size: int
) -> Tensor:
    """Draw the labels above their boxes, or below the upper edge where there is no space, within the image.

    The first one is drawn last: the predictions are in the order of their scores.
    """
    photo: Image.Image = F.to_pil_image(canvas)
    pen = ImageDraw.Draw(photo)
    font = ImageFont.truetype(_FONT, font_size)
    height = round(1.3 * font_size)
    for (x, y, *_), label, color in reversed(list(zip(boxes, labels, colors, strict=True))):
        width = round(pen.textlength(label, font)) + 6
        left = max(0, min(x, photo.width - width))
        top = y - height if y >= height else y
        top = max(0, min(top, photo.height - height))
        pen.rectangle((left, top, left + width, top + height), fill=color)
        pen.text((left + 3, top + 1), label, "black", font)
    return F.pil_to_tensor(photo)


def _format_label(item: Mapping[str, Any], categories: Categories) -> str:
    name = categories.get(item["category_id"], {}).get("name", str(item["category_id"]))
    score = f" {item['score']:.2f}" if "score" in item else ""
    return f"{name}{score}{' crowd' if item.get('iscrowd') else ''}"
