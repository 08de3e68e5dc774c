"""Frozen features of a whole data set, on one process or several."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, cast

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torchvision.models import ResNet

from .. import datasets, distributed, loader, views
from ..common import backbone_file, checkpoint
from ..common.errors import UserError
from ..common.interrupt import Stopped
from ..common.process_group import AgreedStop, gather_objects, on_every_rank, on_first_rank, refuse_disagreement
from ..encoder import build_backbone, build_head, feature_dim, head_from, pooled_features
from ..shares import slice_bounds
from ..siamese import autocast
from .protocol import evaluation_size

_BATCH = 256  # images


class Features(NamedTuple):
    """features_NF: float32, not normalized; labels_N: int64; num_classes: C."""

    features_NF: Tensor
    labels_N: Tensor
    num_classes: int


def load_frozen(
    weights: str | Path, cfg: CfgNode, device: torch.device, with_head: bool = False
) -> tuple[ResNet, dict[str, Any]]:
    """The backbone of a run folder or checkpoint in eval mode, and where it came from; the same on every rank.

    Args:
        weights: run folder, checkpoint file, or ``random`` for an untrained network of MODEL.ARCH and MODEL.STEM.
        with_head: keep the projection head, so that the network's output is the embedding, not the feature.

    Raises:
        UserError: the file is missing or damaged, holds no backbone, or no head where one is asked for.
    """
    if str(weights) == "random":
        torch.manual_seed(cfg.SEED)
        backbone, model = build_backbone(cfg.MODEL.ARCH, cfg.MODEL.STEM), cfg.MODEL
        if with_head:
            head = build_head(feature_dim(backbone), model.HEAD_HIDDEN_DIMS, model.EMBEDDING_DIM, model.HEAD_BN)
            backbone.fc = cast(Any, head)
        source = {"source": "random", "seed": cfg.SEED, "arch": cfg.MODEL.ARCH, "stem": cfg.MODEL.STEM}
    else:
        path = on_first_rank(lambda: checkpoint.resolve(weights))
        file = on_every_rank(lambda: backbone_file.load_backbone(path, encoder=cfg.LINEAR.ENCODER))
        refuse_disagreement(file.provenance["source_sha256"], f"the content (SHA-256) of {path}")
        backbone, source = build_backbone(file.arch, file.stem), file.provenance
        backbone.load_state_dict(file.state_dict, strict=True)
        if with_head:
            try:
                backbone.fc = cast(Any, head_from(file.head))
            except UserError as error:
                raise UserError(f"{path}: {error}; compare features instead (PROBE.SPACE features)") from error
    return backbone.eval().requires_grad_(False).to(device), source


@dataclass(frozen=True)
class FeatureFile:
    """Where a rank keeps the features it has computed, so that a resumed probe does not compute them again.

    Attributes:
        path: of this rank's file.
        made_from: backbone and protocol; features made from others are ignored.
        warn: takes a line where the file cannot be read or written; the probe continues without it.
    """

    path: Path
    made_from: dict[str, Any]
    warn: Callable[[str], None]

    def load(self, mine: np.ndarray, width: int) -> tuple[int, Tensor, Tensor] | None:
        """(images done, their positions, features (N, width)) of the images at ``mine``; None: there are none."""
        if not self.path.is_file():
            return None
        try:
            found = checkpoint.read(self.path)
        except UserError as error:
            self.warn(f"{error}; computing the features again")
            return None
        if (found.get("made_from"), found.get("images")) != (self.made_from, _digest(mine)):
            return None
        done, index_N, features_NF = (found.get(name) for name in ("done", "index_N", "features_NF"))
        if (
            type(done) is int
            and _is_plain(index_N, torch.int64, 1)
            and _is_plain(features_NF, torch.float32, 2)
            and features_NF.shape == (len(index_N), width)
            and np.isin(index_N, mine[: max(0, done)]).all()
        ):
            return done, index_N, features_NF
        self.warn(f"{self.path} is damaged; computing the features again")
        return None

    def save(self, mine: np.ndarray, done: int, index_N: Tensor, features_NF: Tensor) -> None:
        content = {"made_from": self.made_from, "images": _digest(mine), "done": done, "index_N": index_N}
        try:
            checkpoint.save(self.path, {**content, "features_NF": features_NF.cpu()})
        except UserError as error:
            self.warn(f"{error}; a resumed probe will compute the features again")


def _digest(mine: np.ndarray) -> str:
    return hashlib.sha256(mine.tobytes()).hexdigest()


def _is_plain(value: Any, dtype: torch.dtype, dims: int) -> TypeGuard[Tensor]:
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        return False
    return value.dtype == dtype and value.ndim == dims


@torch.no_grad()
def extract(
    backbone: ResNet,
    data: datasets.ImageData,
    cfg: CfgNode,
    device: torch.device,
    most: int = 0,
    kept: FeatureFile | None = None,
) -> Features:
    """Features of all labeled images, gathered from every rank.

    The backbone runs in the mode it is in; pass it in eval mode.

    Args:
        most: use at most this many images, evenly spaced; 0: all.
        kept: a file to read features from and to write them to, also when the work is stopped halfway.

    Raises:
        Stopped: a rank was asked to stop.
    """
    mine = _my_share(data, most)
    width = feature_dim(backbone)
    empty = (0, torch.empty(0, dtype=torch.long), torch.empty(0, width))
    done, index_N, features_NF = (kept.load(mine, width) if kept else None) or empty
    left, positions, rows = len(mine) - done, [index_N], [features_NF.to(device)]
    batches = loader.eval_batches(
        data, *evaluation_size(cfg), _BATCH, cfg.DATALOADER.NUM_WORKERS, mine[done:], cfg.DATALOADER.ON_CORRUPT,
        device.type == "cuda",
    )  # fmt: skip
    stop, reason = AgreedStop(device), ""
    for _ in range(0, max(gather_objects(left)), _BATCH):  # the same number of times on every rank
        batch = next(batches, None)
        if batch is not None:
            pixels = views.normalize(batch[0].to(device, non_blocking=True), cfg.VIEWS.MEAN, cfg.VIEWS.STD)
            with autocast(cfg.SOLVER.AMP, device.type):
                rows.append(pooled_features(backbone, pixels).float())
            positions.append(batch[1])
            done = min(done + _BATCH, len(mine))
        reason = stop.poll()
        if reason:
            break
    index_N, features_NF = torch.cat(positions), torch.cat(rows)
    if kept and left:
        kept.save(mine, done, index_N, features_NF)
    if reason:
        distributed.barrier()  # no rank exits while another one writes
        raise Stopped(reason)
    index_N = index_N.to(device)
    sizes = gather_objects(len(index_N))
    features_NF, index_N = distributed.gather(features_NF, sizes), distributed.gather(index_N, sizes)
    return Features(features_NF, torch.from_numpy(data.labels).to(device)[index_N], len(data.classes))


def _my_share(data: datasets.ImageData, most: int) -> np.ndarray:
    """Positions of this rank's share of the labeled images, of which there are at most ``most`` (0: all)."""
    assert data.labels is not None
    labeled = np.flatnonzero(data.labels >= 0)
    if most and len(labeled) > most:
        labeled = labeled[np.linspace(0, len(labeled) - 1, most).round().astype(int)]
    start, end = slice_bounds(len(labeled), distributed.rank(), distributed.world_size())
    return labeled[start:end]
