"""Weights and checkpoints: valid ones, and how they are read."""

from __future__ import annotations

import functools
import json
import logging
import pickle
import random
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import save as save_safetensors

from pretrain.common import checkpoint
from pretrain.common.backbone_file import load_backbone
from pretrain.common.skipped_steps import SkippedSteps
from pretrain.config import default_config, load_config
from pretrain.probe.heads import Heads
from pretrain.probe.linear import restored
from pretrain.state import find_checkpoint, from_checkpoint, to_checkpoint
from tests.fuzz import mutate
from tests.pretrain import runs
from tests.resnets import moco, resnet_state
from transfer.config import default_config as detector_defaults
from transfer.convert import read_source
from transfer.torchvision_engine.solver import build_optimizer
from transfer.torchvision_engine.state import State
from transfer.torchvision_engine.state import find_checkpoint as find_detector
from transfer.weights import Weights, load_weights

# Weights without bytes: every tensor is one number, repeated.
_RESNET = {name: torch.full((), 0.5, dtype=t.dtype).expand(t.shape) for name, t in resnet_state().items()}
STATES = [dict(_RESNET), {"state_dict": dict(_RESNET)}, moco(_RESNET, _RESNET)]
_BLOBS = {
    "model": {name: np.full((), 0.5, np.float32) for name in _RESNET},
    "__author__": "x",
    "matching_heuristics": True,
}


def draw_pickled(rng: random.Random) -> bytes:
    if rng.randrange(40) == 0:
        network = {name: tensor.numpy() for name, tensor in _network().items()}
        return pickle.dumps(mutate.value(rng, {"model": network, "provenance": _PROVENANCE}), protocol=2)
    arrays = (np.array([None]), np.array(["a"]), np.zeros((2, 3)), np.float32(1), np.zeros(64, ">f4"), np.zeros(0))
    if rng.randrange(2) == 0:
        return mutate.data(rng, [pickle.dumps(_BLOBS, protocol=protocol) for protocol in (2, 5)])
    return pickle.dumps(mutate.value(rng, _BLOBS, arrays), protocol=2)


_PROVENANCE = {"source": "a.pth", "arch": "resnet18", "epoch": 1, "config": "METHOD:\n  NAME: jcl\n"}


@functools.cache
def _network() -> dict[str, torch.Tensor]:
    """23 MB, because these formats cannot repeat a number; therefore one of forty files."""
    return {name: tensor.half() for name, tensor in resnet_state().items()}


def draw_safetensors(rng: random.Random) -> bytes:
    if rng.randrange(40) == 0:
        about = {"provenance": json.dumps(mutate.value(rng, _PROVENANCE))}
        content = save_safetensors(_network(), about)
        if rng.randrange(2):
            return content
        end = 8 + int.from_bytes(content[:8], "little")
        text = json.dumps(mutate.value(rng, json.loads(content[8:end]))).encode()
        return len(text).to_bytes(8, "little") + text + content[end:]
    tensors = {"a.weight": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.float16)}
    return mutate.data(rng, [save_safetensors(tensors, {"provenance": "{}"}), save_safetensors(tensors)])


def read_weights(file: Path) -> None:
    for read in (load_backbone, read_source):
        found = read(file)
        backbone = found[0] if isinstance(found, tuple) else found
        assert all(torch.isfinite(tensor).all() for tensor in backbone.state_dict.values())


def checkpoints(root: Path) -> list[Any]:
    cfg = _checkpoint_config(root)
    training = runs.training(cfg)
    state = to_checkpoint(training, cfg, 4, 6, 0)
    state["state_dict"] = {
        name: torch.full((), 0.5).to(t.dtype).expand(t.shape) for name, t in state["state_dict"].items()
    }
    return [state]


def _checkpoint_config(root: Path) -> Any:
    return load_config(None, runs.overrides(root / "images", root / "pretrained"))


def checkpoint_reader(root: Path) -> Callable[[Path], None]:
    cfg = _checkpoint_config(root)
    training = runs.training(cfg)
    optimizer = training.optimizer
    options, clean = optimizer.param_groups, optimizer.state

    def read(file: Path) -> None:
        optimizer.param_groups = [dict(group) for group in options]  # the file before may have changed them
        optimizer.state = defaultdict(dict, {parameter: dict(state) for parameter, state in clean.items()})
        checkpoint.read(file)
        found = find_checkpoint(cfg, file.parent, lambda _: None)
        assert found is not None
        step = from_checkpoint(training, found[1], lambda _: None)
        assert step >= 0 and all(torch.isfinite(p).all() for p in training.objective.model.parameters())

    return read


def _probe_heads() -> Heads:
    settings = default_config().LINEAR
    settings.LRS = [1.0, 10.0]
    return Heads(4, 3, settings)


def probe_state() -> dict[str, Any]:
    heads = _probe_heads()
    for parameter in heads.parameters():  # a step here would leave torch's threads to the process that is forked
        heads.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return {**heads.state(), "step": 4, "losses": torch.ones(2)}


def read_probe(file: Path) -> None:
    heads = _probe_heads()
    step, losses = restored(heads, checkpoint.read(file), torch.zeros(2), 9)
    assert 0 <= step <= 9 and losses.shape == (2,)
    heads.set_rates(0)
    heads.step(torch.ones(2, 4), torch.tensor([0, 2]))


class _Training(State):
    """The state of a training without data, of a model with one layer."""

    def __init__(self) -> None:
        self.cfg = detector_defaults()
        model = torch.nn.Linear(4, 3)
        self.model, self.device, self.world, self.log = (
            cast(Any, model),
            torch.device("cpu"),
            1,
            logging.getLogger("fuzz"),
        )
        self.optimizer, self.rate = build_optimizer(self.cfg.SOLVER, model), lambda _: 0.1
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.skipped, self.window, self.writer = SkippedSteps("x"), deque(maxlen=20), None


def detector_state() -> dict[str, Any]:
    training = _Training()
    weights, steps = training.model.state_dict(), [{"total_loss": 1.0, "time": 0.5, "data_time": 0.1}] * 2
    return {
        "model": weights, "optimizer": training.optimizer.state_dict(), "scaler": {},
        "iteration": 4, "seed": 1, "window": steps, "skipped_steps": 0, "engine": "torchvision", "config": "",
    }  # fmt: skip


def read_detector(file: Path) -> None:
    training = _Training()
    training.cfg.OUTPUT_DIR = str(file.parent)
    found = find_detector(training.cfg, training.log)
    assert found
    path, content = found
    start = content["iteration"] + 1
    load_weights(training.model.state_dict, Weights(str(path), "", content.pop("model"), {}), require_heads=True)
    training.restore(content)
    assert start >= 0
    training.window.append({"total_loss": 1.0, "time": 0.5, "data_time": 0.1})
    training.summary(start)
    training.model(torch.ones(2, 4)).sum().backward()
    training.optimizer.step()
