"""Real handwritten digits (scikit-learn's load_digits, 8 x 8 pixels) as an image folder and as COCO scenes.

Every image has the same background level, ink and noise: images differ only in the digit, its position and its size,
so the background does not help a contrastive loss. Train and val contain different handwritten digits.

With clutter, the images of the folder also contain parts of smaller digits behind the digit of the class, a bar in
front of it and more noise, because accuracy on plain digits saturates when labels are used. The levels of ink, bar and
background are the same.
"""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from tools.data.coco_writer import CocoWriter, write_jpeg

_BACKGROUND = 72.0  # level, from 0 to 255
_INK = 208.0  # level, from 0 to 255
_NOISE = 10.0  # standard deviation, in levels
_CLUTTER_NOISE = 30.0  # standard deviation, in levels
_CLUTTER_DIGITS = 3  # parts of other digits per image
_CATEGORIES = [{"id": digit + 1, "name": str(digit), "supercategory": "digit"} for digit in range(10)]
_VAL_FRACTION = 0.25  # fraction of the handwritten digits of each class


def write_digits(
    folder: Path, images: dict[str, int], size: int, scenes: dict[str, int], seed: int, clutter: bool
) -> None:
    """Write ``folder/images/{train,val}/<digit>/*.jpg`` and ``folder/coco/{train,val}`` with its annotations.

    Args:
        images: number of images of the image folder in each split.
        size: pixels per side of an image of the image folder.
        scenes: number of COCO images in each split.
        seed: seed of the split, of positions, sizes and noise.
        clutter: whether to add clutter to the images of the image folder.
    """
    for number, (split, digits) in enumerate(_split_digits(seed).items()):
        rng = np.random.default_rng((seed, 1, number))
        _write_folder(folder / "images" / split, digits, images[split], size, rng, clutter)
        _write_scenes(folder / "coco", split, digits, scenes[split], rng)


def _split_digits(seed: int) -> dict[str, list[np.ndarray]]:
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


def _write_folder(
    folder: Path, digits: list[np.ndarray], count: int, size: int, rng: np.random.Generator, clutter: bool
) -> None:
    """Write images of the classes in turn; use every handwritten digit of a class before one is repeated."""
    for digit in range(10):
        (folder / str(digit)).mkdir(parents=True)
    for i in range(count):
        digit = i % 10
        turn = i // 10
        ink = _enlarge(digits[digit][turn % len(digits[digit])], int(rng.integers(size // 2, size * 7 // 8 + 1)))
        canvas = np.zeros((size, size), np.float32)
        top, left = rng.integers(0, size - len(ink) + 1, 2)
        canvas[top : top + len(ink), left : left + len(ink)] = ink
        if clutter:
            canvas = _add_clutter(canvas, digits, rng)
        image = _render(canvas, rng, _CLUTTER_NOISE if clutter else _NOISE)
        write_jpeg(folder / str(digit) / f"{turn:05d}.jpg", image)


def _add_clutter(ink: np.ndarray, digits: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Return the (S, S) ink of a digit over parts of smaller digits and under a bar without ink."""
    size = len(ink)
    surroundings = np.zeros((2 * size, 2 * size), np.float32)  # larger than the image, whose border cuts some digits
    for _ in range(_CLUTTER_DIGITS):
        class_digits = digits[rng.integers(10)]
        digit = _enlarge(class_digits[rng.integers(len(class_digits))], int(rng.integers(size // 3, size // 2)))
        top, left = rng.integers(size // 2 - len(digit), size * 3 // 2, 2)
        area = surroundings[top : top + len(digit), left : left + len(digit)]
        np.maximum(area, digit * rng.uniform(0.4, 1.0), out=area)
    cluttered = np.maximum(ink, surroundings[size // 2 : size * 3 // 2, size // 2 : size * 3 // 2])
    start, end = rng.integers(0, size, (2, 2)).tolist()
    return cv2.line(cluttered, start, end, 0.0, size // 8)


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
            ink = _enlarge(digits[digit][rng.integers(len(digits[digit]))], side)
            top = int(rng.integers(0, height - side + 1))
            left = int(rng.integers(0, width - side + 1))
            area = np.s_[top : top + side, left : left + side]
            inked = ink > 0.5
            if (owner[area][inked] >= 0).mean() > 0.1:  # too much of it would hide other digits: draw another one
                continue
            canvas[area] = np.where(inked, ink, np.maximum(canvas[area], ink))
            owner[area][inked] = len(classes)
            classes.append(digit)
        image_id = writer.add_image(_render(canvas, rng))
        for number, digit in enumerate(classes):
            writer.add_object(image_id, digit + 1, owner == number)
    writer.write("instances")


def _enlarge(ink: np.ndarray, side: int) -> np.ndarray:
    return cv2.resize(ink, (side, side), interpolation=cv2.INTER_CUBIC).clip(0, 1)


def _render(ink: np.ndarray, rng: np.random.Generator, noise: float = _NOISE) -> np.ndarray:
    """Return (H, W, 3) uint8 for (H, W) ink from 0 to 1."""
    levels = _BACKGROUND + (_INK - _BACKGROUND) * ink + rng.normal(0, noise, ink.shape)
    return np.repeat(levels.round().clip(0, 255).astype(np.uint8)[:, :, None], 3, axis=2)
