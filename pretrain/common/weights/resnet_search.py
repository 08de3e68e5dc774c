"""Finds every ResNet among the tensors of a file, whatever its prefix, under the names of several projects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..errors import shorten_list
from .file import WRAPPERS
from .resnet_names import invert_names, to_transformers

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # of snake_case and camelCase
# Words in a prefix -> which of a method's two encoders it is. VISSL's key encoders are in its losses; t is a teacher.
_SIDES = {
    **dict.fromkeys(("key", "k", "momentum", "mom", "teacher", "target", "t", "loss", "criterion"), "key"),
    **dict.fromkeys(("query", "q", "online", "student"), "query"),
}
_AVERAGES = {"ema", "swa", "average", "averaged", "avg"}
# Names in a file of self-distillation (DINO, iBOT, EsViT), whose loss centers the teacher's outputs.
_SELF_DISTILLATION = re.compile(r"(dino|ibot)\w*loss|(loss|criterion)\w*\.(.+\.)?center")
# Modules that change the features, if they stand next to the ResNet's own; any other is a head.
_BODY = re.compile(r"(conv|bn|gn|norm|layer|block|stage|res)_?\d|stem|maxpool|relu|act\d?\.|adapter|lora|prompt")
# Names of tensors that no supported ResNet has -> what the file contains, and what to do.
_KINDS = {
    r"lora_|adapter": "adapters such as LoRA; merge them into the weights and save these",
    r"flat_param": "a shard of FSDP; gather the full state dict and save it",
    r"/~/|(^|\.)(kernel|w|_mean)$": "weights of JAX, PaddlePaddle or TensorFlow; convert them to PyTorch first",
    r"(^|\.)conv1_w$": "a ResNet in Caffe2's names; convert it with tools/convert_to_d2.py",
    r"^stem\.bn1\.": "a ResNet of maskrcnn-benchmark, whose stride and channels the file does not record",
    r"\.IN\.weight$": "an IBN-Net, which is not read",
    r"attn\.|attention|cls_token": "a transformer; only ResNets are read",
    r"^conv1\.\d|stem\.\d|^(conv|bn)[23]\.|downsample\.[23]\.": "a ResNet-D or another stem, which are not read",
    r"\.se\.|main_conv|\.convs\.": "an SE-ResNet or another variant, which are not read",
}


@dataclass(frozen=True, eq=False)
class Network:
    """A ResNet in a file, complete or not.

    Attributes:
        prefix: the prefix of its tensors' names in the file.
        state: the tensors that its features depend on, under torchvision's names; an adapter and another stem keep
            their names.
        names: the names of these tensors in the file.
    """

    prefix: str
    state: dict[str, Tensor]
    names: frozenset[str]

    @property
    def side(self) -> str:
        """Encoder of a method that the last such word in its prefix names: query | key, or "" if none does."""
        return next((_SIDES[word] for word in reversed(self._words()) if word in _SIDES), "")

    @property
    def is_average(self) -> bool:
        """Return whether its prefix says that its weights are an average over steps."""
        return not _AVERAGES.isdisjoint(self._words())

    @property
    def is_student(self) -> bool:
        """Return whether its prefix says that it is the student of a method with a teacher."""
        return "student" in self._words()

    def equals(self, other: Network) -> bool:
        """Return whether both have bitwise equal tensors."""
        if self.state.keys() != other.state.keys():
            return False
        return all(torch.equal(tensor, other.state[name]) for name, tensor in self.state.items())

    def _words(self) -> list[str]:
        return [word.lower() for word in _WORD.findall(self.prefix)]


def find_networks(tensors: Mapping[str, Tensor]) -> list[Network]:
    """Find every ResNet of which ``tensors`` has the first block; it gets all tensors that change its features."""
    moved = {name: _move_into_resnet(name) for name in tensors}
    stored = {name if target in tensors else target: name for name, target in moved.items()}
    networks: list[Network] = []
    for table in _build_tables():
        modules = {name.split(".")[0] for name in table}
        anchor = next(name for name, target in table.items() if target == "layer1.0.bn1.weight").removesuffix("weight")
        matches = (re.fullmatch(rf"(|.*\.){re.escape(anchor)}\w+", name) for name in stored)
        for prefix in dict.fromkeys(match[1] for match in matches if match):
            body: dict[str, str] = {}
            for name in stored:
                short = name.removeprefix(prefix)
                is_body = short.split(".")[0] in modules or _BODY.match(short)
                if name.startswith(prefix) and is_body and not short.startswith("stem.fc."):  # Detectron2's classifier
                    body[table.get(short, short)] = stored[name]
            state = {name: tensors[original] for name, original in body.items()}
            networks.append(Network(prefix, state, frozenset(body.values())))
    return networks


def select_by_prefix(networks: Sequence[Network], prefix: str) -> Sequence[Network]:
    """Return the networks of this prefix, else those whose prefix begins with it, else those whose prefix contains it.

    ``.`` means no prefix; an empty ``prefix`` means all networks.
    """
    if not prefix:
        return networks
    for dropped in (("", "*"), ("", "*", *WRAPPERS)):  # a prefix may be written as in the file, or as in the docs
        dotted = "." + "".join(f"{part}." for part in prefix.split(".") if part not in dropped)
        for fits in (str.__eq__, str.startswith, str.__contains__):
            matching = [network for network in networks if fits(f".{network.prefix}", dotted)]
            if matching:
                return matching
    return []


def find_teachers(networks: Sequence[Network], names: Iterable[str]) -> list[Network]:
    """Return the networks other than the student in a file of self-distillation; its authors evaluate the teacher.

    A student next to its teacher does not suffice: other methods distill a teacher into the student that they evaluate.

    Args:
        names: the names of all tensors and entries of the file.

    Returns:
        An empty list for a file of any other method.
    """
    if not any(network.is_student for network in networks) or not any(map(_SELF_DISTILLATION.search, names)):
        return []
    return [network for network in networks if not network.is_student]


def describe_kind(tensors: Iterable[str]) -> str:
    """Say what tensors with these names are, and what to do, for an error; return "" if that is unknown."""
    for pattern, description in _KINDS.items():
        if any(re.search(pattern, name) for name in tensors):
            return f": {description}"
    return ""


def summarize_unread(tensors: Iterable[str], networks: Sequence[Network], chosen: Network) -> str:
    """List the modules and other networks in a file that are not part of the ``chosen`` one, in short."""
    prefixes = [other.prefix for other in networks if other.prefix not in ("", chosen.prefix)]
    modules: dict[str, list[str]] = {}
    for name in tensors:
        if name not in chosen.names:
            parents = chosen.prefix.split(".")[:-1]
            while parents and not name.startswith(".".join(parents) + "."):
                parents.pop()
            short = name.removeprefix("".join(f"{parent}." for parent in parents))
            module = ".".join(short.split(".")[:-1][:2]) or short
            other = next((prefix[:-1] for prefix in prefixes if name.startswith(prefix)), module)
            modules.setdefault(other, []).append(short)
    return shorten_list([shorts[0] if len(shorts) == 1 else module for module, shorts in modules.items()])


def _move_into_resnet(name: str) -> str:
    """Move the last stage out of the head of Detectron2's C4 detectors, and a stem out of a module ``layer0``."""
    name = re.sub(r"(^|\.)roi_heads\.res5\.(?!norm\.)", r"\1backbone.res5.", name)
    name = re.sub(r"(^|\.)layer0\.(0|conv1)\.weight$", r"\1conv1.weight", name)
    return re.sub(r"(^|\.)layer0\.(1|bn1)\.", r"\1bn1.", name)


@cache
def _build_tables() -> list[dict[str, str]]:
    """Return for each project a table of its name of every tensor -> torchvision's."""
    from_detectron2 = invert_names()
    names = from_detectron2.values()
    # SupContrast, TCL and most ResNets for CIFAR have `shortcut`.
    plain = {name.replace("downsample", part): name for part in ("downsample", "shortcut") for name in names}
    return [
        plain,
        from_detectron2,
        {to_transformers(detectron2): name for detectron2, name in from_detectron2.items()},
        {_rename_to_simclr_v2(name): name for name in names},
        *({_rename_to_sequential(alias, first): name for alias, name in plain.items()} for first in (4, 3, 2)),
        {_rename_to_obow(name): name for name in names},
    ]


def _rename_to_sequential(name: str, first: int) -> str:
    """Rename to a Sequential of torchvision's children: ``first`` is 4, or less without ReLU and max pooling."""
    name = re.sub(r"^layer(\d)", lambda m: str(int(m[1]) + first - 1), name)
    return re.sub(r"^conv1", "0", re.sub(r"^bn1", "1", name))


def _rename_to_obow(name: str) -> str:
    """Rename to OBoW's list: a stem module, then torchvision's layers."""
    return re.sub(r"^layer", "", re.sub(r"^conv1", "0.Conv", re.sub(r"^bn1", "0.bn", name)))


def _rename_to_simclr_v2(name: str) -> str:
    """Rename to SimCLR v2 as converted from TensorFlow (Separius/SimCLRv2-Pytorch), without selective kernels."""
    name = re.sub(r"^conv1\.", "net.0.0.", re.sub(r"^bn1\.", "net.0.1.0.", name))
    name = re.sub(r"^layer(\d)\.(\d+)", r"net.\1.blocks.\2", name)
    name = re.sub(r"\.conv(\d)", lambda m: f".net.{2 * int(m[1]) - 2}", name)
    name = re.sub(r"\.bn(\d)", lambda m: f".net.{2 * int(m[1]) - 1}.0", name)
    return name.replace("downsample.0", "projection.shortcut").replace("downsample.1", "projection.bn.0")
