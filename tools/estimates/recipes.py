"""The estimates of recipe files, in half precision, as the GPUs of the tables are used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.config import load_config
from transfer.config import load_config as load_detector_config

from . import detection, pretraining
from .model import Estimate
from .published import Gpu

# The command in a recipe's header that runs it.
_PRETRAINS = "launch.py pretrain "
_FINE_TUNES = "transfer/train_net.py "


def estimate_recipe(
    path: Path, gpu: Gpu, count: int, overrides: Sequence[Any] = (), images: int | None = None
) -> Estimate | None:
    """Estimate a recipe in half precision; return None if it neither pretrains nor fine-tunes, or nobody knows.

    Args:
        images: training images, if the recipe does not name its data set.
    """
    if is_pretraining(path):
        return pretraining.estimate(load_config(path, ["SOLVER.AMP", "bf16", *overrides]), gpu, count, images)
    if is_detector(path):
        return detection.estimate(load_detector(path, overrides), gpu, count)
    return None


def load_detector(path: Path, overrides: Sequence[Any] = ()) -> Any:
    """Load a detector's recipe in half precision."""
    return load_detector_config(path, ["SOLVER.AMP.ENABLED", "True", *overrides])


def is_pretraining(path: Path) -> bool:
    """Return whether a recipe pretrains."""
    return _PRETRAINS in path.read_text(encoding="utf-8") and not is_detector(path)


def is_detector(path: Path) -> bool:
    """Return whether a recipe fine-tunes a detector."""
    return _FINE_TUNES in path.read_text(encoding="utf-8")
