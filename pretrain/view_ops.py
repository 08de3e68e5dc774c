"""The color operations of a view: one image on the CPU (OpenCV), or a batch on any device (torch).

Both work on 8-bit images and round after every operation, as PIL's do, so they agree within rounding. A program is
(L, 2) float32: rows of (operation, value), run in order; operation 0 does nothing.

Shape letters: V views, N images, B images of a part of a batch, S x S pixels, L operations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .common.copies import to_device

BRIGHTNESS, CONTRAST, SATURATION, HUE, GRAY, BLUR = 1.0, 2.0, 3.0, 4.0, 5.0, 6.0
_LUMA = (0.299, 0.587, 0.114)
_PART = 256  # images that the device processes at once; bounds the memory for float copies


def run_program(image: np.ndarray, program: np.ndarray) -> None:
    """Runs a program on a contiguous (S, S, 3) uint8 image, in place."""
    for op, value in program.tolist():
        if op:
            _ON_CPU[op](image, value)


def _brightness(image: np.ndarray, factor: float) -> None:
    cv2.convertScaleAbs(image, dst=image, alpha=factor)


def _contrast(image: np.ndarray, factor: float) -> None:
    mean = math.floor(cv2.mean(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY))[0] + 0.5)  # a whole number in PIL too
    cv2.addWeighted(image, factor, image, 0, mean * (1 - factor), dst=image)


def _saturation(image: np.ndarray, factor: float) -> None:
    gray = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    cv2.addWeighted(image, factor, gray, 1 - factor, 0, dst=image)


def _hue(image: np.ndarray, turn: float) -> None:
    hsv = cv2.cvtColor(image.astype(np.float32), cv2.COLOR_RGB2HSV)  # 8-bit hue would be off by up to 3 levels
    hsv[..., 0] += 360 * (turn % 1)  # OpenCV takes any angle above 0
    cv2.convertScaleAbs(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB), dst=image)


def _gray(image: np.ndarray, _value: float) -> None:
    cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB, dst=image)


def _blur(image: np.ndarray, sigma: float) -> None:
    kernel = _gaussian(sigma, blur_radius(sigma))
    cv2.sepFilter2D(image, -1, kernel, kernel, dst=image, borderType=cv2.BORDER_REPLICATE)


_ON_CPU: dict[float, Callable[[np.ndarray, float], None]] = {
    BRIGHTNESS: _brightness, CONTRAST: _contrast, SATURATION: _saturation, HUE: _hue, GRAY: _gray, BLUR: _blur,
}  # fmt: skip


def blur_radius(sigma: float) -> int:
    """Pixels on each side of the kernel's center: 3 sigma. As in Pillow, the view's size does not limit it."""
    return math.ceil(3 * sigma)


def _gaussian(sigma: float, radius: int) -> np.ndarray:
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    return (weights / weights.sum()).astype(np.float32)


def finish(images: Tensor, programs: Tensor | None) -> Tensor:
    """Runs every view's program on the images' device, in batches.

    Args:
        images: (V, N, 3, S, S) uint8, any strides.
        programs: (V, N, L, 2) float32, preferably on the CPU (its values decide what runs); None: nothing to do.

    Returns:
        (V, N, 3, S, S) uint8, contiguous; ``images`` is not changed.
    """
    if programs is None:
        return images.contiguous()
    finished = images.clone(memory_format=torch.contiguous_format)
    flat, rows = finished.flatten(0, 1), programs.cpu().flatten(0, 1)
    for start in range(0, len(flat), _PART):
        part, part_rows = flat[start : start + _PART], rows[start : start + _PART]
        for slot in range(part_rows.shape[1]):
            ops, values = part_rows[:, slot, 0], part_rows[:, slot, 1]
            for op, apply in _ON_DEVICE.items():
                which = torch.nonzero(ops == op)[:, 0]
                if len(which):
                    index = to_device(which, part.device)
                    x = apply(part[index].float(), values[which])
                    part[index] = x.round_().clamp_(0, 255).to(torch.uint8)
    return finished


def _column(values: Tensor, like: Tensor) -> Tensor:
    return to_device(values, like.device).view(-1, 1, 1, 1)


def _luma(x: Tensor) -> Tensor:
    return (x[:, :1] * _LUMA[0] + x[:, 1:2] * _LUMA[1] + x[:, 2:] * _LUMA[2]).round_()


def _batch_brightness(x: Tensor, factors: Tensor) -> Tensor:
    return x * _column(factors, x)


def _batch_contrast(x: Tensor, factors: Tensor) -> Tensor:
    mean = (_luma(x).mean(dim=(1, 2, 3), keepdim=True) + 0.5).floor_()
    return torch.lerp(mean, x, _column(factors, x))


def _batch_saturation(x: Tensor, factors: Tensor) -> Tensor:
    return torch.lerp(_luma(x), x, _column(factors, x))


def _batch_hue(x: Tensor, turns: Tensor) -> Tensor:
    r, g, b = x.unbind(1)
    value = x.amax(1)
    chroma = value - x.amin(1)
    safe = chroma.clamp(min=1)  # levels are whole numbers: below 1 it is 0, and the color is gray
    sixths = torch.where(value == r, (g - b) / safe, torch.where(value == g, 2 + (b - r) / safe, 4 + (r - g) / safe))
    sixths = sixths + 6 * _column(turns, x)[:, 0]
    channels = [(n + sixths) % 6 for n in (5, 3, 1)]
    return torch.stack([value - chroma * torch.minimum(k, 4 - k).clamp_(0, 1) for k in channels], dim=1)


def _batch_gray(x: Tensor, _values: Tensor) -> Tensor:
    return _luma(x).expand_as(x).clone()


def _batch_blur(x: Tensor, sigmas: Tensor) -> Tensor:
    size = x.shape[-1]
    radii = [blur_radius(sigma) for sigma in sigmas.tolist()]
    radius = max(radii)
    kernels = np.zeros((len(radii), 2 * radius + 1), np.float32)
    for row, sigma, r in zip(kernels, sigmas.tolist(), radii, strict=True):
        row[radius - r : radius + r + 1] = _gaussian(sigma, r)
    weights = to_device(torch.from_numpy(kernels), x.device)[:, :, None, None, None]
    x = F.pad(x, (radius, radius, radius, radius), mode="replicate")
    x = functools.reduce(torch.add, (x[..., k : k + size] * weights[:, k] for k in range(2 * radius + 1)))
    return functools.reduce(torch.add, (x[:, :, k : k + size] * weights[:, k] for k in range(2 * radius + 1)))


_ON_DEVICE: dict[float, Callable[[Tensor, Tensor], Tensor]] = {
    BRIGHTNESS: _batch_brightness, CONTRAST: _batch_contrast, SATURATION: _batch_saturation, HUE: _batch_hue,
    GRAY: _batch_gray, BLUR: _batch_blur,
}  # fmt: skip
