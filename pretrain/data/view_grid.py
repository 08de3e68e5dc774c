"""A figure of what the encoder sees: images (rows), each unchanged and in several views (columns)."""

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

from ..common.files import atomic_write
from ..common.images import CorruptImage
from .augmentations import Augmentation
from .datasets import ImageData
from .loader import VIEW, make_random_stream
from .views import make_center_view, make_views

_GAP = 4  # white pixels between views


def draw(data: ImageData, augmentations: Sequence[Augmentation], size: int, images: int, seed: int) -> np.ndarray:
    """Draw the figure as (rows, columns, 3) uint8 RGB, with the views of the first epoch of training with this seed.

    Args:
        augmentations: augmentations of the columns next to the image itself.
        size: pixels per side of a view.
        images: rows, evenly spaced over the data set; images that cannot be decoded are skipped.
    """
    rows: list[np.ndarray] = []
    for index in sorted(set(np.linspace(0, len(data) - 1, images).round().astype(int).tolist())):
        try:
            image = data.read(index)
        except CorruptImage:  # DATALOADER.ON_CORRUPT decides whether training fails
            continue
        views = make_views(image, augmentations, size, lambda v, i=index: make_random_stream(seed, 0, VIEW, i, v))
        gap = ((0, _GAP), (0, _GAP), (0, 0))
        cells = [np.pad(cell, gap, constant_values=255) for cell in (make_center_view(image, size, size), *views)]
        rows.append(np.concatenate(cells, axis=1))
    return np.concatenate(rows) if rows else np.full((_GAP, _GAP, 3), 255, np.uint8)


def write(path: str | Path, figure: np.ndarray) -> None:
    """Write RGB as PNG; raise UserError if that is not possible."""
    atomic_write(path, cv2.imencode(".png", cv2.cvtColor(figure, cv2.COLOR_RGB2BGR))[1].tobytes())
