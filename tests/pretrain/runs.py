"""A tiny run of pretraining, for tests: 48 images of 16 px, ResNet-18, 6 steps per epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode

from pretrain.common.weights import checkpoint
from pretrain.config import load_config
from pretrain.methods import METHODS
from pretrain.state import build_train_state
from pretrain.steps import TrainState
from pretrain.train import main

STEPS_PER_EPOCH = 6


def overrides(images: Path, output: Path, *more: str, method: str = "jcl") -> list[str]:
    return [
        "METHOD.NAME", method, *(["METHOD.NUM_KEYS", "2", "METHOD.JCL_LAMBDA", "4.0"] if method == "jcl" else []),
        "MODEL.ARCH", "resnet18", "MODEL.STEM", "cifar", "MODEL.HEAD_HIDDEN_DIMS", "[16]", "MODEL.EMBEDDING_DIM", "8",
        *(["MODEL.QUEUE_SIZE", "20"] if METHODS[method].kind == "queue" else []),
        "SOLVER.IMS_PER_BATCH", "8", "SOLVER.EPOCHS", "2", "SOLVER.CHECKPOINT_PERIOD", "4", "SOLVER.LOG_PERIOD", "1",
        "DATA.TRAIN", f"folder:{images}", "VIEWS.IMAGE_SIZE", "16", "DATALOADER.NUM_WORKERS", "0", "PROBE.KNN_K", "5",
        "DEVICE", "cpu", "OUTPUT_DIR", str(output), *more,
    ]  # fmt: skip


def run(images: Path, output: Path, *more: str) -> dict:
    return main(load_config(None, overrides(images, output, *more)))


def lines(output: Path, having: str) -> list[dict[str, Any]]:
    """The lines of metrics.json that have a value of that name."""
    path = output / "metrics.json"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [line for line in found if having in line]


def assert_same_end(a: Path, b: Path) -> None:
    """Two complete runs logged the same losses and ended with the same weights and momentum, to the bit."""
    one, two = checkpoint.read(a / checkpoint.FINAL), checkpoint.read(b / checkpoint.FINAL)
    assert one["step"] == two["step"]
    torch.testing.assert_close(one["state_dict"], two["state_dict"], rtol=0, atol=0)
    torch.testing.assert_close(one["optimizer"]["state"], two["optimizer"]["state"], rtol=0, atol=0)
    assert [line["loss"] for line in lines(a, "loss")] == [line["loss"] for line in lines(b, "loss")]


def build_state(cfg: CfgNode) -> TrainState:
    """Build what a step changes, on the CPU; 4 steps per epoch."""
    return build_train_state(cfg, torch.device("cpu"), 4)
