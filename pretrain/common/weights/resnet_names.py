"""The name table: torchvision's ResNet <-> Detectron2's ResNet, for depths 18, 34, 50 and 101.

torchvision                      Detectron2
conv1.weight                     stem.conv1.weight
bn1.*                            stem.conv1.norm.*
layer1.0.conv2.weight            res2.0.conv2.weight
layer1.0.bn2.*                   res2.0.conv2.norm.*
layer2.0.downsample.0.weight     res3.0.shortcut.weight
layer2.0.downsample.1.*          res3.0.shortcut.norm.*
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import UserError

if TYPE_CHECKING:  # command lines import this module, which must not import torch for them
    import torch
    from torch import nn

DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3), "resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}
T = TypeVar("T")
PREFIX = "backbone.bottom_up."  # the prefix of the ResNet in a Detectron2 detector with FPN


def is_bottleneck(arch: str) -> bool:
    """Return whether the blocks of ``arch`` have three convolutions."""
    return arch in ("resnet50", "resnet101")


@cache
def list_shapes(build: Callable[..., nn.Module]) -> dict[str, torch.Size]:
    """Return the shape of every tensor of the backbone that torchvision's function ``build`` returns, by its name."""
    import torch

    with torch.device("meta"):
        resnet = build(weights=None).state_dict()
    return {name: tensor.shape for name, tensor in resnet.items() if not name.startswith("fc.")}


@cache
def build_name_table(arch: str) -> dict[str, str]:
    """Map torchvision's name of every tensor of the backbone to Detectron2's (without `backbone.bottom_up.`)."""
    import torchvision

    return {name: _rename_to_detectron2(name) for name in list_shapes(getattr(torchvision.models, arch))}


def _rename_to_detectron2(name: str) -> str:
    name = re.sub(r"^(conv|bn)1", r"stem.\g<0>", name)
    name = re.sub(r"^layer(\d)", lambda match: f"res{int(match[1]) + 1}", name)
    name = name.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")
    return re.sub(r"bn(\d)", r"conv\1.norm", name)


def infer_arch(state: Mapping[str, Any], path: str | Path) -> str:
    """Return the ResNet with the number and kind of blocks in ``state``; raise UserError if there is none."""
    blocks = {tuple(name.split(".")[:2]) for name in state if name.startswith("layer") and name.count(".") > 1}
    counts = Counter(layer for layer, _ in blocks)
    depths = tuple(counts[f"layer{i}"] for i in range(1, 5))
    bottleneck = any(".conv3." in name for name in state)
    for arch, expected in DEPTHS.items():
        if depths == expected and bottleneck == is_bottleneck(arch):
            return arch
    kind = "bottleneck" if bottleneck else "basic"
    larger = " (a ResNet-152)" if depths == (3, 8, 36, 3) else ""
    raise UserError(f"{path} has {depths} {kind} blocks in layer1-layer4{larger}; pass a ResNet-18, 34, 50 or 101")


def to_detectron2(state: Mapping[str, T], arch: str) -> dict[str, T]:
    """Rename a whole backbone to Detectron2's names; a name outside the table raises KeyError."""
    table = build_name_table(arch)
    return {table[name]: value for name, value in state.items()}


def to_torchvision(state: Mapping[str, T]) -> dict[str, T]:
    """Replace Detectron2's names in ``state`` with torchvision's; keep other names for the reader to refuse."""
    return {invert_names().get(name, name): value for name, value in state.items()}


def to_transformers(name: str) -> str:
    """Rename a tensor of Detectron2 to Hugging Face's name.

    ``res2.0.conv1.norm.bias`` -> ``encoder.stages.0.layers.0.layer.0.normalization.bias``
    """
    module, norm, part = name.partition(".norm.")
    if not norm:
        module, _, part = name.rpartition(".")
    module = "embedder.embedder" if module == "stem.conv1" else module
    module = re.sub(r"^res(\d)\.(\d+)", lambda m: f"encoder.stages.{int(m[1]) - 2}.layers.{m[2]}", module)
    module = re.sub(r"conv(\d)$", lambda m: f"layer.{int(m[1]) - 1}", module)
    return f"{module}.{'normalization' if norm else 'convolution'}.{part}"


def from_c4(state: Mapping[str, T]) -> dict[str, T]:
    """Rename the ResNet of a C4 detector, whose res5 is in its head, to the names that it has in a detector with FPN.

    The norm that MoCo's head adds to res5 is not part of the ResNet, and keeps its name.
    """
    if not any(name.startswith("backbone.stem.") for name in state):
        return dict(state)
    return {re.sub(r"^(backbone\.|roi_heads\.(?=res5\.(?!norm\.)))", PREFIX, name): state[name] for name in state}


@cache
def invert_names() -> dict[str, str]:
    """Map Detectron2's name of every tensor of every backbone to torchvision's."""
    return {detectron2: name for arch in DEPTHS for name, detectron2 in build_name_table(arch).items()}
