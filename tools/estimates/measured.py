"""Steps that `make gpu` has timed on a GPU, which replace published rates: docs/benchmarks/*gpu*.json."""

from __future__ import annotations

import functools
import json
from typing import Any

from tools import ROOT

from .published import Gpu, find_gpu

# Of the rows of benchmarks/gpu_rows.py: what their names begin with, and how they name a precision.
_METHODS = {"jcl": "JCL", "mocov2": "MoCo v2"}
_FORMS = {"half": "bf16, channels_last", "tf32": "TF32", "float32": "float32"}


def find_rate(gpu: Gpu, cfg: Any, precision: str) -> float | None:
    """Return the measured images/s of a recipe's step on one GPU, or None; several rows: the fastest.

    The rows are those of the ResNet-50 recipes at 224 pixels, in which only the number of images differs.
    """
    method = _METHODS.get(cfg.METHOD.NAME)
    is_recipe = (cfg.MODEL.ARCH, cfg.MODEL.STEM, cfg.VIEWS.IMAGE_SIZE) == ("resnet50", "imagenet", 224)
    keys = {"jcl": 5, "mocov2": 1}.get(cfg.METHOD.NAME)
    if not method or not is_recipe or keys != cfg.METHOD.NUM_KEYS or cfg.METHOD.DENSE_WEIGHT:
        return None
    rates = [
        row["images_per_second"]
        for name, row in read_rows(gpu.name)
        if name.startswith(f"{method}, ") and name.endswith(f" images, {_FORMS[precision]}")
        if "images_per_second" in row
    ]
    return max(rates, default=None)


@functools.cache
def read_rows(gpu_name: str) -> list[tuple[str, dict[str, Any]]]:
    """Read the rows of all files about a type of GPU, without those of tiny models."""
    rows: list[tuple[str, dict[str, Any]]] = []
    for path in sorted((ROOT / "docs/benchmarks").glob("*gpu*.json")):
        numbers = json.loads(path.read_text(encoding="utf-8"))
        gpu = find_gpu(numbers["gpu"] or "")
        if gpu and gpu.name == gpu_name and not numbers["small"]:
            rows += numbers["rows"].items()
    return rows
