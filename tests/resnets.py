"""Random ResNets and checkpoints that hold them, for tests of everything that reads, converts or loads weights."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torchvision
from torch import Tensor, nn


def resnet_state(arch: str = "resnet18", seed: int = 0, head: bool = True) -> dict[str, Tensor]:
    """A random ResNet whose BN has statistics of its own (defaults would hide a swap)."""
    return {k: v.clone() for k, v in _resnet_state(arch, seed).items() if head or not k.startswith("fc.")}


@functools.cache
def _resnet_state(arch: str, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model = getattr(torchvision.models, arch)(weights=None, num_classes=8)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.0)
            nn.init.normal_(module.bias, std=0.1)
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2.0)
            module.num_batches_tracked.fill_(7)
    return model.state_dict()


def moco(query: dict[str, Tensor], key: dict[str, Tensor], wrapper: str = "") -> dict[str, Any]:
    """A checkpoint of pretraining, in MoCo's format."""
    state = {f"module.encoder_q.{wrapper}{k}": v for k, v in query.items()}
    state |= {f"module.encoder_k.{wrapper}{k}": v for k, v in key.items()}
    state |= {"module.queue": torch.zeros(8, 16), "module.queue_ptr": torch.zeros(1, dtype=torch.long)}
    return {"epoch": 200, "arch": "resnet18", "state_dict": state, "optimizer": {"state": {}, "param_groups": []}}
