"""Names that other projects give a ResNet's tensors -> torchvision's; the reader checks what comes out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

# Name that tells the project -> patterns and their replacements.
_RULES: dict[str, list[tuple[str, str]]] = {
    # SimCLR v2 as converted from TensorFlow (Separius/SimCLRv2-Pytorch); without selective kernels.
    "net.0.0.weight": [
        (r"net\.0\.0\.(.+)", r"conv1.\1"),
        (r"net\.0\.1\.0\.(.+)", r"bn1.\1"),
        *[(rf"net\.(\d)\.blocks\.(\d+)\.net\.{2 * i}\.(\w+)", rf"layer\1.\2.conv{i + 1}.\3") for i in range(3)],
        *[(rf"net\.(\d)\.blocks\.(\d+)\.net\.{2 * i + 1}\.0\.(\w+)", rf"layer\1.\2.bn{i + 1}.\3") for i in range(3)],
        (r"net\.(\d)\.blocks\.(\d+)\.projection\.shortcut\.(\w+)", r"layer\1.\2.downsample.0.\3"),
        (r"net\.(\d)\.blocks\.(\d+)\.projection\.bn\.0\.(\w+)", r"layer\1.\2.downsample.1.\3"),
    ],
    # lightly's examples: a Sequential of torchvision's children.
    "backbone.4.0.conv1.weight": [
        (r"backbone\.0\.(.+)", r"backbone.conv1.\1"),
        (r"backbone\.1\.(.+)", r"backbone.bn1.\1"),
        *[(rf"backbone\.{i + 3}\.(.+)", rf"backbone.layer{i}.\1") for i in range(1, 5)],
    ],
}
# Where other projects than MoCo's keep their tensors in a checkpoint.
_PLACES = (("resnet",), ("classy_state_dict", "base_model", "model", "trunk"))  # SimCLR v2, VISSL


def renamed(tensors: Mapping[str, T]) -> dict[str, T]:
    """``tensors`` by torchvision's names, if they have those of a known project; others stay as they are."""
    rules = next((rules for sign, rules in _RULES.items() if sign in tensors), [])

    def name(given: str) -> str:
        return next((re.sub(pattern, new, given) for pattern, new in rules if re.fullmatch(pattern, given)), given)

    return {name(given): value for given, value in tensors.items()}


def nested(content: Mapping[str, Any]) -> Any:
    """The part of a checkpoint that holds the tensors, or ``content`` itself."""
    for place in _PLACES:
        part: Any = content
        for key in place:
            part = part.get(key) if isinstance(part, Mapping) else None
        if isinstance(part, Mapping):
            return part
    return content
