"""A figure of what the encoder sees: images (rows), each unchanged and in several views (columns with titles)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from ..common.files import atomic_write
from ..common.images import CorruptImage
from .augmentations import Augmentation
from .datasets import ImageData
from .loader import VIEW, make_random_stream
from .views import make_center_view, make_views

_GAP = 4  # white pixels between views
_FONT: dict[str, Any] = {"fontFace": cv2.FONT_HERSHEY_SIMPLEX, "fontScale": 0.4}
_TITLE_HEIGHT = 16  # pixels
_ORIGINAL = "image"  # title of the first column


def draw(data: ImageData, columns: Mapping[str, Augmentation], size: int, images: int, seed: int) -> np.ndarray:
    """Draw the figure as (rows, columns, 3) uint8 RGB, with the views of the first epoch of training with this seed.

    Args:
        columns: augmentations of the columns next to the image itself, by title.
        size: pixels per side of a view.
        images: rows, evenly spaced over the data set; images that cannot be decoded are skipped.
    """
    titles = (_ORIGINAL, *columns)
    title_widths = [cv2.getTextSize(title, **_FONT, thickness=1)[0][0] for title in titles]
    width = max(size, *title_widths) + _GAP
    augmentations = list(columns.values())
    rows = [np.concatenate([_draw_title(title, width) for title in titles], axis=1)]
    for index in sorted(set(np.linspace(0, len(data) - 1, images).round().astype(int).tolist())):
        try:
            image = data.read(index)
        except CorruptImage:  # DATALOADER.ON_CORRUPT decides whether training fails
            continue
        views = make_views(image, augmentations, size, lambda v, i=index: make_random_stream(seed, 0, VIEW, i, v))
        white = ((0, _GAP), (0, width - size), (0, 0))
        cells = [np.pad(cell, white, constant_values=255) for cell in (make_center_view(image, size, size), *views)]
        rows.append(np.concatenate(cells, axis=1))
    return np.concatenate(rows)


def _draw_title(title: str, width: int) -> np.ndarray:
    cell = np.full((_TITLE_HEIGHT, width, 3), 255, np.uint8)
    return np.asarray(cv2.putText(cell, title, (0, _TITLE_HEIGHT - 5), **_FONT, color=(0, 0, 0), lineType=cv2.LINE_AA))


def write(path: str | Path, figure: np.ndarray) -> None:
    """Write RGB as PNG; raise UserError if that is not possible."""
    atomic_write(path, cv2.imencode(".png", cv2.cvtColor(figure, cv2.COLOR_RGB2BGR))[1].tobytes())
