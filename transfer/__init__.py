"""Python interface to fine-tuning detectors on COCO, with Detectron2 or with torchvision's detectors.

    from transfer import convert, fine_tune, load_detector

    convert("runs/digits", "weights/digits.pth")  # the backbone of a pretraining run, in Detectron2's names
    results = fine_tune("configs/examples/own_faster_R18_FPN.yaml", {"MODEL.WEIGHTS": "weights/digits.pth"})

User modules register in `HOOKS` and `MAPPERS` (see `registries`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pretrain.common.logs import hide_library_warnings

from .registries import HOOKS, MAPPERS

if TYPE_CHECKING:
    from .api import evaluate, fine_tune, load_detector
    from .weights.convert import convert

__all__ = ["HOOKS", "MAPPERS", "convert", "evaluate", "fine_tune", "load_detector"]
# They are imported when they are used first, since command lines import this package first.
_MODULES = {"convert": "weights.convert", "evaluate": "api", "fine_tune": "api", "load_detector": "api"}

hide_library_warnings()  # some of them are raised by imports


def __getattr__(name: str) -> Any:
    """Import a function of the Python interface when it is used first."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"transfer.{_MODULES[name]}"), name)
