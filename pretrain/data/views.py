"""Samples the random parameters of a view by its augmentation, and applies them.

A view has two parts: a box of the image with a flip, and color operations with their values, in order.

Shape letters: V views, H x W pixels of the image read, S x S of a view.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator
from PIL import Image
from torch import Tensor
from torchvision.transforms import AutoAugment, AutoAugmentPolicy

from .augmentations import Augmentation, CenterCrop, Operation, PadCrop, RandomResizedCrop, randint, uniform


class ViewParams(NamedTuple):
    """Random parameters of one view."""

    box: tuple[int, int, int, int]  # (top, left, height, width) of the image read, in its pixels
    flip: bool
    offset: tuple[int, int] | None  # PadCrop's (top, left) in the padded view
    policy: tuple[int, Tensor, Tensor] | None  # AutoAugment's (policy, probabilities, signs)
    colors: list[Operation]  # in order


def sample_params(augmentation: Augmentation, height: int, width: int, rng: Generator) -> ViewParams:
    """Sample a view's random parameters for an image of ``height`` x ``width`` pixels."""
    box = (0, 0, height, width)
    offset = None
    if isinstance(augmentation.crop, RandomResizedCrop):
        box = _sample_box(augmentation.crop, height, width, rng)
    elif isinstance(augmentation.crop, PadCrop):
        count = 2 * augmentation.crop.padding + 1
        offset = (randint(rng, count), randint(rng, count))
    flip = augmentation.flip > 0 and rng.random() < augmentation.flip
    policy = None
    if augmentation.policy:
        probabilities = torch.from_numpy(rng.random(2))
        policy = (randint(rng, 25), probabilities, torch.tensor([randint(rng, 2), randint(rng, 2)]))
    colors: list[Operation] = []
    for color in augmentation.colors:
        if color.p >= 1 or rng.random() < color.p:
            colors += color.sample(rng)
    rounded = [(operation, float(np.float32(value))) for operation, value in colors]
    return ViewParams(box, flip, offset, policy, rounded)


def make_views(
    image: np.ndarray, augmentations: Sequence[Augmentation], size: int, view_rng: Callable[[int], Generator]
) -> np.ndarray:
    """Make all views of an image.

    Args:
        image: (H, W, 3) uint8.
        augmentations: one per view.
        size: S, pixels per side of a view.
        view_rng: returns the random stream of a view from its number.

    Returns:
        (V, S, S, 3) uint8.
    """
    views = np.empty((len(augmentations), size, size, 3), np.uint8)
    for v, augmentation in enumerate(augmentations):
        params = sample_params(augmentation, image.shape[0], image.shape[1], view_rng(v))
        view = _crop(image, augmentation, params, size)
        if params.flip:
            cv2.flip(view, 1, dst=views[v])
        else:
            views[v] = view
        if params.policy:
            policy = _Policy(AutoAugmentPolicy(augmentation.policy))
            policy.params = params.policy
            views[v] = np.asarray(policy(Image.fromarray(views[v])))
        for operation, value in params.colors:
            operation(views[v], value)
    return views


def resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize (H, W, 3) uint8 to (height, width, 3), bilinear with antialiasing: Pillow's filter, in torch's code."""
    if image.shape[:2] == (height, width):
        return image
    pixels = torch.from_numpy(image)[None].permute(0, 3, 1, 2)  # to torch, channels_last: its fast path
    resized = F.interpolate(pixels, (height, width), mode="bilinear", antialias=True, align_corners=False)
    return resized.permute(0, 2, 3, 1).contiguous()[0].numpy()


def choose_reduction(augmentations: Sequence[Augmentation], size: int, height: int, width: int) -> int:
    """Return the largest of 1, 2, 4 and 8 by which an image can be reduced so that no crop is enlarged to a view.

    Args:
        augmentations: one per view.
        size: S, pixels per side of a view.
        height: of the image, as ``width``.
    """
    for reduction in (8, 4, 2):
        reduced_height = math.ceil(height / reduction)
        reduced_width = math.ceil(width / reduction)
        sides = [_compute_smallest_side(a.crop, reduced_height, reduced_width) for a in augmentations]
        if min(sides) >= size:
            return reduction
    return 1


def _compute_smallest_side(crop: RandomResizedCrop | PadCrop | CenterCrop, height: int, width: int) -> float:
    """Return the shorter side of the smallest crop of an image: `_sample_box` returns a random or the central box."""
    shorter = min(height, width)
    if not isinstance(crop, RandomResizedCrop):
        return shorter  # of the whole image
    low, high = crop.ratio
    smallest_area = height * width * crop.scale[0]
    return min(math.sqrt(smallest_area * min(low, 1 / high)), shorter * min(1, high, 1 / low))


def make_center_view(image: np.ndarray, size: int, shorter_side: int) -> np.ndarray:
    """Return the evaluation view (S, S, 3): shorter side resized to ``shorter_side`` >= S pixels, then the middle.

    ``shorter_side`` 0 means that the whole image is resized to S x S.
    """
    if not shorter_side:
        return resize(image, size, size)
    height, width = image.shape[:2]
    shorter = min(height, width)
    image = resize(image, int(shorter_side * height / shorter), int(shorter_side * width / shorter))
    top = round((image.shape[0] - size) / 2)
    left = round((image.shape[1] - size) / 2)
    return image[top : top + size, left : left + size]


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Normalize (..., 3, S, S) uint8 to contiguous float32, (x / 255 - mean) / std per channel, on the images' device.

    Args:
        mean: VIEWS.MEAN, from 0 to 1; ``std`` likewise.
    """
    return build_normalization(tuple(mean), tuple(std), images.device)(images)


class Normalization:
    """`normalize` with its channels' scale and shift on a device."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        mean_3 = torch.tensor(mean, device=device)
        std_3 = torch.tensor(std, device=device)
        self._scale = (1 / (255 * std_3)).view(3, 1, 1)
        self._shift = (-mean_3 / std_3).view(3, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        """Normalize (..., 3, S, S) uint8 images on the device."""
        x = images.to(torch.float32, memory_format=torch.contiguous_format)
        return x.mul_(self._scale).add_(self._shift)


build_normalization = functools.lru_cache(maxsize=16)(Normalization)


class _Policy(AutoAugment):
    """torchvision's AutoAugment with our random parameters instead of torch's global stream."""

    params: tuple[int, Tensor, Tensor]

    def get_params(self, transform_num: int) -> tuple[int, Tensor, Tensor]:  # pyright: ignore
        return self.params


def _crop(image: np.ndarray, augmentation: Augmentation, params: ViewParams, size: int) -> np.ndarray:
    if isinstance(augmentation.crop, CenterCrop):
        return make_center_view(image, size, size)
    top, left, height, width = params.box
    view = resize(image[top : top + height, left : left + width], size, size)
    if params.offset and isinstance(augmentation.crop, PadCrop):
        pad = augmentation.crop.padding
        top, left = params.offset
        view = cv2.copyMakeBorder(view, pad, pad, pad, pad, cv2.BORDER_CONSTANT)[top : top + size, left : left + size]
    return view


def _sample_box(crop: RandomResizedCrop, height: int, width: int, rng: Generator) -> tuple[int, int, int, int]:
    """Sample a box by torchvision's rule: ten tries, then the largest central box of an allowed aspect ratio."""
    low, high = map(math.log, crop.ratio)
    for _ in range(10):
        area = height * width * uniform(rng, *crop.scale)
        ratio = math.exp(uniform(rng, low, high))
        w = round(math.sqrt(area * ratio))
        h = round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return randint(rng, height - h + 1), randint(rng, width - w + 1), h, w
    w = min(width, round(height * crop.ratio[1]))
    h = min(height, round(width / crop.ratio[0]))
    return (height - h) // 2, (width - w) // 2, h, w
