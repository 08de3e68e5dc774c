"""Real handwritten digits (scikit-learn's load_digits, 8 x 8 pixels) as an image folder and as COCO scenes.

Every image has the same background level, ink and noise: only the digit, its place and its size tell images apart, so
a contrastive loss cannot be solved by the background. Train and val are made of different handwritten digits.

With clutter, the images of the folder also hold parts of smaller digits, behind the one that names the class, a bar in
front of it and more noise: plain digits saturate where labels are used. Ink, bar and background keep their levels.
"""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from tools.data.coco_writer import CocoWriter, write_jpeg

_BACKGROUND, _INK, _NOISE = 72.0, 208.0, 10.0  # levels of 255; the noise's standard deviation
_CLUTTER_NOISE, _STRAYS = 30.0, 3  # parts of other digits per image
_CATEGORIES = [{"id": digit + 1, "name": str(digit), "supercategory": "digit"} for digit in range(10)]
_VAL_SHARE = 0.25  # of each class's handwritten digits


def write_digits(
    folder: Path, images: dict[str, int], size: int, scenes: dict[str, int], seed: int, clutter: bool
) -> None:
    """Writes ``folder/images/{train,val}/<digit>/*.jpg`` and ``folder/coco/{train,val}`` with its annotations.

    Args:
        images: of the image folder, by split.
        size: pixels per side of an image of the folder.
        scenes: COCO images, by split.
        seed: of the split, of places, sizes and noise.
        clutter: in the images of the folder.
    """
    for number, (split, digits) in enumerate(_split_digits(seed).items()):
        rng = np.random.default_rng((seed, 1, number))
        _write_folder(folder / "images" / split, digits, images[split], size, rng, clutter)
        _write_scenes(folder / "coco", split, digits, scenes[split], rng)


def _split_digits(seed: int) -> dict[str, list[np.ndarray]]:
    """By split, ten arrays (n, 8, 8) of ink from 0 to 1, one per class."""
    from sklearn.datasets import load_digits  # slow to import

    images, targets = load_digits(return_X_y=True)
    rng = np.random.default_rng((seed, 0))
    split: dict[str, list[np.ndarray]] = {"train": [], "val": []}
    for digit in range(10):
        ink = rng.permutation(images[targets == digit]).reshape(-1, 8, 8).astype(np.float32) / 16
        held_out = round(len(ink) * _VAL_SHARE)
        split["val"].append(ink[:held_out])
        split["train"].append(ink[held_out:])
    return split


def _write_folder(
    folder: Path, digits: list[np.ndarray], count: int, size: int, rng: np.random.Generator, clutter: bool
) -> None:
    """Classes in turn; every handwritten digit of a class is used before one is used again."""
    for digit in range(10):
        (folder / str(digit)).mkdir(parents=True)
    for i in range(count):
        digit, turn = i % 10, i // 10
        ink = _enlarge(digits[digit][turn % len(digits[digit])], int(rng.integers(size // 2, size * 7 // 8 + 1)))
        canvas = np.zeros((size, size), np.float32)
        top, left = rng.integers(0, size - len(ink) + 1, 2)
        canvas[top : top + len(ink), left : left + len(ink)] = ink
        noise = _NOISE
        if clutter:
            canvas, noise = _clutter(canvas, digits, rng), _CLUTTER_NOISE
        write_jpeg(folder / str(digit) / f"{turn:05d}.jpg", _render(canvas, rng, noise))


def _clutter(ink: np.ndarray, digits: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """The (S, S) ink of a digit over parts of smaller ones and under a bar without ink."""
    size = len(ink)
    around = np.zeros((2 * size, 2 * size), np.float32)  # so that the border cuts some of them
    for _ in range(_STRAYS):
        of_class = digits[rng.integers(10)]
        stray = _enlarge(of_class[rng.integers(len(of_class))], int(rng.integers(size // 3, size // 2)))
        top, left = rng.integers(size // 2 - len(stray), size * 3 // 2, 2)
        place = around[top : top + len(stray), left : left + len(stray)]
        np.maximum(place, stray * rng.uniform(0.4, 1.0), out=place)
    cluttered = np.maximum(ink, around[size // 2 : size * 3 // 2, size // 2 : size * 3 // 2])
    start, end = ([int(at) for at in rng.integers(0, size, 2)] for _ in range(2))
    return cv2.line(cluttered, start, end, 0.0, size // 8)


def _write_scenes(folder: Path, split: str, digits: list[np.ndarray], count: int, rng: np.random.Generator) -> None:
    writer = CocoWriter(folder, split, _CATEGORIES)
    shapes = ((128, 128), (96, 128), (128, 96))
    for _ in range(count):
        height, width = shapes[rng.integers(len(shapes))]
        canvas = np.zeros((height, width), np.float32)
        owner = np.full((height, width), -1)  # which digit's ink is on top
        classes: list[int] = []
        wanted = int(rng.integers(2, 6))
        while len(classes) < wanted:
            digit, side = int(rng.integers(10)), int(rng.integers(20, 45))
            ink = _enlarge(digits[digit][rng.integers(len(digits[digit]))], side)
            top, left = int(rng.integers(0, height - side + 1)), int(rng.integers(0, width - side + 1))
            place = np.s_[top : top + side, left : left + side]
            inked = ink > 0.5
            if (owner[place][inked] >= 0).mean() > 0.1:  # it would hide too much of another: place another one
                continue
            canvas[place] = np.where(inked, ink, np.maximum(canvas[place], ink))
            owner[place][inked] = len(classes)
            classes.append(digit)
        image_id = writer.add_image(_render(canvas, rng))
        for number, digit in enumerate(classes):
            writer.add_object(image_id, digit + 1, owner == number)
    writer.write("instances")


def _enlarge(ink: np.ndarray, side: int) -> np.ndarray:
    return cv2.resize(ink, (side, side), interpolation=cv2.INTER_CUBIC).clip(0, 1)


def _render(ink: np.ndarray, rng: np.random.Generator, noise: float = _NOISE) -> np.ndarray:
    """(H, W) ink from 0 to 1 -> (H, W, 3) uint8."""
    levels = _BACKGROUND + (_INK - _BACKGROUND) * ink + rng.normal(0, noise, ink.shape)
    return np.repeat(levels.round().clip(0, 255).astype(np.uint8)[:, :, None], 3, axis=2)
