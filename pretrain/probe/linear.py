"""The linear probe: a classifier on frozen features."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torchvision.models import ResNet

from .. import datasets, distributed
from ..common.errors import UserError
from ..encoder import feature_dim
from ..shares import slice_bounds
from . import classifier
from .classifier import Augmented, Scores, Stream
from .data import ProbeData
from .features import Features, extract
from .heads import Heads
from .run import ProbeRun


def main(cfg: CfgNode, weights: str) -> dict[str, Any]:
    """Trains LINEAR.* heads on the frozen backbone of ``weights``; see `classifier.run_stage`.

    With LINEAR.LRS several heads learn side by side from one pass over the data, one per learning rate; one that
    diverges scores 0 and leaves the others alone. The result is that of the head with the highest top-1 on a tenth of
    the training images, which no head learns from: to choose it on the validation images would flatter it. With
    LINEAR.AUGMENT none every feature is computed once.
    """
    return classifier.run_stage("linear", cfg, weights, _Heads)


class _Heads:
    """Classifiers side by side, one per learning rate, and the features that they learn from."""

    scored_every_epoch = True

    def __init__(self, run: ProbeRun, backbone: ResNet, source: dict[str, Any], data: ProbeData) -> None:
        cfg, device = run.cfg, run.device
        self.heads = Heads(feature_dim(backbone), len(data.train.classes), cfg.LINEAR).to(device)
        self._val = extract(backbone, data.val, cfg, device)
        learned, self._held_out = data.train, None
        if len(self.heads.rates) > 1:
            learned, unseen = _split(data.train)
            self._held_out = extract(backbone, unseen, cfg, device)
        if cfg.LINEAR.AUGMENT == "none":
            self.stream: Stream = _Cached(extract(backbone, learned, cfg, device), cfg)
        else:
            self.stream = Augmented(run, cfg.LINEAR, backbone, learned)

    def score(self) -> Scores:
        return self.heads.score(self._val, self._held_out)


def _split(train: datasets.ImageData) -> tuple[datasets.ImageData, datasets.ImageData]:
    """The images to learn from, and every tenth image, to choose the learning rate on."""
    positions = np.arange(len(train))
    is_held_out = positions % 10 == 9 if len(train) > 9 else positions == 0
    return train.chosen(positions[~is_held_out]), train.chosen(positions[is_held_out])


class _Cached:
    """Batches of (features, labels) from features computed once; the order is a function of (seed, epoch)."""

    def __init__(self, features: Features, cfg: CfgNode) -> None:
        self._features, self._total, self._seed = features, cfg.LINEAR.IMS_PER_BATCH, cfg.SEED
        if len(features.labels_N) < self._total:
            raise UserError(
                f"LINEAR.IMS_PER_BATCH is {self._total}, above the {len(features.labels_N)} labeled images; lower it"
            )

    def __len__(self) -> int:
        return len(self._features.labels_N) // self._total

    def batches(self, first_step: int, total_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        features_NF, labels_N, _ = self._features
        start, stop = slice_bounds(self._total, distributed.rank(), distributed.world_size())
        for step in range(first_step, total_steps):
            epoch, at = divmod(step, len(self))
            if step == first_step or at == 0:
                generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
                order = torch.randperm(len(labels_N), generator=generator).to(labels_N.device)
            mine = order[at * self._total + start : at * self._total + stop]
            yield features_NF[mine], labels_N[mine]

    def features(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch
