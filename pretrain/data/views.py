r"""Draws the random choices of a view by its recipe, and makes it.

A view is drawn in two parts: a box of the image with a flip, and color operations with their values, in order. A color
operation works in place on a contiguous (S, S, 3) uint8 image and rounds as PIL does.

Shape letters: V views, H x W pixels of the image read, S x S of a view.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.transforms import AutoAugment, AutoAugmentPolicy

from .recipes import Blur, CenterCrop, Jitter, PadCrop, RandomResizedCrop, Recipe

Operation = tuple[Callable[[np.ndarray, float], None], float]  # and its value


def brightness(image: np.ndarray, factor: float) -> None:
    cv2.convertScaleAbs(image, dst=image, alpha=factor)


def contrast(image: np.ndarray, factor: float) -> None:
    mean = math.floor(cv2.mean(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY))[0] + 0.5)  # a whole number in PIL too
    cv2.addWeighted(image, factor, image, 0, mean * (1 - factor), dst=image)


def saturation(image: np.ndarray, factor: float) -> None:
    gray = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    cv2.addWeighted(image, factor, gray, 1 - factor, 0, dst=image)


def hue(image: np.ndarray, turn: float) -> None:
    hsv = cv2.cvtColor(image.astype(np.float32), cv2.COLOR_RGB2HSV)  # 8-bit hue would be off by up to 3 levels
    hsv[..., 0] += 360 * (turn % 1)  # OpenCV takes any angle above 0
    cv2.convertScaleAbs(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB), dst=image)


def gray(image: np.ndarray, _value: float) -> None:
    cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB, dst=image)


def blur(image: np.ndarray, sigma: float) -> None:
    radius = math.ceil(3 * sigma)  # as in Pillow, the view's size does not limit it
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    kernel = (weights / weights.sum()).astype(np.float32)
    cv2.sepFilter2D(image, -1, kernel, kernel, dst=image, borderType=cv2.BORDER_REPLICATE)


class ViewParams(NamedTuple):
    """The random choices of one view."""

    box: tuple[int, int, int, int]  # (top, left, height, width) of the image read, in its pixels
    flip: bool
    offset: tuple[int, int] | None  # PadCrop's (top, left) in the padded view
    policy: tuple[int, Tensor, Tensor] | None  # AutoAugment's (policy, probabilities, signs)
    colors: list[Operation]  # in order


def draw(recipe: Recipe, height: int, width: int, rng: np.random.Generator) -> ViewParams:
    """Draws a view's random choices for an image of ``height`` x ``width`` pixels."""
    box, offset = (0, 0, height, width), None
    if isinstance(recipe.crop, RandomResizedCrop):
        box = _random_box(recipe.crop, height, width, rng)
    elif isinstance(recipe.crop, PadCrop):
        offset = _below(rng, 2 * recipe.crop.padding + 1), _below(rng, 2 * recipe.crop.padding + 1)
    flip = recipe.flip > 0 and rng.random() < recipe.flip
    policy = None
    if recipe.policy:
        probabilities = torch.from_numpy(rng.random(2))
        policy = (_below(rng, 25), probabilities, torch.tensor([_below(rng, 2), _below(rng, 2)]))
    colors: list[Operation] = []
    for color in recipe.colors:
        if color.p < 1 and rng.random() >= color.p:
            continue
        if isinstance(color, Jitter):
            colors += _draw_jitter(color, rng)
        else:
            colors.append((blur, _uniform(rng, *color.sigma)) if isinstance(color, Blur) else (gray, 0.0))
    return ViewParams(box, flip, offset, policy, [(operation, float(np.float32(value))) for operation, value in colors])


def make_views(
    image: np.ndarray, recipes: Sequence[Recipe], size: int, rng_of_view: Callable[[int], np.random.Generator]
) -> np.ndarray:
    """All views of an image.

    Args:
        image: (H, W, 3) uint8.
        recipes: one per view.
        size: S, pixels per side of a view.
        rng_of_view: the random stream of a view by its number.

    Returns:
        (V, S, S, 3) uint8.
    """
    views = np.empty((len(recipes), size, size, 3), np.uint8)
    for v, recipe in enumerate(recipes):
        drawn = draw(recipe, image.shape[0], image.shape[1], rng_of_view(v))
        view = _cut(image, recipe, drawn, size)
        if drawn.flip:
            cv2.flip(view, 1, dst=views[v])
        else:
            views[v] = view
        if drawn.policy:
            policy = _Policy(AutoAugmentPolicy(recipe.policy))
            policy.drawn = drawn.policy
            views[v] = np.asarray(policy(Image.fromarray(views[v])))
        for operation, value in drawn.colors:
            operation(views[v], value)
    return views


def resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """(H, W, 3) uint8 -> (height, width, 3), bilinear with antialiasing: Pillow's filter, by torch's vector code."""
    if image.shape[:2] == (height, width):
        return image
    pixels = torch.from_numpy(image)[None].permute(0, 3, 1, 2)  # to torch, channels_last: its fast path
    resized = F.interpolate(pixels, (height, width), mode="bilinear", antialias=True, align_corners=False)
    return resized.permute(0, 2, 3, 1).contiguous()[0].numpy()


def center_view(image: np.ndarray, size: int, shorter_side: int) -> np.ndarray:
    """The evaluation view (S, S, 3): shorter side to ``shorter_side`` >= S pixels, then the middle; 0: all of it."""
    if not shorter_side:
        return resize(image, size, size)
    height, width = image.shape[:2]
    shorter = min(height, width)
    image = resize(image, int(shorter_side * height / shorter), int(shorter_side * width / shorter))
    top, left = round((image.shape[0] - size) / 2), round((image.shape[1] - size) / 2)
    return image[top : top + size, left : left + size]


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(..., 3, S, S) uint8 -> float32, contiguous: (x / 255 - mean) / std per channel, on the images' device.

    Args:
        mean: of the RGB channels, from 0 to 1 (VIEWS.MEAN); ``std`` likewise.
    """
    scale, shift = _normalization(tuple(mean), tuple(std), images.device)
    x = images.to(torch.float32, memory_format=torch.contiguous_format)
    return x.mul_(scale).add_(shift)


@functools.lru_cache(maxsize=16)
def _normalization(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    mean_3, std_3 = torch.tensor(mean, device=device), torch.tensor(std, device=device)
    return (1 / (255 * std_3)).view(3, 1, 1), (-mean_3 / std_3).view(3, 1, 1)


class _Policy(AutoAugment):
    """torchvision's AutoAugment, with our random choices in place of torch's global stream."""

    drawn: tuple[int, Tensor, Tensor]

    def get_params(self, transform_num: int) -> tuple[int, Tensor, Tensor]:  # pyright: ignore
        return self.drawn


def _cut(image: np.ndarray, recipe: Recipe, drawn: ViewParams, size: int) -> np.ndarray:
    if isinstance(recipe.crop, CenterCrop):
        return center_view(image, size, size)
    top, left, height, width = drawn.box
    view = resize(image[top : top + height, left : left + width], size, size)
    if drawn.offset and isinstance(recipe.crop, PadCrop):
        pad = recipe.crop.padding
        view = cv2.copyMakeBorder(view, pad, pad, pad, pad, cv2.BORDER_CONSTANT)
        view = view[drawn.offset[0] : drawn.offset[0] + size, drawn.offset[1] : drawn.offset[1] + size]
    return view


def _random_box(
    crop: RandomResizedCrop, height: int, width: int, rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """torchvision's rule: ten tries, then the largest central box of an allowed aspect ratio."""
    low, high = math.log(crop.ratio[0]), math.log(crop.ratio[1])
    for _ in range(10):
        area = height * width * _uniform(rng, *crop.scale)
        ratio = math.exp(_uniform(rng, low, high))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return _below(rng, height - h + 1), _below(rng, width - w + 1), h, w
    w = min(width, round(height * crop.ratio[1]))
    h = min(height, round(width / crop.ratio[0]))
    return (height - h) // 2, (width - w) // 2, h, w


def _draw_jitter(jitter: Jitter, rng: np.random.Generator) -> list[Operation]:
    strengths = ((brightness, jitter.brightness), (contrast, jitter.contrast), (saturation, jitter.saturation))
    rows: list[Operation] = [(op, _uniform(rng, max(0.0, 1 - x), 1 + x)) for op, x in strengths if x]
    if jitter.hue:
        rows.append((hue, _uniform(rng, -jitter.hue, jitter.hue)))
    for i in range(len(rows) - 1, 0, -1):  # Fisher-Yates; for so few rows cheaper than rng.permutation
        j = _below(rng, i + 1)
        rows[i], rows[j] = rows[j], rows[i]
    return rows


def _uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return low + (high - low) * rng.random()  # a quarter of the cost of rng.uniform


def _below(rng: np.random.Generator, count: int) -> int:
    return int(rng.random() * count)
