"""Helpers of the probes' tests: a config (16 px, two classes, a linear probe of 4 epochs of 3 steps), and a stop."""

from pathlib import Path
from typing import Any

import pytest
from fvcore.common.config import CfgNode

from pretrain.common.run.state import RunContext
from pretrain.config import load_config
from pretrain.probe import features


def probe_config(data: Path | str, output: Path, *more: str) -> CfgNode:
    words = (
        "MODEL.ARCH resnet18 PROBE.CROP none VIEWS.IMAGE_SIZE 16 PROBE.KNN_K 5 LINEAR.IMS_PER_BATCH 16 LINEAR.EPOCHS 4 "
        "LINEAR.BASE_LR 1.0 LINEAR.STEPS [2,3] LINEAR.AUGMENT none DATALOADER.NUM_WORKERS 0 DEVICE cpu"
    )
    return load_config(None, [*words.split(), "DATA.TRAIN", f"folder:{data}", "OUTPUT_DIR", str(output), *more])


def stop_in_batch(
    monkeypatch: pytest.MonkeyPatch, number: int, owner: Any = features, name: str = "pool_features"
) -> tuple[list[int], RunContext]:
    """Return a list with an entry per batch of features of 4 images, and the context of a run that is stopped in one.

    Args:
        owner: whose function ``name`` is called once per batch.
    """
    seen: list[int] = []
    context = RunContext()
    real = getattr(owner, name)

    def counted(*args: Any) -> Any:
        seen.append(1)
        if len(seen) == number:
            context.stop.make("asked")
        return real(*args)

    monkeypatch.setattr(features, "_BATCH", 4)
    monkeypatch.setattr(owner, name, counted)
    return seen, context
