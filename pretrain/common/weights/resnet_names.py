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
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TypeVar

DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3), "resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}
T = TypeVar("T")
PREFIX = "backbone.bottom_up."  # the prefix of the ResNet in a Detectron2 detector with FPN
_C4 = "backbone."  # the prefix of stem and res2 to res4 in one with a C4 backbone, whose res5 is in the head
_C4_HEAD = "roi_heads.res5."
_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def is_bottleneck(arch: str) -> bool:
    """Return whether the blocks of ``arch`` have three convolutions."""
    return arch in ("resnet50", "resnet101")


@cache
def build_name_table(arch: str) -> dict[str, str]:
    """Map torchvision's name of every tensor of the backbone to Detectron2's (without `backbone.bottom_up.`)."""
    table: dict[str, str] = {}
    for conv, norm, detectron2 in [("conv1", "bn1", "stem.conv1"), *_block_convolutions(arch)]:
        table[f"{conv}.weight"] = f"{detectron2}.weight"
        table.update({f"{norm}.{part}": f"{detectron2}.norm.{part}" for part in _NORM})
    return table


def _block_convolutions(arch: str) -> Iterator[tuple[str, str, str]]:
    """Yield torchvision's names of every convolution and its norm in the blocks, and Detectron2's of both."""
    convolutions = 3 if is_bottleneck(arch) else 2
    for layer, blocks in enumerate(DEPTHS[arch], start=1):
        for block in range(blocks):
            torchvision = f"layer{layer}.{block}"
            detectron2 = f"res{layer + 1}.{block}"
            for i in range(1, convolutions + 1):
                yield f"{torchvision}.conv{i}", f"{torchvision}.bn{i}", f"{detectron2}.conv{i}"
            if block == 0 and (layer > 1 or is_bottleneck(arch)):  # where the width or the stride changes
                yield f"{torchvision}.downsample.0", f"{torchvision}.downsample.1", f"{detectron2}.shortcut"


def to_detectron2(state: Mapping[str, T], arch: str) -> dict[str, T]:
    """Rename a whole backbone to Detectron2's names; a name outside the table raises KeyError."""
    table = build_name_table(arch)
    return {table[name]: value for name, value in state.items()}


def to_torchvision(state: Mapping[str, T]) -> dict[str, T]:
    """Replace Detectron2's names in ``state`` with torchvision's; keep other names for the reader to refuse."""
    inverse = _invert_names()
    return {inverse.get(name, name): value for name, value in state.items()}


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
    """Rename the ResNet of a C4 detector to the names that it has in a detector with FPN.

    The norm that MoCo's head adds to res5 is not part of the ResNet, and keeps its name.
    """
    if not any(name.startswith(f"{_C4}stem.") for name in state):
        return dict(state)
    renamed = {}
    for name, value in state.items():
        if name.startswith(_C4_HEAD) and not name.startswith(f"{_C4_HEAD}norm."):
            name = f"{PREFIX}res5.{name.removeprefix(_C4_HEAD)}"
        elif name.startswith(_C4):
            name = PREFIX + name.removeprefix(_C4)
        renamed[name] = value
    return renamed


@cache
def _invert_names() -> dict[str, str]:
    return {detectron2: name for arch in DEPTHS for name, detectron2 in build_name_table(arch).items()}
