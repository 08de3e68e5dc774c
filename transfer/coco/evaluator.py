"""Which package computes COCO's metrics; early checks read it without importing either."""

from __future__ import annotations

import importlib.util
import os

from pretrain.common.errors import UserError


def evaluator() -> str:
    """What computes the metrics: ``pycocotools``, or ``faster-coco-eval`` where P2T_COCOEVAL is ``faster``.

    Raises:
        UserError: another value, or the package is not installed.
    """
    wanted = os.environ.get("P2T_COCOEVAL") or "pycocotools"
    if wanted not in ("pycocotools", "faster"):
        raise UserError(f"P2T_COCOEVAL is {wanted!r}; give pycocotools or faster")
    if wanted == "faster" and importlib.util.find_spec("faster_coco_eval") is None:
        raise UserError("P2T_COCOEVAL is faster, but faster-coco-eval is not installed; run: pip install '.[faster]'")
    return "faster-coco-eval" if wanted == "faster" else wanted
