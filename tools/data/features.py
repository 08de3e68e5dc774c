"""Nearest training image of each test image, by frozen features."""

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torch.nn import functional as F
from torchvision.models import ResNet

from pretrain.config import load_config
from pretrain.data.image_data import ImageData
from pretrain.data.loader import load_eval_batches
from pretrain.probe.features import compute_features, load_frozen
from pretrain.probe.knn import find_nearest

_SIZE = 64  # pixels per side
_THUMBNAIL = 12  # pixels per side, gray
_BATCH = 64  # images
_QUERIES = 256  # test images that are compared at once


def find_nearest_images(train: ImageData, test: ImageData, weights: str) -> tuple[np.ndarray, np.ndarray]:
    """Find the most similar training image of each test image and of its mirror image.

    Features are those of the backbone, next to a gray thumbnail of 12 x 12 pixels, which a random network needs.
    Each part is centered by its mean over all images and normalized. The similarity is the mean of both
    cosines, from -1 to 1.

    Args:
        weights: run folder, checkpoint, or ``random``.

    Returns:
        Similarities (N,) float32 and positions (N,) int64 of training images.
    """
    cfg = load_config(None, ["MODEL.ARCH", "resnet18"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backbone, _ = load_frozen(weights, cfg, device)
    train_parts = _extract(backbone, train, cfg, device, mirror=False)
    test_parts = _extract(backbone, test, cfg, device, mirror=False)
    means = [torch.cat(parts).mean(0) for parts in zip(train_parts, test_parts, strict=True)]
    bank_TF = _join(train_parts, means)
    positions_T = torch.arange(len(train), device=device)
    best_N = torch.full((len(test),), -1.0, device=device)
    nearest_N = torch.zeros(len(test), dtype=torch.long, device=device)
    for parts in (test_parts, _extract(backbone, test, cfg, device, mirror=True)):
        queries_NF = _join(parts, means)
        for chunk_n in torch.arange(len(test), device=device).split(_QUERIES):
            similarity_n1, position_n1 = find_nearest(queries_NF[chunk_n] @ bank_TF.T, positions_T, 1)
            is_better_n = similarity_n1[:, 0] > best_N[chunk_n]
            best_N[chunk_n[is_better_n]] = similarity_n1[is_better_n, 0]
            nearest_N[chunk_n[is_better_n]] = position_n1[is_better_n, 0]
    return best_N.cpu().numpy(), nearest_N.cpu().numpy()


def _join(parts: list[Tensor], means: list[Tensor]) -> Tensor:
    """Return unit vectors (N, F + 144), whose dot product is the mean of the parts' cosines."""
    unit = [F.normalize(part_NF - mean_F, dim=1) for part_NF, mean_F in zip(parts, means, strict=True)]
    return torch.cat(unit, dim=1) / len(parts) ** 0.5


def _extract(backbone: ResNet, data: ImageData, cfg: CfgNode, device: torch.device, mirror: bool) -> list[Tensor]:
    """Return the backbone's features (N, F) and gray thumbnails (N, 144) of all images, or of their mirror images."""
    features: list[Tensor] = []
    thumbnails: list[Tensor] = []
    positions = np.arange(len(data))
    with torch.no_grad():
        batches = load_eval_batches(data, positions, _SIZE, 0, _BATCH, num_workers=0)
        for images, _ in batches:
            pixels = images.flip(3) if mirror else images
            features.append(compute_features(backbone, pixels, cfg, cfg.SOLVER.AMP, device).float())
            gray = pixels.to(device).float().mean(1, keepdim=True)
            thumbnails.append(F.adaptive_avg_pool2d(gray, _THUMBNAIL).flatten(1))
    gray_NP = torch.cat(thumbnails)
    return [torch.cat(features), gray_NP - gray_NP.mean(1, keepdim=True)]
