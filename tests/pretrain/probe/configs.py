"""The config of every probe's tests: 16 px, two classes, the linear probe in 4 epochs of 3 steps."""

from __future__ import annotations

from pathlib import Path

from fvcore.common.config import CfgNode

from pretrain.config import load_config


def probe_config(data: Path | str, output: Path, *more: str) -> CfgNode:
    return load_config(None, [
        "MODEL.ARCH", "resnet18", "PROBE.CROP", "none", "DATA.TRAIN", f"folder:{data}", "VIEWS.IMAGE_SIZE", "16",
        "PROBE.KNN_K", "5", "LINEAR.IMS_PER_BATCH", "16", "LINEAR.EPOCHS", "4", "LINEAR.BASE_LR", "1.0",
        "LINEAR.STEPS", "[2, 3]", "LINEAR.AUGMENT", "none", "DATALOADER.NUM_WORKERS", "0", "DEVICE", "cpu",
        "OUTPUT_DIR", str(output), *more,
    ])  # fmt: skip
