"""Frozen features of a whole data set, on one process or many."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torchvision.models import ResNet

from .. import backbone_file, checkpoint, datasets, distributed, loader, views
from ..common.errors import UserError
from ..encoder import build_backbone, feature_dim, pooled_features


class Features(NamedTuple):
    """features_NF: float32, not normalised; labels_N: int64; num_classes: C."""

    features_NF: Tensor
    labels_N: Tensor
    num_classes: int


class ProbeData(NamedTuple):
    """Labelled images a probe learns from, and those it is scored on."""

    train: datasets.ImageData
    val: datasets.ImageData


def probe_data(cfg: CfgNode) -> ProbeData:
    """The labelled train and val images of DATA.PROBE_TRAIN and DATA.VAL (both default to DATA.TRAIN's own splits).

    Raises:
        UserError: a data set is missing, has no labels, or the two name different classes.
    """
    train_name = cfg.DATA.PROBE_TRAIN or cfg.DATA.TRAIN
    train = datasets.load(train_name, "train", cfg.DATA.ROOT, cfg.DATA.DOWNLOAD)
    val = datasets.load(cfg.DATA.VAL or train_name, "val", cfg.DATA.ROOT, cfg.DATA.DOWNLOAD)
    for name, data in ((train_name, train), (cfg.DATA.VAL or train_name, val)):
        if data.labels is None or not (data.labels >= 0).any():
            raise UserError(f"{name} has no labels to probe with; name labelled data in DATA.PROBE_TRAIN and DATA.VAL")
    same = [data.image_name(0) for data in (train, val)]
    if same[0] == same[1] and len(train) == len(val):
        raise UserError(
            f"{train_name} has no val split of its own: probes would be scored on what they learn from; name "
            "labelled images in DATA.VAL, or make train/ and val/ folders"
        )
    if train.classes != val.classes:
        raise UserError(
            f"{train_name} and {cfg.DATA.VAL or train_name} name different classes; probes need the same ones"
        )
    return ProbeData(train.labelled(), val.labelled())


def load_frozen(weights: str | Path, cfg: CfgNode, device: torch.device) -> tuple[ResNet, dict]:
    """The backbone of a run folder or checkpoint in eval mode, and where it came from.

    Args:
        weights: run folder, checkpoint file, or ``random`` for an untrained network of MODEL.ARCH and MODEL.STEM.
    """
    if str(weights) == "random":
        torch.manual_seed(cfg.SEED)
        backbone, source = build_backbone(cfg.MODEL.ARCH, cfg.MODEL.STEM), {"source": "random", "seed": cfg.SEED}
    else:
        file = backbone_file.load_backbone(checkpoint.resolve(weights), encoder=cfg.LINEAR.ENCODER)
        backbone, source = build_backbone(file.arch, file.stem), file.provenance
        backbone.load_state_dict(file.state_dict, strict=True)
    return backbone.eval().requires_grad_(False).to(device), source


def evaluation_size(cfg: CfgNode) -> tuple[int, int]:
    """(crop, shorter side before it) in pixels; 0 for the second: resize straight to the crop (small data sets)."""
    size = cfg.PROBE.IMAGE_SIZE or cfg.VIEWS.IMAGE_SIZE
    return size, cfg.PROBE.RESIZE or (0 if cfg.MODEL.STEM == "cifar" else round(size * 256 / 224))


def autocast(amp: str, device: torch.device) -> torch.autocast:
    """The precision of SOLVER.AMP: none | bf16 | fp16 (which is chosen where a GPU has no bf16)."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(amp)
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


@torch.no_grad()
def extract(backbone: ResNet, data: datasets.ImageData, cfg: CfgNode, device: torch.device, most: int = 0) -> Features:
    """Features of all labelled images (at most ``most``, evenly spaced; 0: all), gathered from every rank.

    The backbone runs in the mode it is in; pass it in eval mode.
    """
    assert data.labels is not None
    labelled = np.flatnonzero(data.labels >= 0)
    if most and len(labelled) > most:
        labelled = labelled[np.linspace(0, len(labelled) - 1, most).round().astype(int)]
    start, stop = distributed.slice_bounds(len(labelled), distributed.rank(), distributed.world_size())
    size, resize = evaluation_size(cfg)
    rows: list[Tensor] = [torch.empty(0, feature_dim(backbone), device=device)]
    positions: list[Tensor] = [torch.empty(0, dtype=torch.long)]
    mine, corrupt = labelled[start:stop], cfg.DATALOADER.ON_CORRUPT  # skip: unreadable images are left out
    batches = loader.eval_batches(
        data, size, resize, 256, cfg.DATALOADER.NUM_WORKERS, mine, corrupt, device.type == "cuda"
    )
    with autocast(cfg.SOLVER.AMP, device):
        for images, index_N in batches:
            rows.append(pooled_features(backbone, views.normalize(images.to(device, non_blocking=True))).float())
            positions.append(index_N)
    index_N = torch.cat(positions).to(device)
    sizes = distributed.gather(torch.tensor([len(index_N)], device=device), [1] * distributed.world_size()).tolist()
    features, index_N = distributed.gather(torch.cat(rows), sizes), distributed.gather(index_N, sizes)
    return Features(features, torch.from_numpy(data.labels).to(device)[index_N], len(data.classes))
