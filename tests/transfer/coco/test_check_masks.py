"""Masks that pycocotools would not survive are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from transfer.coco.check import find_mask_problem


@pytest.mark.parametrize("seed", range(8))
def test_rle_is_read_as_pycocotools_writes_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    height, width = (int(side) for side in rng.integers(2, 300, 2))
    pixels = rng.random((height, width)) < (0.5 if seed % 2 else 0.001)
    pixels[: height // 2, width // 3 :] = True
    code: Any = coco_mask.encode(np.asfortranarray(pixels, np.uint8))
    size, counts = [height, width], code["counts"].decode()
    runs = np.diff(np.flatnonzero(np.diff(pixels.ravel("F"), prepend=False, append=not pixels[-1, -1])), prepend=0)
    for good in (counts, runs.tolist()):
        assert find_mask_problem({"size": size, "counts": good}, width, height) == ""
    shorter: Any = coco_mask.encode(np.asfortranarray(pixels[:-1], np.uint8))
    for bad in (shorter["counts"].decode(), runs[:-1].tolist(), [*runs.tolist()[:-1], 99999]):
        text = find_mask_problem({"size": size, "counts": bad}, width, height)
        assert f"do not sum to {height * width}" in text


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ({"size": [8, 6]}, "None do not sum to 48"),
        ({"size": [8, 6], "counts": "garbage!!"}, "'garbage!!' do not sum to 48"),
        ({"size": [8, 6], "counts": "T"}, "'T' do not sum to 48"),  # ends in the middle of a number
        ({"size": [8, 6], "counts": "\u7ea2"}, "do not sum to 48"),
        ({"size": [8, 6], "counts": [50, -2]}, "[50, -2] do not sum to 48"),
        ({"size": [8, 6], "counts": [24.5, 23.5]}, "[24.5, 23.5] do not sum to 48"),
        ({"size": [8, 6], "counts": [48]}, "or are empty"),
        ({"size": [6, 8], "counts": [0, 48]}, "size [6, 8], not [8, 6]"),
        (None, "no mask"),
        ([[]], "has no polygon of 3 points"),
        ([[1, 1, 2, 2], [1, 2, 3, 4, 5, 6, 7]], "has no polygon of 3 points"),
        ([1, 1, 5, 5, 1, 5], "neither RLE nor a list of polygons"),
        ([[[1, 1], [5, 5], [1, 5]]], "neither RLE nor a list of polygons"),
        ([[1, 1, 5, 5, 1, float("nan")]], "neither RLE nor a list of polygons"),
        ([{"size": [8, 6], "counts": [0, 48]}], "neither RLE nor a list of polygons"),
        ("mask.png", "neither RLE nor a list of polygons"),
    ],
)
def test_an_invalid_mask_is_named(mask: Any, message: str) -> None:
    assert message in find_mask_problem(mask, 6, 8)
