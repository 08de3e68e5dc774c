"""Reads a ResNet backbone from any file that may hold one, under torchvision's names.

It reads MoCo's, JCL's and this project's checkpoints, those of other projects (docs/reference/files.md lists them),
torchvision's and plain state dicts, and detectors of torchvision and Detectron2; `.pth` in the old and the zip format,
`.pkl` and `.safetensors`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import checkpoint
from .config_io import parse_yaml
from .errors import UserError, shortlist
from .key_renaming import renamed
from .resnet_names import DEPTHS, is_bottleneck, to_torchvision
from .weights_file import COUNTER, WeightsFile, check_values, read_weights_file

_ENCODERS = {"query": "encoder_q", "key": "encoder_k"}
_WRAPPERS = ("module", "_orig_mod")  # DistributedDataParallel, torch.compile
# The longest that fits wins.
_ROOTS = ("backbone.bottom_up.", "backbone.body.", "backbone.", "encoder.", "_feature_blocks.", "")
_PARTS = ("conv1.", "bn1.", "layer1.", "layer2.", "layer3.", "layer4.", "stem.", "res2.", "res3.", "res4.", "res5.")
_HEADS = (  # heads and necks, which are dropped on purpose
    *("fc", "head", "projector", "predictor", "linear", "fpn", "neck", "classifier", "dense"),
    *("projection_head", "prototypes", "head_jig", "jigsaw"),  # SwAV and DeepCluster v2; PIRL
)
_OTHERS = (  # outside the backbone: MoCo's queues and other encoder, those of solo-learn and lightly; a detector's
    *("queue", "queue_ptr", "dense_negatives", "encoder_q", "encoder_k", "backbone", "pixel_mean", "pixel_std"),
    *("momentum_backbone", "momentum_projector", "momentum_classifier"),
    *("backbone_momentum", "projection_head_momentum"),
    *("proposal_generator", "roi_heads", "rpn", "anchor_generator"),
)


@dataclass(frozen=True)
class BackboneFile:
    """A backbone as read.

    Attributes:
        arch: resnet18 | resnet34 | resnet50 | resnet101.
        stem: imagenet (7x7) | cifar (3x3).
        state_dict: every tensor of the backbone, float32, torchvision's names, no classifier.
        provenance: plain values: source, source_sha256, encoder, arch, stem, method, epoch, step, config (YAML text).
    """

    arch: str
    stem: str
    state_dict: dict[str, Tensor]
    provenance: dict[str, Any]


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


def extract_backbone(file: WeightsFile, encoder: str = "query") -> BackboneFile:
    """The backbone in ``file``.

    Args:
        encoder: which of a momentum method's two encoders: query | key.

    Raises:
        UserError: a missing, unknown, wrong-shaped or non-finite tensor, by its name.
    """
    path = file.path
    picked, chosen = _pick_backbone(file, encoder)
    picked = to_torchvision(picked)
    arch = infer_arch(picked, path)
    named = file.content.get("arch")
    if isinstance(named, str) and named in DEPTHS and named != arch:
        raise UserError(f"{path} says arch {named}, but its tensors are those of a {arch}")
    conv1 = picked.get("conv1.weight")
    stem = "cifar" if conv1 is not None and conv1.shape[-1:] == (3,) else "imagenet"
    state = check_tensors(picked, arch, stem, path)
    return BackboneFile(arch, stem, state, _provenance(file, chosen, arch, stem))


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
    raise UserError(f"{path}: no ResNet-18/34/50/101 has {depths} {kind} blocks in layer1-layer4")


def check_tensors(state: Mapping[str, Tensor], arch: str, stem: str, path: str | Path) -> dict[str, Tensor]:
    """``state`` as float32 in torchvision's order, after every check; counters that an old file lacks are 0.

    Raises:
        UserError: the first tensors that are missing, unknown, wrong-shaped, not finite, or a variance below 0.
    """
    import torchvision  # slow to import

    with torch.device("meta"):
        resnet = getattr(torchvision.models, arch)(weights=None).state_dict()
    shapes = {name: tensor.shape for name, tensor in resnet.items() if not name.startswith("fc.")}
    if stem == "cifar":
        shapes["conv1.weight"] = torch.Size((shapes["conv1.weight"][0], 3, 3, 3))
    if missing := [name for name in shapes if name not in state and not name.endswith(COUNTER)]:
        raise UserError(f"{path} lacks {shortlist(missing)} of a {arch}")
    if unknown := [name for name in state if name not in shapes]:
        raise UserError(f"{path} holds {shortlist(unknown)}, which a {arch} does not have")
    checked: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        tensor = state[name].detach() if name in state else torch.zeros((), dtype=torch.long)
        if name.endswith(COUNTER) and tensor.numel() == 1:
            tensor = tensor.reshape(())
        if tensor.shape != shape:
            raise UserError(f"{path}: {name} has shape {tuple(tensor.shape)}, a {arch} needs {tuple(shape)}")
        checked[name] = check_values(tensor, name, path).contiguous()
    return checked


def _pick_backbone(file: WeightsFile, encoder: str) -> tuple[dict[str, Tensor], str]:
    """The tensors of one encoder's backbone, without prefixes, and which encoder it was ("": the only one)."""
    path = file.path
    if encoder not in _ENCODERS:
        raise UserError(f"encoder {encoder!r} is not one of query, key")
    clean = renamed({
        ".".join(part for part in name.split(".") if part not in _WRAPPERS): tensor
        for name, tensor in file.tensors.items()
    })  # fmt: skip
    prefix = _ENCODERS[encoder] + "."
    pair = [side for side, wanted in _ENCODERS.items() if any(name.startswith(wanted + ".") for name in clean)]
    if not pair and encoder != "query":  # query is the default
        raise UserError(f"{path} holds one encoder, not a query and a key; do not choose {encoder}")
    if pair and encoder not in pair:
        raise UserError(f"{path} holds no {encoder} encoder; it has only the {pair[0]} encoder")
    within = {name[len(prefix) :]: t for name, t in clean.items() if name.startswith(prefix)} if pair else clean
    root = next((r for r in _ROOTS if any(name.startswith(r + part) for name in within for part in _PARTS)), None)
    if root is None:
        raise UserError(f"{path} holds no ResNet; its tensors are {shortlist(list(file.tensors)) or 'none'}")
    picked: dict[str, Tensor] = {}
    for name, tensor in within.items():
        inside = name.startswith(root)
        short = name[len(root) :] if inside else name
        if inside and short.startswith(_PARTS):
            picked[short] = tensor
        elif short.split(".")[0] not in (_HEADS if inside and root else (*_HEADS, *_OTHERS)):
            raise UserError(f"{path} holds {name}, which belongs neither to a ResNet nor to a known head")
    return picked, encoder if pair else ""


def _provenance(file: WeightsFile, encoder: str, arch: str, stem: str) -> dict[str, Any]:
    content, earlier = file.content, file.provenance
    provenance: dict[str, Any] = {
        "source": file.path.name,
        "source_sha256": file.sha256,
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
