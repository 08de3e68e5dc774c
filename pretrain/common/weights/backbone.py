"""Reads a ResNet backbone from any file that contains a complete one, under torchvision's names.

The file may be a checkpoint, a state dict or a detector of any project, with any other tensors next to the ResNet
(docs/reference/layouts.md lists what was tried): `.pth` in the old and the zip format, `.pkl` or `.safetensors`.
"""

import contextlib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torchvision
from torch import Tensor

from ..errors import UserError, shorten_list
from ..files import check_not_sharded
from .checkpoint import list_checkpoints, load_first_undamaged
from .file import COUNTER, FOR_PRETRAINING, WeightsFile, check_values, read_weights_file
from .provenance import Provenance
from .resnet_names import DEPTHS, infer_arch, is_bottleneck, list_shapes
from .resnet_search import Network, describe_kind, find_networks, find_teachers, select_by_prefix, summarize_unread

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BackboneFile:
    """A backbone read from a file.

    Attributes:
        arch: resnet18 | resnet34 | resnet50 | resnet101.
        stem: imagenet (7x7) | cifar (3x3).
        state_dict: every tensor of the backbone as float32, under torchvision's names, without the classifier.
        provenance: where it comes from.
        unread: a short list of the other tensors in the file.
        choice: which network of a pair it is, and what reads the other one; empty for other files.
    """

    arch: str
    stem: str
    state_dict: dict[str, Tensor]
    provenance: Provenance
    unread: str
    choice: str


def read_backbone(path: str | Path, encoder: str = "query") -> BackboneFile:
    """Read the backbone from ``path``, a file or a run folder with checkpoints; see `extract_backbone`.

    Raises:
        UserError: the file is missing, damaged or changed since its conversion, or `extract_backbone` refuses it.
    """
    file = _read_newest(Path(path)) if os.path.isdir(path) else read_weights_file(path)
    backbone = extract_backbone(file, encoder)
    if backbone.provenance.encoder == "teacher":
        log.info(f"{path}: {backbone.choice.partition(';')[0]}")
    trained_with = backbone.provenance.input
    assert trained_with is not None
    has_stride_in_1x1 = is_bottleneck(backbone.arch) and bool(trained_with.stride_in_1x1)
    if has_stride_in_1x1 or trained_with.format not in (None, "RGB"):
        stride = " and with its stride in the 1x1 convolution" if has_stride_in_1x1 else ""
        problem = f"was trained on {trained_with.format or 'RGB'} images{stride}"
        raise UserError(f"{path} {problem}, so its features would be wrong here; use it for detectors only")
    return backbone


def _read_newest(folder: Path) -> WeightsFile:
    """Read the newest undamaged checkpoint in a run folder of pretraining."""
    newest = load_first_undamaged(folder, list_checkpoints(folder), read_weights_file)
    if newest is None:
        check_not_sharded(folder)
        raise UserError(f"{folder} contains no checkpoint_*.pth; pass a run folder of pretraining or a checkpoint file")
    return newest[1]


def extract_backbone(file: WeightsFile, encoder: str = "query", prefix: str = "") -> BackboneFile:
    """Return the backbone in ``file``.

    Args:
        encoder: which of a momentum method's two encoders: query | key.
        prefix: the prefix of its tensors or a part of it, if the file contains several networks; ``.`` means no prefix.

    Raises:
        UserError: no ResNet or several, or a missing, unknown, wrong-shaped or non-finite tensor, by its name.
    """
    path = file.path
    networks = find_networks(file.tensors)
    if not networks:
        kind = describe_kind(file.tensors) or f" ({shorten_list(list(file.tensors))}); pass one, such as a checkpoint"
        raise UserError(f"{path} contains no ResNet{kind}")
    teachers = find_teachers(networks, [*file.tensors, *map(str, file.content)])
    network = _choose_network(networks, teachers, encoder, prefix, path)
    arch, stem, shapes = check_structure(network.state, path)
    recorded_arch = file.content.get("arch")
    if isinstance(recorded_arch, str) and recorded_arch in DEPTHS and recorded_arch != arch and not prefix:
        raise UserError(f"{path} records arch {recorded_arch}, but contains a {arch}; correct its entry arch")
    if stem == "cifar":
        _check_padding(file, network)
    counters = {name: torch.zeros((), dtype=torch.long) for name in shapes if name.endswith(COUNTER)}  # old files lack
    tensors = counters | network.state
    values = {name: check_values(tensors[name], name, path).reshape(shape) for name, shape in shapes.items()}
    # A copy, because a file that is written from tensors with a common storage contains all of that storage.
    state = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in values.items()}
    side = network.side or ("query" if any(other.side == "key" for other in networks) else "")
    side = "teacher" if network in teachers else side
    names = {"arch": arch, "stem": stem, "prefix": network.prefix, "encoder": side}
    provenance = Provenance.from_checkpoint(path.name, file.sha256, file.content, file.provenance, **names)
    unread = summarize_unread(file.tensors, networks, network)
    return BackboneFile(arch, stem, state, provenance, unread, _describe_choice(network, networks, side, prefix))


def check_structure(state: Mapping[str, Tensor], path: str | Path) -> tuple[str, str, dict[str, torch.Size]]:
    """Return arch, stem and shapes of the ResNet of which ``state`` has all tensors and no others.

    Raises:
        UserError: the first tensors that are missing, unknown or wrong-shaped; counters may be missing.
    """
    arch = infer_arch(state, path)
    shapes = dict(list_shapes(getattr(torchvision.models, arch)))
    stem = "cifar" if "conv1.weight" in state and state["conv1.weight"].shape[-1:] == (3,) else "imagenet"
    if stem == "cifar":
        shapes["conv1.weight"] = torch.Size((shapes["conv1.weight"][0], 3, 3, 3))
    unknown = [name for name in state if name not in shapes]
    if unknown:
        kind = describe_kind(unknown) or "; pass the weights of a plain ResNet"
        raise UserError(f"{path} contains {shorten_list(unknown)}, which a {arch} does not have{kind}")
    missing = [name for name in shapes if name not in state and not name.endswith(COUNTER)]
    if missing:
        remedy = "pass a file with the whole network"
        if not any(".running_" in name for name in state):
            remedy = "its norms have no running statistics (such as group norm), and only batch norm with them is read"
        raise UserError(f"{path} lacks {shorten_list(missing)} of a {arch}; {remedy}")
    for name, tensor in state.items():
        if tensor.shape != shapes[name] and not (name.endswith(COUNTER) and tensor.numel() == 1):
            problem = f"{name} has shape {tuple(tensor.shape)}, a {arch} needs {tuple(shapes[name])}"
            raise UserError(f"{path}: {problem}; pass a plain ResNet for RGB images, no ResNeXt, no wide ResNet")
    return arch, stem, shapes


def _choose_network(
    networks: Sequence[Network], teachers: Sequence[Network], encoder: str, prefix: str, path: Path
) -> Network:
    """Return the requested network.

    By default, it is the teacher of self-distillation. Any other key encoder is read only if there is no other network.
    """
    if encoder not in ("query", "key"):
        raise UserError(f"encoder is {encoder!r}; choose query or key")
    candidates = select_by_prefix(networks, prefix)
    keys = [network for network in candidates if network.side == "key"]
    if any(network in teachers for network in candidates):
        matching = [network for network in candidates if network in teachers]
    elif encoder == "key":
        matching = keys or [network for network in candidates if network.is_average]
    else:
        matching = [network for network in candidates if network not in keys] or keys
        if any(network.side or "base_" in network.prefix for network in matching):  # an average is then the key encoder
            matching = [network for network in matching if network.side or not network.is_average]
    archs = {network: _find_arch(network, path) for network in networks}
    if not matching:
        missing = f"ResNet under the prefix {prefix}" if not candidates else "key encoder"
        raise UserError(f"{path} contains no {missing}; choose one of those that it contains: {_list(archs)}")
    complete = [network for network in matching if archs[network]]
    distinct: list[Network] = []
    for network in complete or [max(matching, key=lambda network: len(network.state))]:
        if not any(network.equals(other) for other in distinct):
            distinct.append(network)
    if len(distinct) > 1:
        averages = ", one of them an average of weights" if any(network.is_average for network in distinct) else ""
        names = _list({network: archs[network] for network in distinct})
        command = f"python tools/convert_to_d2.py {path} OUTPUT.pth --prefix PREFIX"
        raise UserError(f"{path} contains several ResNets{averages}: {names}; choose one: {command}{FOR_PRETRAINING}")
    return distinct[0]


def _describe_choice(network: Network, networks: Sequence[Network], side: str, prefix: str) -> str:
    """Say which network of a pair is read, and what option reads the other one; return "" if there is no pair."""
    not_chosen = [other for other in networks if other is not network]
    name = network.prefix[:-1] or "."
    if side == "teacher":
        student = next(other for other in not_chosen if other.is_student).prefix[:-1]
        return f"{name} is the teacher, which the method's authors evaluate; --prefix {student} reads the student"
    if prefix or side not in ("query", "key"):
        return ""
    other_side = "key" if side == "query" else "query"
    other = next((other for other in not_chosen if (other.side or "query") == other_side), None)
    return f"{name} is the {side} encoder; --encoder {other_side} reads {other.prefix[:-1] or '.'}" if other else ""


def _find_arch(network: Network, path: Path) -> str:
    """Return the arch of a complete network, "" of any other."""
    with contextlib.suppress(UserError):
        return check_structure(network.state, path)[0]
    return ""


def _list(archs: Mapping[Network, str]) -> str:
    return shorten_list([f"{network.prefix[:-1] or '.'} ({arch or 'incomplete'})" for network, arch in archs.items()])


def _check_padding(file: WeightsFile, network: Network) -> None:
    """Raise UserError for a ResNet of solo-learn for CIFAR, which its training checkpoints' names reveal."""
    parent = re.fullmatch(r"(.*\.)?(momentum_)?(backbone|encoder)\.", network.prefix)
    if parent and f"{parent[1] or ''}classifier.weight" in file.tensors:
        raise UserError(
            f"{file.path} has the names of a solo-learn checkpoint for CIFAR, whose 3x3 stem pads by 2 pixels; here it "
            "pads by 1; use the weights in solo-learn, or, if yours pads by 1, save the state dict of its ResNet alone"
        )
