"""Frozen features of a whole data set, computed by one process or several."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torchvision.models import ResNet

from ..common import distributed
from ..common.device import autocast, choose_memory_format
from ..common.distributed import gather_objects
from ..common.errors import UserError
from ..common.ranks.agreement import AgreedStop, check_agreement, on_every_rank
from ..common.weights.backbone import read_backbone
from ..common.weights.provenance import Provenance
from ..data import loader, views
from ..data.datasets import ImageData
from ..model.encoder import build_backbone, count_channels, pool_features
from .protocol import choose_evaluation_size

_BATCH = 256  # images


class NotFinite(UserError):
    """Features of which no score can be computed."""


class Features(NamedTuple):
    """Features of labeled images."""

    features_NF: Tensor  # float32, not normalized
    labels_N: Tensor  # int64
    num_classes: int


def load_frozen(weights: str | Path, cfg: CfgNode, device: torch.device) -> tuple[ResNet, dict[str, Any]]:
    """Load the backbone of a run folder or checkpoint, in eval mode and the same on every rank, and its provenance.

    Args:
        weights: run folder, checkpoint file, or ``random`` for an untrained network of MODEL.ARCH and MODEL.STEM.

    Raises:
        UserError: the file is missing or damaged, contains no backbone, or one of other pixel statistics than VIEWS.
    """
    if str(weights) == "random":
        torch.manual_seed(cfg.SEED)
        backbone = build_backbone(cfg.MODEL.ARCH, cfg.MODEL.STEM)
        source = Provenance.random(cfg.MODEL.ARCH, cfg.MODEL.STEM, cfg.SEED)
    else:
        file = on_every_rank(read_backbone, weights, cfg.LINEAR.ENCODER)
        check_agreement(file.provenance.sha256, f"the content (SHA-256) of {weights}")
        source = file.provenance
        problem = source.input.compare_statistics(cfg.VIEWS.MEAN, cfg.VIEWS.STD) if source.input else ""
        if problem:
            raise UserError(f"{weights} was pretrained with other pixel statistics: {problem}")
        backbone = build_backbone(file.arch, file.stem)
        backbone.load_state_dict(file.state_dict, strict=True)
    memory_format: Any = choose_memory_format(cfg.SOLVER.AMP, device.type)
    return backbone.eval().requires_grad_(False).to(device).to(memory_format=memory_format), source.to_json()


def compute_features(backbone: ResNet, images: Tensor, cfg: CfgNode, amp: str, device: torch.device) -> Tensor:
    """Return the features (n, F) of uint8 images (n, 3, S, S), in half precision unless ``amp`` is none."""
    pixels = views.normalize(images.to(device, non_blocking=True), cfg.VIEWS.MEAN, cfg.VIEWS.STD)
    with autocast(amp, device.type):
        return pool_features(backbone, pixels)


@torch.no_grad()
def extract(
    backbone: ResNet,
    data: ImageData,
    cfg: CfgNode,
    stop: AgreedStop,
    device: torch.device,
    max_images: int = 0,
    gather: bool = True,
) -> Features:
    """Compute the features of all labeled images, divided among the ranks.

    Args:
        backbone: in eval mode.
        max_images: use at most this many images, evenly spaced; 0 means all.
        gather: Return the features of all images, not only of this rank's.

    Raises:
        NotFinite: the features of an image are not finite.
        Stopped: a rank was asked to stop.
    """
    assert data.labels is not None
    positions = select_evenly(np.flatnonzero(data.labels >= 0), max_images)
    features_NF, index_N = extract_features(backbone, data, positions, cfg, stop, device)
    if not all(gather_objects(bool(features_NF.sum(1).isfinite().all()))):
        remedy = "set SOLVER.AMP none" if cfg.SOLVER.AMP == "fp16" else "use an earlier checkpoint"
        raise NotFinite(f"the features of some images of {data.name} are not finite; {remedy}")
    labels_N = torch.from_numpy(data.labels).to(device)[index_N.to(device)]
    if gather:
        labels_N = distributed.gather_uneven(labels_N)
        features_NF = distributed.gather_uneven(features_NF)
    return Features(features_NF, labels_N, len(data.classes))


@torch.no_grad()
def extract_features(
    backbone: ResNet, data: ImageData, positions: np.ndarray, cfg: CfgNode, stop: AgreedStop, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Compute the features of this rank's slice of the images at ``positions``.

    Args:
        backbone: in eval mode.

    Returns:
        (N, F) float32 on the device, and the images' positions (N,) int64 on the host, without unreadable images that
        DATALOADER.ON_CORRUPT skips.
    """
    positions = positions[distributed.rank_slice(len(positions))]
    index_N = [torch.empty(0, dtype=torch.long)]
    features_NF = torch.empty(len(positions), count_channels(backbone), device=device)  # ImageNet's take 10 GB
    start = 0
    options = (cfg.DATALOADER.NUM_WORKERS, cfg.DATALOADER.ON_CORRUPT, device.type == "cuda", stop.request)
    batches = loader.load_eval_batches(data, positions, *choose_evaluation_size(cfg), _BATCH, *options)
    for _ in range(0, max(gather_objects(len(positions))), _BATCH):  # the same number of times on every rank
        batch = next(batches, None)
        if batch is not None:
            images, index_n = batch
            index_N.append(index_n)
            features_nF = compute_features(backbone, images, cfg, cfg.SOLVER.AMP, device)
            features_NF[start : start + len(images)] = features_nF
            start += len(images)
        stop.raise_if_requested()
    return features_NF[:start], torch.cat(index_N)


def select_evenly(positions: np.ndarray, most: int) -> np.ndarray:
    """Return at most ``most`` of the positions, evenly spaced; 0 means all."""
    if not most or len(positions) <= most:
        return positions
    return positions[np.linspace(0, len(positions) - 1, most).round().astype(int)]
