"""The torchvision engine as `transfer.train` uses it (see `transfer.state.Engine`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fvcore.common.config import CfgNode
from torch import nn

from .data import test_images, training_data
from .evaluation import evaluate, results
from .layers import FrozenBatchNorm
from .model import Detector, build_model
from .solver import build_optimizer, build_schedule

__all__ = [
    "FROZEN_NORM", "NAME", "build_model", "build_optimizer", "build_schedule", "evaluate", "results", "test_images",
    "training_data",
]  # fmt: skip
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
