"""Nearest training image of each test image, by frozen features and by parts that both show."""

from typing import Any, NamedTuple

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torch.nn import functional as F
from torchvision.models import ResNet

from pretrain.common.weights.backbone import read_backbone
from pretrain.config import load_config
from pretrain.data.image_data import ImageData
from pretrain.data.loader import load_eval_batches
from pretrain.probe.features import compute_features, load_frozen
from pretrain.probe.knn import find_nearest
from pretrain.probe.transform import build_transform

from .overlaps import find_overlaps, shrink

_SIZE = 64  # pixels per side
_THUMBNAIL = 12  # pixels per side, gray
_BATCH = 64  # images
_QUERIES = 256  # test images that are compared at once


class Nearest(NamedTuple):
    """The most similar training image of each of N test images, and the one that contains a part of it.

    Attributes:
        similarity: (N,) float32, from -1 to 1.
        position: (N,) int64, of that training image.
        overlap: (N,) float32, the correlation of the part, from -1 to 1.
        overlap_position: (N,) int64.
    """

    similarity: np.ndarray
    position: np.ndarray
    overlap: np.ndarray
    overlap_position: np.ndarray


def find_nearest_images(train: ImageData, test: ImageData, weights: str) -> Nearest:
    """Find the most similar training image of each test image and of its mirror image, and overlapping images.

    Features are those of the backbone, next to a gray thumbnail of 12 x 12 pixels, which a random network needs.
    Each part is centered by its mean over all images and normalized. The similarity is the mean of both
    cosines, from -1 to 1. Parts are found by `overlaps`.

    Args:
        weights: run folder, checkpoint, or ``random``.
    """
    words: list[Any] = ["MODEL.ARCH", "resnet18"]
    if weights != "random":
        transform = build_transform(read_backbone(weights))
        words += ["VIEWS.MEAN", list(transform.mean), "VIEWS.STD", list(transform.std)]
    cfg = load_config(None, words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backbone, _ = load_frozen(weights, cfg, device)
    train_gray, *train_parts = _extract(backbone, train, cfg, device, mirror=False)
    test_gray, *test_parts = _extract(backbone, test, cfg, device, mirror=False)
    means = [torch.cat(parts).mean(0) for parts in zip(train_parts, test_parts, strict=True)]
    bank_TF = _join(train_parts, means)
    positions_T = torch.arange(len(train), device=device)
    best_N = torch.full((len(test),), -1.0, device=device)
    nearest_N = torch.zeros(len(test), dtype=torch.long, device=device)
    for parts in (test_parts, _extract(backbone, test, cfg, device, mirror=True)[1:]):
        queries_NF = _join(parts, means)
        for chunk_n in torch.arange(len(test), device=device).split(_QUERIES):
            similarity_n1, position_n1 = find_nearest(queries_NF[chunk_n] @ bank_TF.T, positions_T, 1)
            is_better_n = similarity_n1[:, 0] > best_N[chunk_n]
            best_N[chunk_n[is_better_n]] = similarity_n1[is_better_n, 0]
            nearest_N[chunk_n[is_better_n]] = position_n1[is_better_n, 0]
    overlap_N, overlap_position_N = find_overlaps(train_gray, test_gray)
    return Nearest(*(x.cpu().numpy() for x in (best_N, nearest_N, overlap_N, overlap_position_N)))


def _join(parts: list[Tensor], means: list[Tensor]) -> Tensor:
    """Return unit vectors (N, F + 144), whose dot product is the mean of the parts' cosines."""
    unit = [F.normalize(part_NF - mean_F, dim=1) for part_NF, mean_F in zip(parts, means, strict=True)]
    return torch.cat(unit, dim=1) / len(parts) ** 0.5


def _extract(backbone: ResNet, data: ImageData, cfg: CfgNode, device: torch.device, mirror: bool) -> list[Tensor]:
    """Return small gray images (N, 1, 32, 32), the backbone's features (N, F) and gray thumbnails (N, 144).

    Args:
        mirror: return those of the mirror images.
    """
    small: list[Tensor] = []
    features: list[Tensor] = []
    thumbnails: list[Tensor] = []
    positions = np.arange(len(data))
    with torch.no_grad():
        batches = load_eval_batches(data, positions, _SIZE, 0, _BATCH, num_workers=0)
        for images, _ in batches:
            pixels = images.flip(3) if mirror else images
            features.append(compute_features(backbone, pixels, cfg, cfg.SOLVER.AMP, device).float())
            small.append(shrink(pixels.to(device)))
            gray = pixels.to(device).float().mean(1, keepdim=True)
            thumbnails.append(F.adaptive_avg_pool2d(gray, _THUMBNAIL).flatten(1))
    gray_NP = torch.cat(thumbnails)
    return [torch.cat(small), torch.cat(features), gray_NP - gray_NP.mean(1, keepdim=True)]
