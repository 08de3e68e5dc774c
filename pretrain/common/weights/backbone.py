"""Reads a ResNet backbone from any file that holds a complete one, under torchvision's names.

Checkpoints, state dicts and detectors of any project, whatever lies beside the ResNet (docs/reference/layouts.md lists
what was tried); `.pth` in the old and the zip format, `.pkl` and `.safetensors`.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config.yaml_io import parse_yaml
from ..errors import UserError, shorten_list
from . import checkpoint
from .file import COUNTER, WeightsFile, check_values, read_weights_file
from .resnet_names import DEPTHS, is_bottleneck
from .resnet_search import Network, describe_kind, find_networks, summarize_unread, with_prefix


@dataclass(frozen=True)
class BackboneFile:
    """A backbone as read.

    Attributes:
        arch: resnet18 | resnet34 | resnet50 | resnet101.
        stem: imagenet (7x7) | cifar (3x3).
        state_dict: every tensor of the backbone, float32, torchvision's names, no classifier.
        provenance: plain values: source, source_sha256, prefix, encoder, arch, stem, method, epoch, step, config.
        unread: the other tensors of the file, in a short list.
    """

    arch: str
    stem: str
    state_dict: dict[str, Tensor]
    provenance: dict[str, Any]
    unread: str


def read_backbone(path: str | Path, encoder: str = "query") -> BackboneFile:
    """Reads the backbone from ``path`` (a run folder's newest checkpoint, or a file); see `extract_backbone`.

    Raises:
        UserError: a file that is missing, damaged or changed since its conversion, or what `extract_backbone` refuses.
    """
    file = read_weights_file(checkpoint.resolve(path))
    backbone = extract_backbone(file, encoder)
    trained_with = file.provenance.get  # of a conversion
    if trained_with("INPUT.FORMAT") == "BGR" or (
        trained_with("MODEL.RESNETS.STRIDE_IN_1X1") and is_bottleneck(backbone.arch)
    ):
        raise UserError(
            f"{path} was trained on BGR images, or with its stride in the 1x1 convolution; this ResNet expects RGB and "
            "strides in the 3x3, so these weights would compute wrong features here; use them for detectors only"
        )
    return backbone


def extract_backbone(file: WeightsFile, encoder: str = "query", prefix: str = "") -> BackboneFile:
    """The backbone in ``file``.

    Args:
        encoder: which of a momentum method's two encoders: query | key.
        prefix: of its tensors, where the file holds several networks, or a part of it; ``.``: none.

    Raises:
        UserError: no ResNet or several, or a missing, unknown, wrong-shaped or non-finite tensor, by its name.
    """
    path, networks = file.path, find_networks(file.tensors)
    if not networks:
        kind = describe_kind(file.tensors) or f"; its tensors are {shorten_list(list(file.tensors))}"
        raise UserError(f"{path} holds no ResNet{kind}")
    network = _choose_network(networks, encoder, prefix, path)
    arch, stem, shapes = check_structure(network.state, path)
    named = file.content.get("arch")
    if isinstance(named, str) and named in DEPTHS and named != arch and not prefix:
        raise UserError(f"{path} says arch {named}, but its tensors are those of a {arch}")
    if stem == "cifar":
        _check_padding(file, network)
    counters = {name: torch.zeros((), dtype=torch.long) for name in shapes if name.endswith(COUNTER)}  # old files lack
    tensors = counters | network.state
    state = {
        name: check_values(tensors[name].reshape(shape), name, path).contiguous() for name, shape in shapes.items()
    }
    side = network.side or ("query" if any(other.side == "key" for other in networks) else "")
    provenance = _provenance(file, network.prefix, side, arch, stem)
    return BackboneFile(arch, stem, state, provenance, summarize_unread(file.tensors, networks, network))


def infer_arch(state: Mapping[str, Tensor], path: str | Path) -> str:
    """The ResNet that has the blocks in ``state``, by their number and kind; UserError if none has."""
    blocks = {tuple(name.split(".")[:2]) for name in state if name.startswith("layer") and name.count(".") > 1}
    counts = Counter(layer for layer, _ in blocks)
    depths = tuple(counts[f"layer{i}"] for i in range(1, 5))
    bottleneck = any(".conv3." in name for name in state)
    for arch, wanted in DEPTHS.items():
        if depths == wanted and bottleneck == is_bottleneck(arch):
            return arch
    kind = "bottleneck" if bottleneck else "basic"
    larger = " (a ResNet-152)" if depths == (3, 8, 36, 3) else ""
    raise UserError(f"{path}: no ResNet-18/34/50/101 has {depths} {kind} blocks in layer1-layer4{larger}")


def check_structure(state: Mapping[str, Tensor], path: str | Path) -> tuple[str, str, dict[str, torch.Size]]:
    """The arch, stem and shapes of the ResNet whose tensors ``state`` holds, all of them and no others.

    Raises:
        UserError: the first tensors that are missing, unknown or wrong-shaped; counters may be missing.
    """
    import torchvision  # slow to import

    arch = infer_arch(state, path)
    shapes = dict(_shapes(getattr(torchvision.models, arch)))
    stem = "cifar" if "conv1.weight" in state and state["conv1.weight"].shape[-1:] == (3,) else "imagenet"
    if stem == "cifar":
        shapes["conv1.weight"] = torch.Size((shapes["conv1.weight"][0], 3, 3, 3))
    if unknown := [name for name in state if name not in shapes]:
        raise UserError(f"{path} holds {shorten_list(unknown)}, which a {arch} does not have{describe_kind(unknown)}")
    if missing := [name for name in shapes if name not in state and not name.endswith(COUNTER)]:
        raise UserError(f"{path} lacks {shorten_list(missing)} of a {arch}")
    for name, tensor in state.items():
        if tensor.shape != shapes[name] and not (name.endswith(COUNTER) and tensor.numel() == 1):
            raise UserError(
                f"{path}: {name} has shape {tuple(tensor.shape)}, a {arch} needs {tuple(shapes[name])}; only plain "
                "ResNets for RGB images are read, no ResNeXt and no wide ResNet"
            )
    return arch, stem, shapes


@cache
def _shapes(build: Callable[..., nn.Module]) -> dict[str, torch.Size]:
    with torch.device("meta"):
        resnet = build(weights=None).state_dict()
    return {name: tensor.shape for name, tensor in resnet.items() if not name.startswith("fc.")}


def _choose_network(networks: Sequence[Network], encoder: str, prefix: str, path: Path) -> Network:
    """The network that is asked for: by default any but a key encoder, which is read only where there is no other."""
    if encoder not in ("query", "key"):
        raise UserError(f"encoder {encoder!r} is not one of query, key")
    candidates = with_prefix(networks, prefix)
    keys = [network for network in candidates if network.side == "key"]
    if encoder == "key":
        chosen = keys or [network for network in candidates if network.is_average]
    else:
        chosen = [network for network in candidates if network not in keys] or keys
        if any(network.side or "base_" in network.prefix for network in chosen):  # then an average is the key encoder
            chosen = [network for network in chosen if network.side or not network.is_average]
    archs = {network: _arch(network, path) for network in networks}
    if not chosen:
        asked = f"ResNet under the prefix {prefix}" if not candidates else "key encoder"
        raise UserError(f"{path} holds no {asked}; it holds {_listed(archs)}")
    distinct: list[Network] = []
    for network in [n for n in chosen if archs[n]] or [max(chosen, key=lambda network: len(network.state))]:
        if not any(network.equals(other) for other in distinct):
            distinct.append(network)
    if len(distinct) > 1:
        averages = ", one of them an average of weights" if any(network.is_average for network in distinct) else ""
        raise UserError(
            f"{path} holds several ResNets{averages}: {_listed({network: archs[network] for network in distinct})}; "
            f"choose one: python tools/convert_to_d2.py {path} OUTPUT.pth --prefix PREFIX (with --to-torchvision for "
            "pretraining and probes)"
        )
    return distinct[0]


def _arch(network: Network, path: Path) -> str:
    """The arch of a complete network; or empty."""
    with contextlib.suppress(UserError):
        return check_structure(network.state, path)[0]
    return ""


def _listed(archs: Mapping[Network, str]) -> str:
    return shorten_list([f"{network.prefix[:-1] or '.'} ({arch or 'incomplete'})" for network, arch in archs.items()])


def _check_padding(file: WeightsFile, network: Network) -> None:
    """Refuses a ResNet of solo-learn for CIFAR, by the names that its training checkpoints have."""
    parent = re.fullmatch(r"(.*\.)?(momentum_)?(backbone|encoder)\.", network.prefix)
    if parent and f"{parent[1] or ''}classifier.weight" in file.tensors:
        raise UserError(
            f"{file.path} has the names of a solo-learn checkpoint for CIFAR, whose 3x3 stem pads by 2 pixels; here it "
            "pads by 1, so these weights would compute other features; use them in solo-learn, or, if yours pads by 1, "
            "save the state dict of its ResNet alone"
        )


def _provenance(file: WeightsFile, prefix: str, encoder: str, arch: str, stem: str) -> dict[str, Any]:
    content, earlier = file.content, file.provenance
    provenance: dict[str, Any] = {
        "source": file.path.name,
        "source_sha256": file.sha256,
        "prefix": earlier.get("prefix", prefix),
        "encoder": encoder or earlier.get("encoder", ""),
        "arch": arch,
        "stem": stem,
    }
    config = content.get("config")
    method: Any = content.get("method")
    if isinstance(config, str):
        provenance["config"] = config
        # It may be another project's config, or no config at all; then it is kept as it is.
        with contextlib.suppress(LookupError, TypeError, ValueError):
            method = parse_yaml(config)["METHOD"]["NAME"]
    if isinstance(method, str):
        provenance["method"] = method
    for key in ("epoch", "step") if "fine_tuned_on" not in earlier else ():  # those of a fine-tuning are its own
        if isinstance(content.get(key), int):
            provenance[key] = content[key]
    return {**earlier, **provenance, "earlier_source": earlier.get("source")} if earlier else provenance
