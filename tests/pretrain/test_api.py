"""The Python interface, as in a notebook: one call pretrains, one loads the backbone."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pretrain
from pretrain.common import interrupt
from pretrain.monitor import TrainingMonitor
from tests.pretrain.runs import overrides

pytestmark = pytest.mark.usefixtures("tiny_resnet18")

IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)


def keys_of(images: Path, output: Path) -> dict[str, str]:
    words = overrides(images, output)
    return dict(zip(words[::2], words[1::2], strict=True))


def test_a_run_and_its_backbone(images: Path, tmp_path: Path):
    before = signal.getsignal(signal.SIGINT)
    keys = {**keys_of(images, tmp_path), "VIEWS.MEAN": list(np.full(3, 0.5)), "OUTPUT_DIR": tmp_path / "run"}
    results = pretrain.pretrain(overrides=keys)
    assert results["stage"] == "pretrain" and signal.getsignal(signal.SIGINT) is before
    resnet = pretrain.load_backbone(tmp_path / "run")
    assert not resnet.training and resnet(IMAGES).shape == (2, 64)
    file = torch.load(tmp_path / "run/checkpoint_final.pth", weights_only=True)
    assert torch.equal(resnet.conv1.weight, file["state_dict"]["module.encoder_q.conv1.weight"])
    key = pretrain.load_backbone(tmp_path / "run", encoder="key")
    assert not torch.equal(key(IMAGES), resnet(IMAGES))


def test_an_interrupted_cell_leaves_a_checkpoint(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keys = {**keys_of(images, tmp_path / "run"), "SOLVER.EPOCHS": 10000}
    step = TrainingMonitor.step

    def interrupted(self: TrainingMonitor, *args: Any, **kwargs: Any) -> None:
        step(self, *args, **kwargs)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(TrainingMonitor, "step", interrupted)
    with pytest.raises(interrupt.Stopped, match="SIGINT") as caught:
        pretrain.pretrain(overrides=keys)
    assert "contains the checkpoint of step" in caught.value.remedy
    assert not interrupt.stop_requested() and list((tmp_path / "run").glob("checkpoint_*.pth"))
