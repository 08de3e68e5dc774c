"""Fine-tuning of a whole network as a classifier, as for few labels (SimCLR, Sec. 5; SwAV, App. A.4)."""

from __future__ import annotations

from typing import Any, cast

import torch
from fvcore.common.config import CfgNode
from torch import nn
from torchvision.models import ResNet

from .. import distributed
from ..encoder import feature_dim
from . import classifier
from .classifier import Augmented, Scores
from .data import ProbeData
from .features import extract
from .heads import Heads
from .labels import identity
from .protocol import data_names
from .run import ProbeRun


def main(cfg: CfgNode, weights: str) -> dict[str, Any]:
    """Trains the backbone of ``weights`` and a linear classifier on the labeled images, by FINETUNE.*.

    Batch norm is over all processes on GPUs (SyncBN), and over each process's own images on CPUs. The network is scored
    once, after the last epoch, on the validation images; none of its checkpoints is chosen by them. The checkpoint
    holds it under torchvision's names. See `classifier.run_stage`.
    """
    return classifier.run_stage("finetune", cfg, weights, _Network)


class _Network:
    """The backbone, its classifier, and the images that they learn from."""

    scored_every_epoch = False

    def __init__(self, run: ProbeRun, backbone: ResNet, source: dict[str, Any], data: ProbeData) -> None:
        self._run, self._data = run, data
        self._backbone = backbone.train().requires_grad_(True)
        if distributed.world_size() > 1 and run.device.type == "cuda":
            self._backbone = cast(ResNet, nn.SyncBatchNorm.convert_sync_batchnorm(backbone))
        trained_on = " of ".join(filter(None, (identity(run.cfg.DATA.PROBE_LABELS), data_names(run.cfg)[0])))
        provenance = {**source, "fine_tuned_on": [*source.get("fine_tuned_on", ()), trained_on]}
        if source["source"] == "random":
            provenance["method"] = "random"
        self.heads = _Classifier(run, self._backbone, len(data.train.classes), provenance)
        self.stream = Augmented(run, run.cfg.FINETUNE, self._backbone, data.train)

    def score(self) -> Scores:
        self.heads.average_statistics()
        features = extract(self._backbone.eval(), self._data.val, self._run.cfg, self._run.device)
        return self.heads.score(features, None)


class _Classifier(Heads):
    """The classifier, which steps and is saved together with its backbone."""

    def __init__(self, run: ProbeRun, backbone: ResNet, classes: int, provenance: dict[str, Any]) -> None:
        scaler = torch.amp.GradScaler(run.device.type, enabled=run.cfg.SOLVER.AMP == "fp16")
        super().__init__(feature_dim(backbone), classes, run.cfg.FINETUNE, backbone, scaler)
        self.to(run.device)
        self._backbone, self._provenance = [backbone], provenance  # the list: it is not a part of the heads

    @torch.no_grad()
    def average_statistics(self) -> None:
        """Makes batch norm's running statistics the mean over processes, which have their own on CPUs."""
        for buffer in self._backbone[0].buffers():
            if buffer.is_floating_point():
                distributed.mean_(buffer)

    def state(self) -> dict[str, Any]:
        self.average_statistics()
        head = {f"fc.{name}": tensor for name, tensor in self.heads[0].state_dict().items()}
        weights = {**self._backbone[0].state_dict(), **head}
        return {**super().state(), "state_dict": weights, "provenance": self._provenance}

    def load(self, state: dict[str, Any]) -> None:
        head = {name.removeprefix("fc."): t for name, t in state["state_dict"].items() if name.startswith("fc.")}
        rest = {name: t for name, t in state["state_dict"].items() if not name.startswith("fc.")}
        self._backbone[0].load_state_dict(rest)
        super().load({**state, "state_dict": {f"0.{name}": tensor for name, tensor in head.items()}})
