"""A tiny run of pretraining, for tests: 48 images of 16 px, ResNet-18, 6 steps per epoch."""

from __future__ import annotations

from pathlib import Path

from pretrain.config import load_config
from pretrain.train import main

STEPS_PER_EPOCH = 6


def overrides(images: Path, output: Path, *more: str) -> list[str]:
    return [
        "METHOD.NAME", "jcl", "METHOD.NUM_KEYS", "2", "METHOD.LAMBDA", "4.0", "MODEL.ARCH", "resnet18",
        "MODEL.STEM", "cifar", "MODEL.HEAD_HIDDEN_DIMS", "[16]", "MODEL.EMBEDDING_DIM", "8", "MODEL.QUEUE_SIZE", "20",
        "SOLVER.IMS_PER_BATCH", "8", "SOLVER.EPOCHS", "2", "SOLVER.CHECKPOINT_PERIOD", "4", "SOLVER.LOG_PERIOD", "1",
        "DATA.TRAIN", f"folder:{images}", "VIEWS.IMAGE_SIZE", "16", "DATALOADER.NUM_WORKERS", "0", "PROBE.KNN_K", "5",
        "DEVICE", "cpu", "OUTPUT_DIR", str(output), *more,
    ]  # fmt: skip


def run(images: Path, output: Path, *more: str) -> dict:
    return main(load_config(None, overrides(images, output, *more)))
