"""Images for tests: smooth enough for JPEG to preserve them, and different enough to be distinguished."""

import io
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image


def picture(seed: int = 0, height: int = 40, width: int = 56) -> np.ndarray:
    """Draw (H, W, 3) uint8 colored blobs of several sizes, over the whole range of levels."""
    rng = np.random.default_rng(seed)
    levels = np.zeros((height, width, 3))
    for cell in (2, 8, 32):
        grid = rng.random((height // cell + 2, width // cell + 2, 3))
        levels += cell**0.5 * cv2.resize(grid, (width, height), interpolation=cv2.INTER_CUBIC)
    low, high = np.percentile(levels, (2, 98))
    return ((levels - low) / (high - low) * 255).clip(0, 255).astype(np.uint8)


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def write_folder(folder: Path, names: list[str], height: int = 40, width: int = 56) -> Path:
    """Write a different PNG image to each ``folder/name``."""
    for seed, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(seed, height, width)).save(folder / name, "PNG")
    return folder
