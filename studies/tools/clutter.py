"""Digits with clutter as an image folder, for tcl and tcl_search.

    python -m studies.tools.clutter datasets/digits_clutter

The images also contain parts of smaller digits behind the digit of the class, a bar in front of it and more noise,
because accuracy on plain digits saturates when labels are used. The levels of ink and background are the same.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    from pretrain.common.command_line import run_program

    run_program("studies.tools.clutter")

import cv2
import numpy as np

from tools import make_data
from tools.data.coco_writer import write_jpeg
from tools.data.digits import enlarge, place_digit, render, split_digits

_NOISE = 30.0  # standard deviation, in levels
_DIGITS = 3  # parts of other digits per image
_IMAGES = {"train": 1300, "val": 400}
_SIZE = 32  # pixels per side
_SEED = 0


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="Write the cluttered digits of `studies/tcl` to a folder."
    )
    parser.add_argument("output", metavar="FOLDER", help="folder to write")
    output = parser.parse_args(argv).output
    make_data.make(Path(output).absolute(), {"kind": "clutter", "seed": _SEED}, write_cluttered_digits)


def write_cluttered_digits(folder: Path) -> None:
    """Write ``folder/images/{train,val}/<digit>/*.jpg``."""
    for number, (split, digits) in enumerate(split_digits(_SEED).items()):
        rng = np.random.default_rng((_SEED, 1, number))
        for i in range(_IMAGES[split]):
            turn, digit = divmod(i, 10)
            ink = _add_clutter(place_digit(digits[digit], turn, _SIZE, rng), digits, rng)
            path = folder / "images" / split / str(digit) / f"{turn:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_jpeg(path, render(ink, rng, _NOISE))


def _add_clutter(ink: np.ndarray, digits: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Return the (S, S) ink of a digit over parts of smaller digits and under a bar without ink."""
    size = len(ink)
    surroundings = np.zeros((2 * size, 2 * size), np.float32)  # larger than the image, whose border cuts some digits
    for _ in range(_DIGITS):
        class_digits = digits[rng.integers(10)]
        digit = enlarge(class_digits[rng.integers(len(class_digits))], int(rng.integers(size // 3, size // 2)))
        top, left = rng.integers(size // 2 - len(digit), size * 3 // 2, 2)
        area = surroundings[top : top + len(digit), left : left + len(digit)]
        np.maximum(area, digit * rng.uniform(0.4, 1.0), out=area)
    cluttered = np.maximum(ink, surroundings[size // 2 : size * 3 // 2, size // 2 : size * 3 // 2])
    start, end = rng.integers(0, size, (2, 2)).tolist()
    return cv2.line(cluttered, start, end, 0.0, size // 8)
