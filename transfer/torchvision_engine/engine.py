"""The torchvision engine as `transfer.train` uses it (see `transfer.state.Engine`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import nn

from ..coco.results import Metrics
from . import evaluation, solver
from .data import test_images, training_data
from .evaluation import results
from .layers import FrozenBatchNorm
from .model import Detector, build_model

__all__ = ["FROZEN_NORM", "NAME", "build_model", "results", "test_images", "training_data"]
NAME: str = "torchvision"
FROZEN_NORM: type[nn.Module] = FrozenBatchNorm


class Storage:
    """Scalars that hooks put, as into Detectron2's EventStorage; a line of metrics.json has the latest ones."""

    def __init__(self, start: int) -> None:
        self.iter, self._latest = start, {}

    def put_scalar(self, name: str, value: float, **_: Any) -> None:
        self._latest[name] = (self.iter, float(value))

    def put_scalars(self, *, smoothing_hint: bool = True, **values: float) -> None:
        for name, value in values.items():
            self.put_scalar(name, value)

    def scalars(self) -> dict[str, float]:
        """Those of this iteration."""
        return {name: value for name, (iteration, value) in self._latest.items() if iteration == self.iter}

    def take_images(self) -> Iterator[Any]:
        return iter(())


def storage(start: int) -> AbstractContextManager[Storage]:
    return nullcontext(Storage(start))


def prepare(cfg: CfgNode, log: Callable[[str], None]) -> CfgNode:
    """``cfg`` itself."""
    return cfg


def backbone_features(model: Detector, batch: list[dict[str, Any]]) -> Any:
    return model.backbone.bottom_up(model.preprocess([record["image"] for record in batch])[0])


def build_optimizer(cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
    optimizer, clip = solver.build_optimizer(cfg.SOLVER, model), cfg.SOLVER.CLIP_GRADIENTS
    if clip.ENABLED:
        optimizer.register_step_pre_hook(lambda *_: solver.clip_gradients(clip, model.parameters()))
    return optimizer


def build_schedule(cfg: CfgNode, optimizer: torch.optim.Optimizer) -> Callable[[int], float]:
    learning_rate = solver.learning_rate(cfg.SOLVER)

    def schedule(iteration: int) -> float:
        rate = learning_rate(iteration)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        return rate

    return schedule


def evaluate(cfg: CfgNode, model: Detector, pictures: int, *, final: bool) -> dict[str, Metrics]:
    return evaluation.evaluate(cfg, model, pictures)
