"""Test images that show a part of a training image, such as overlapping tiles: windows of small gray images."""

import torch
from torch import Tensor
from torch.nn import functional as F

from transfer.distributed import log_progress

_SIDE = 32  # pixels per side of the gray images that are compared
_NEIGHBORHOOD = 7  # pixels per side: of each pixel, the mean around it is subtracted
_STRIP = (26, 14)  # pixels: at the left and the right edge of a test image and, turned, at its top and its bottom
_CORNER = 18  # pixels per side of the windows in its four corners
_TEXTURE = 4.0  # gray levels: windows with a smaller standard deviation, such as sky, equal too many others

Corner = tuple[int, int]  # top and left of a window


def shrink(pixels_NCHW: Tensor) -> Tensor:
    """Return gray images (N, 1, 32, 32) without their coarse structure, which many images share."""
    gray = F.adaptive_avg_pool2d(pixels_NCHW.float().mean(1, keepdim=True), _SIDE)
    return gray - F.avg_pool2d(gray, _NEIGHBORHOOD, 1, _NEIGHBORHOOD // 2, count_include_pad=False)


def find_overlaps(train_N1HW: Tensor, test_N1HW: Tensor, images: int = 64) -> tuple[Tensor, Tensor]:
    """Find the training image that contains a part of each test image.

    Strips along the edges of a test image and its corners are searched for at all places of all training images. Two
    windows are compared by the correlation of their pixels. A pair of images takes a million operations.

    Args:
        train_N1HW, test_N1HW: what `shrink` returns.
        images: how many training images, and test images, are compared at once.

    Returns:
        The highest correlation of each test image, from -1 to 1, and the position of its training image.
    """
    best_N = torch.full((len(test_N1HW),), -1.0, device=test_N1HW.device)
    nearest_N = torch.zeros(len(test_N1HW), dtype=torch.long, device=test_N1HW.device)
    parts = train_N1HW.split(images)
    for number, part_n1HW in enumerate(log_progress(parts, len(parts), "search for overlapping images")):
        correlation_N, position_N = _compare(test_N1HW, part_n1HW, images).max(1)
        is_better_N = correlation_N > best_N
        best_N = torch.where(is_better_N, correlation_N, best_N)
        nearest_N = torch.where(is_better_N, position_N + number * images, nearest_N)
    return best_N, nearest_N


def _compare(test_N1HW: Tensor, train_n1HW: Tensor, images: int) -> Tensor:
    """Return the highest correlation (N, n) of a window of each test image with one of each training image."""
    best_Nn = torch.full((len(test_N1HW), len(train_n1HW)), -1.0, device=test_N1HW.device)
    long, short = _STRIP
    middle = (_SIDE - long) // 2
    end = _SIDE - short
    far = _SIDE - _CORNER
    for height, width, corners in (
        (long, short, [(middle, 0), (middle, end)]),
        (short, long, [(0, middle), (end, middle)]),
        (_CORNER, _CORNER, [(0, 0), (0, far), (far, 0), (far, far)]),
    ):
        everywhere = [(y, x) for y in range(_SIDE - height + 1) for x in range(_SIDE - width + 1)]
        train_LF = _cut(train_n1HW, height, width, everywhere).flatten(0, 1)
        for first in range(0, len(test_N1HW), images):
            windows_LF = _cut(test_N1HW[first : first + images], height, width, corners).flatten(0, 1)
            correlations = (windows_LF @ train_LF.T).unflatten(0, (-1, len(corners))).amax(1)
            highest = correlations.unflatten(1, (-1, len(everywhere))).amax(2)
            best_Nn[first : first + images] = torch.maximum(best_Nn[first : first + images], highest)
    return best_Nn


def _cut(gray_N1HW: Tensor, height: int, width: int, corners: list[Corner]) -> Tensor:
    """Return windows (N, L, F) of F pixels with mean 0 and norm 1; windows without texture are 0."""
    parts = [gray_N1HW[:, 0, y : y + height, x : x + width].flatten(1) for y, x in corners]
    windows = torch.stack(parts, 1)
    windows = windows - windows.mean(2, keepdim=True)
    norms = windows.norm(dim=2, keepdim=True)
    has_texture = norms >= _TEXTURE * (height * width) ** 0.5
    return torch.where(has_texture, windows / norms.clamp_min(1e-6), 0.0)
