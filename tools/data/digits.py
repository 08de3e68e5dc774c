"""Real handwritten digits (scikit-learn's load_digits, 8 x 8 pixels) as an image folder and as COCO scenes.

Every image has the same background level, ink and noise: images differ only in the digit, its position and its size,
so the background does not help a contrastive loss. Train and val contain different handwritten digits.
"""

from pathlib import Path

import cv2
import numpy as np

from tools.data.coco_writer import CocoWriter, write_jpeg

_BACKGROUND = 72.0  # level, from 0 to 255
_INK = 208.0  # level, from 0 to 255
_NOISE = 10.0  # standard deviation, in levels
_CATEGORIES = [{"id": digit + 1, "name": str(digit), "supercategory": "digit"} for digit in range(10)]
_VAL_FRACTION = 0.25  # fraction of the handwritten digits of each class


def write_digits(folder: Path, images: dict[str, int], size: int, scenes: dict[str, int], seed: int) -> None:
    """Write ``folder/images/{train,val}/<digit>/*.jpg`` and ``folder/coco/{train,val}`` with its annotations.

    Args:
        images: number of images of the image folder in each split.
        size: image size in pixels, of the image folder.
        scenes: number of COCO images in each split.
        seed: seed of the split, of positions, sizes and noise.
    """
    for number, (split, digits) in enumerate(split_digits(seed).items()):
        rng = np.random.default_rng((seed, 1, number))
        _write_folder(folder / "images" / split, digits, images[split], size, rng)
        _write_scenes(folder / "coco", split, digits, scenes[split], rng)


def split_digits(seed: int) -> dict[str, list[np.ndarray]]:
    """Map each split to ten arrays (n, 8, 8) of ink from 0 to 1, one per class."""
    from sklearn.datasets import load_digits  # slow to import

    images, targets = load_digits(return_X_y=True)
    rng = np.random.default_rng((seed, 0))
    split: dict[str, list[np.ndarray]] = {"train": [], "val": []}
    for digit in range(10):
        ink = rng.permutation(images[targets == digit]).reshape(-1, 8, 8).astype(np.float32) / 16
        held_out = round(len(ink) * _VAL_FRACTION)
        split["val"].append(ink[:held_out])
        split["train"].append(ink[held_out:])
    return split


def _write_folder(folder: Path, digits: list[np.ndarray], count: int, size: int, rng: np.random.Generator) -> None:
    """Write images of the classes in turn; use every handwritten digit of a class before one is repeated."""
    for digit in range(10):
        (folder / str(digit)).mkdir(parents=True)
    for i in range(count):
        digit = i % 10
        turn = i // 10
        write_jpeg(folder / str(digit) / f"{turn:05d}.jpg", render(place_digit(digits[digit], turn, size, rng), rng))


def place_digit(digits: np.ndarray, turn: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Return the (size, size) ink of a digit of a class, (n, 8, 8), with a random size and place."""
    ink = enlarge(digits[turn % len(digits)], int(rng.integers(size // 2, size * 7 // 8 + 1)))
    canvas = np.zeros((size, size), np.float32)
    top, left = rng.integers(0, size - len(ink) + 1, 2)
    canvas[top : top + len(ink), left : left + len(ink)] = ink
    return canvas


def _write_scenes(folder: Path, split: str, digits: list[np.ndarray], count: int, rng: np.random.Generator) -> None:
    writer = CocoWriter(folder, split, _CATEGORIES)
    shapes = ((128, 128), (96, 128), (128, 96))
    for _ in range(count):
        height, width = shapes[rng.integers(len(shapes))]
        canvas = np.zeros((height, width), np.float32)
        owner = np.full((height, width), -1)  # number of the digit whose ink is on top
        classes: list[int] = []
        count_in_scene = int(rng.integers(2, 6))
        while len(classes) < count_in_scene:
            digit = int(rng.integers(10))
            side = int(rng.integers(20, 45))
            ink = enlarge(digits[digit][rng.integers(len(digits[digit]))], side)
            top = int(rng.integers(0, height - side + 1))
            left = int(rng.integers(0, width - side + 1))
            area = np.s_[top : top + side, left : left + side]
            inked = ink > 0.5
            if (owner[area][inked] >= 0).mean() > 0.1:  # too much of it would hide other digits: draw another one
                continue
            canvas[area] = np.where(inked, ink, np.maximum(canvas[area], ink))
            owner[area][inked] = len(classes)
            classes.append(digit)
        image_id = writer.add_image(render(canvas, rng))
        for number, digit in enumerate(classes):
            writer.add_object(image_id, digit + 1, owner == number)
    writer.write("instances")


def enlarge(ink: np.ndarray, side: int) -> np.ndarray:
    """Return (side, side) ink from 0 to 1."""
    return cv2.resize(ink, (side, side), interpolation=cv2.INTER_CUBIC).clip(0, 1)


def render(ink: np.ndarray, rng: np.random.Generator, noise: float = _NOISE) -> np.ndarray:
    """Return (H, W, 3) uint8 for (H, W) ink from 0 to 1."""
    levels = _BACKGROUND + (_INK - _BACKGROUND) * ink + rng.normal(0, noise, ink.shape)
    return np.repeat(levels.round().clip(0, 255).astype(np.uint8)[:, :, None], 3, axis=2)
