"""Finds every ResNet among the tensors of a file, whatever its prefix, under the names of several projects."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from .errors import shortlist
from .resnet_names import to_torchvision
from .weights_file import COUNTER, WRAPPERS

T = TypeVar("T")
_Rename = Callable[[Mapping[str, Any]], dict[str, Any]]

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_SIDES = {"key": {"key", "k", "momentum", "teacher", "target"}, "query": {"query", "q", "online", "student"}}
_AVERAGES = {"ema", "swa", "average", "averaged", "avg"}
# What a file holds that no ResNet here has: a name in it -> what that is, and what to do.
_KINDS = (
    (r"lora_|adapter", "adapters such as LoRA; merge them into the weights and save these"),
    (r"_fsdp|flat_param", "FSDP's shards; gather the full state dict and save it"),
    (r"~/|(^|\.)(kernel|w)$", "weights of JAX, Flax or TensorFlow; convert them to PyTorch first"),
    (r"(^|\.)conv1_w$|branch2a_w$", "a ResNet in Caffe2's names, which only tools/convert_to_d2.py reads"),
    (r"attn|attention|cls_token|pos_embed", "a transformer; only ResNet-18, -34, -50 and -101 are read"),
    (r"^conv1\.\d|^stem\.\d|^(conv|bn)[23]\.|downsample\.[23]\.", "a ResNet-D or another with a deep stem; only plain "
     "ResNets are read"),
    (r"\.se\.|\.sk|main_conv|\.convs\.|\.conv4\.", "an SE-ResNet or another variant; only plain ResNets are read"),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Network:
    """A ResNet in a file, complete or not.

    Attributes:
        prefix: of its tensors in the file.
        state: what its features depend on, under torchvision's names; those of an adapter or another stem stay.
        names: under which the file holds them.
    """

    prefix: str
    state: dict[str, Tensor]
    names: frozenset[str]

    @property
    def side(self) -> str:
        """Which of a method's two encoders it is, by its prefix: query | key; empty: not said."""
        return next((side for side, words in _SIDES.items() if words & self._words()), "")

    @property
    def is_average(self) -> bool:
        """Whether its prefix says that its weights are an average over steps."""
        return bool(_AVERAGES & self._words())

    def equals(self, other: Network) -> bool:
        """Whether both compute the same: bitwise equal tensors, whatever their counters."""
        mine, theirs = (
            {name: tensor for name, tensor in network.state.items() if not name.endswith(COUNTER)}
            for network in (self, other)
        )
        return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)

    def _words(self) -> set[str]:
        return {word.lower() for word in _WORD.findall(self.prefix)}


@dataclass(frozen=True)
class _Layout:
    """The names of one project.

    Attributes:
        first_block: matches its names, and what precedes those of the ResNet in group 1.
        body: matches names of what the features depend on; heads and buffers have others.
        rename: gives a ResNet's tensors torchvision's names.
    """

    first_block: str
    body: str
    rename: _Rename


def find_networks(tensors: Mapping[str, Tensor]) -> list[Network]:
    """Every ResNet of which ``tensors`` has the first block, each with all tensors that change its features."""
    # In Detectron2's C4 detectors, the last stage is in the head.
    names = {re.sub(r"(^|\.)roi_heads\.res5\.(?!norm\.)", r"\1backbone.res5.", name): name for name in tensors}
    networks: list[Network] = []
    for layout in _LAYOUTS:
        matches = (re.match(rf"((?:.*?\.)?){layout.first_block}", name) for name in names)
        for prefix in dict.fromkeys(match[1] for match in matches if match):
            within = {name[len(prefix) :]: stored for name, stored in names.items() if name.startswith(prefix)}
            body = layout.rename({name: stored for name, stored in within.items() if re.match(layout.body, name)})
            state = {name: tensors[stored] for name, stored in body.items()}
            networks.append(Network(prefix, state, frozenset(body.values())))
    return networks


def with_prefix(networks: Sequence[Network], prefix: str) -> list[Network]:
    """The networks whose prefix is ``prefix`` (``.``: none), else those whose prefix begins with it or has it inside."""
    parts = [part for part in prefix.split(".") if part and part not in WRAPPERS]
    wanted = f".{''.join(f'{part}.' for part in parts)}"
    fits = (str.__eq__, str.startswith, str.__contains__)
    matches = ([network for network in networks if fit(f".{network.prefix}", wanted)] for fit in fits)
    return next(filter(None, matches), [])


def describe_kind(names: Iterable[str]) -> str:
    """What tensors with these ``names`` are, and what to do, for an error; empty: unknown."""
    return next((f": {what}" for sign, what in _KINDS if any(re.search(sign, name) for name in names)), "")


def summarize_unread(tensors: Iterable[str], networks: Sequence[Network], chosen: Network) -> str:
    """The modules and other networks in a file that are no part of the ``chosen`` one, in a short list."""
    modules: dict[str, list[str]] = {}
    for name in tensors:
        if name not in chosen.names:
            inside = (other.prefix[:-1] for other in networks if other.prefix and name.startswith(other.prefix))
            shared = os.path.commonprefix([name.split("."), chosen.prefix.split(".")[:-1]])
            parts = name.split(".")[len(shared) :]
            other = next((prefix for prefix in inside if prefix != chosen.prefix[:-1]), "")
            modules.setdefault(other or parts[0], []).append(".".join(parts))
    return shortlist([names[0] if len(names) == 1 else module for module, names in modules.items()])


def _by_rules(*rules: tuple[str, str | Callable[[re.Match[str]], str]]) -> _Rename:
    """Renames by the first of the ``rules`` (pattern, replacement) that fits the beginning of a name."""

    def rename(state: Mapping[str, T]) -> dict[str, T]:
        return {_renamed(name): value for name, value in state.items()}

    def _renamed(name: str) -> str:
        for pattern, replacement in rules:
            new, changes = re.subn(f"^{pattern}", replacement, name)
            if changes:
                return new
        return name

    return rename


def _from_sequential(state: Mapping[str, T]) -> dict[str, T]:
    """Renames a Sequential of torchvision's children, with or without ReLU and pooling; what follows is a head."""
    first = min(int(name.split(".")[0]) for name in state if re.match(r"\d\.0\.conv1\.", name))
    modules = {"0": "conv1", "1": "bn1", **{str(first + i): f"layer{i + 1}" for i in range(4)}}
    renamed: dict[str, T] = {}
    for name, value in state.items():
        position, _, rest = name.partition(".")
        if int(position) < first + 4:
            renamed[f"{modules.get(position, position)}.{rest}"] = value
    return _from_torchvision(renamed)


_from_torchvision = _by_rules((r"(layer\d\.\d+)\.shortcut\.", r"\1.downsample."))
_HF_BLOCK = r"encoder\.stages\.(\d)\.layers\.(\d+)\."
_HF_PARTS = {"convolution": "conv", "normalization": "bn"}
_SIMCLR_BLOCK = r"net\.(\d)\.blocks\.(\d+)\."
_LAYOUTS = (
    _Layout(  # torchvision, timm; `shortcut` in SupContrast's and most ResNets for CIFAR
        r"layer1\.0\.",
        r"(conv|bn|gn|norm|layer|block|stage|res)_?\d|stem|maxpool|relu|act\d?\.|adapter|lora|prompt",
        _from_torchvision,
    ),
    _Layout(r"res2\.0\.", r"stem\.(?!fc\.)|res\d", to_torchvision),  # Detectron2
    _Layout(r"[2-4]\.0\.conv1\.", r"\d+\.", _from_sequential),
    _Layout(  # Hugging Face
        r"encoder\.stages\.0\.layers\.0\.",
        r"embedder|encoder",
        _by_rules(
            (r"embedder\.embedder\.(\w+)\.", lambda m: f"{_HF_PARTS.get(m[1], m[1])}1."),
            (
                rf"{_HF_BLOCK}layer\.(\d)\.(\w+)\.",
                lambda m: f"layer{int(m[1]) + 1}.{m[2]}.{_HF_PARTS.get(m[4], m[4])}{int(m[3]) + 1}.",
            ),
            (rf"{_HF_BLOCK}shortcut\.convolution\.", lambda m: f"layer{int(m[1]) + 1}.{m[2]}.downsample.0."),
            (rf"{_HF_BLOCK}shortcut\.normalization\.", lambda m: f"layer{int(m[1]) + 1}.{m[2]}.downsample.1."),
        ),
    ),
    _Layout(  # SimCLR v2 as converted from TensorFlow (Separius/SimCLRv2-Pytorch)
        r"net\.1\.blocks\.0\.",
        r"net\.",
        _by_rules(
            (r"net\.0\.0\.", "conv1."),
            (r"net\.0\.1\.0\.", "bn1."),
            (rf"{_SIMCLR_BLOCK}net\.([024])\.(?=\w+$)", lambda m: f"layer{m[1]}.{m[2]}.conv{int(m[3]) // 2 + 1}."),
            (rf"{_SIMCLR_BLOCK}net\.([135])\.0\.", lambda m: f"layer{m[1]}.{m[2]}.bn{int(m[3]) // 2 + 1}."),
            (rf"{_SIMCLR_BLOCK}projection\.shortcut\.", r"layer\1.\2.downsample.0."),
            (rf"{_SIMCLR_BLOCK}projection\.bn\.0\.", r"layer\1.\2.downsample.1."),
        ),
    ),
)
