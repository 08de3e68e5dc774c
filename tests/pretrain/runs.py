"""A tiny run of pretraining, for tests: 48 images of 16 px, ResNet-18, 6 steps per epoch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fvcore.common.config import CfgNode

from pretrain.common import interrupt
from pretrain.common.run.state import RunContext
from pretrain.common.weights import checkpoint
from pretrain.config import load_config
from pretrain.methods import METHODS
from pretrain.state import TrainState, build_train_state
from pretrain.train import main

STEPS_PER_EPOCH = 6


def overrides(images: Path, output: Path, *more: str, method: str = "jcl") -> list[str]:
    words = (
        f"METHOD.NAME {method} MODEL.ARCH resnet18 MODEL.STEM cifar MODEL.HEAD_HIDDEN_DIMS [16] MODEL.EMBEDDING_DIM 8 "
        "SOLVER.IMS_PER_BATCH 8 SOLVER.EPOCHS 2 SOLVER.CHECKPOINT_PERIOD 4 SOLVER.LOG_PERIOD 1 VIEWS.IMAGE_SIZE 16 "
        "DATALOADER.NUM_WORKERS 0 PROBE.KNN_K 5 DEVICE cpu"
    )
    if method == "jcl":
        words += " METHOD.NUM_KEYS 2 METHOD.JCL_LAMBDA 4.0"
    if METHODS[method].kind == "queue":
        words += " MODEL.QUEUE_SIZE 20"
    return [*words.split(), "DATA.TRAIN", f"folder:{images}", "OUTPUT_DIR", str(output), *more]


def run(images: Path, output: Path, *more: str, context: RunContext | None = None) -> dict:
    return main(load_config(None, overrides(images, output, *more)), context=context)


def stopped(call: Callable[[], object], reason: str = "") -> str:
    """Call it, which must end by a stop with this reason; return the remedy."""
    with pytest.raises(interrupt.Stopped, match=reason or None) as caught:
        call()
    return caught.value.remedy


def load_newest(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Load the newest checkpoint of a run, which must have one."""
    newest = checkpoint.load_newest(folder)
    assert newest is not None
    return newest


def lines(output: Path, having: str) -> list[dict[str, Any]]:
    """Read the lines of metrics.json that have a value of that name."""
    path = output / "metrics.json"
    text = path.read_text() if path.is_file() else ""
    return [line for line in map(json.loads, text.splitlines()) if having in line]


def assert_same_end(a: Path, b: Path) -> None:
    """Assert that two complete runs logged the same losses and ended with the same weights and momentum, to the bit."""
    first = checkpoint.read(a / checkpoint.FINAL)
    second = checkpoint.read(b / checkpoint.FINAL)
    assert first["step"] == second["step"]
    torch.testing.assert_close(first["state_dict"], second["state_dict"], rtol=0, atol=0)
    torch.testing.assert_close(first["optimizer"]["state"], second["optimizer"]["state"], rtol=0, atol=0)
    assert [line["loss"] for line in lines(a, "loss")] == [line["loss"] for line in lines(b, "loss")]


def build_state(cfg: CfgNode) -> TrainState:
    """Build what a step changes, on the CPU; 4 steps per epoch."""
    return build_train_state(cfg, torch.device("cpu"), 4)
