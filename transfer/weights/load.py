"""Loads weights into a detector of either engine, and rejects those that do not fit before the first iteration.

Both engines pass their tensors under Detectron2's names (the live storage, which is written in place), so there is one
loader. Detectron2's own prints the same warnings for a good file and for a file from which it loads nothing.
"""

import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import Tensor

from pretrain.common.config.yaml_io import get
from pretrain.common.errors import UserError, shorten_list
from pretrain.common.files import sha256
from pretrain.common.weights.file import COUNTER, Damaged, check_values, read_weights_file
from pretrain.common.weights.provenance import CHECKED_KEYS, Provenance
from pretrain.common.weights.resnet_names import PREFIX, from_c4, infer_arch, to_torchvision

from .caffe2 import from_caffe2
from .locate import conversion_hint, find_weights

_STAGES = ("stem.conv1.", "res2.", "res3.", "res4.", "res5.")
_CLASSIFIER = ("stem.fc.weight", "stem.fc.bias")  # in Detectron2's file of torchvision's ResNet-50
# Not loaded, since they follow from the config. Model-zoo files contain the anchors; the torchvision engine saves none.
_CONFIG_BUFFERS = ("pixel_mean", "pixel_std", "anchor_generator.cell_anchors")
_NAME_A_DETECTOR = "pass a fine-tuned detector (--eval-only --resume evaluates the newest model_*.pth in OUTPUT_DIR)"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Weights:
    """A weights file as read.

    Attributes:
        path: a file or a URL; empty for random initialization.
        sha256: the file's hash.
        state: Detectron2's full names -> tensors.
        provenance: the record of a conversion or, for a detector, of its run folder; None if there is none.
    """

    path: str
    sha256: str
    state: dict[str, Tensor]
    provenance: Provenance | None

    def summary(self) -> dict[str, Any]:
        """Return plain values for results.json: path, sha256 and provenance."""
        provenance = self.provenance.to_json() if self.provenance else {}
        return {"path": self.path, "sha256": self.sha256, "provenance": provenance}


def read_weights(path: str | Path) -> Weights:
    """Read a `.pth`, `.pkl` or `.safetensors` file of a backbone or a whole detector in Detectron2's names.

    The tensors of MSRA's backbones (`detectron2://ImageNetPretrained/MSRA/R-50.pkl`), in Caffe2's names, are renamed.

    Args:
        path: a file, or a URL to download it from.

    Raises:
        UserError: a missing, damaged or changed file, other names, or values that no network can use.
    """
    address = str(path)
    path = find_weights(address)
    if not path:
        return Weights("", "", {}, None)
    try:
        original = read_weights_file(path)
    except Damaged as error:
        if path == address:
            raise
        raise UserError(f"{address}: {error}; check the URL, and delete that file to download it again") from error
    file = from_caffe2(original)
    state = _without_prefix(file.tensors, path)
    if file is not original or file.content.get("matching_heuristics"):  # no prefix, as in Detectron2's own backbones
        state = {(PREFIX + n if n.startswith(_STAGES) else n): t for n, t in state.items() if n not in _CLASSIFIER}
    state = from_c4(state)
    if not any(name.startswith(PREFIX) for name in state):
        names = ", ".join(list(state)[:3]) or "nothing"
        raise UserError(f"{path} contains no {PREFIX}* (it contains {names}, ...); {conversion_hint(path)}")
    for name, tensor in state.items():  # loading would silently turn integers into floating point
        check_values(tensor, name, path)
    return Weights(address, file.sha256, state, file.provenance)


def _without_prefix(tensors: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
    """Return the tensors of the only network in Detectron2's names, without a prefix such as `model.`; or all."""
    anchor = re.compile(r"((?:.*?\.)??)(?:backbone\.)?(?:bottom_up\.)?stem\.conv1\.weight")
    prefixes = list(dict.fromkeys(match[1] for match in map(anchor.fullmatch, tensors) if match))
    if len(prefixes) > 1:
        names = ", ".join(prefix.removesuffix(".") or "." for prefix in prefixes)
        raise UserError(f"{path} has several networks: {names}; save the state dict of one of them, and name that file")
    prefix = prefixes[0] if prefixes else ""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def check_weights_fit(weights: Weights, cfg: CfgNode) -> None:
    """Compare the network and the input that ``cfg`` describes with those of the weights' pretraining.

    Raises:
        UserError: a key of ``cfg`` under which the weights would load but compute other features.
    """
    if not weights.path:
        return
    depth = cfg.MODEL.RESNETS.DEPTH
    backbone = {n.removeprefix(PREFIX): t for n, t in weights.state.items() if n.startswith(PREFIX)}
    arch = infer_arch(to_torchvision(backbone), weights.path)
    if arch != f"resnet{depth}":
        raise UserError(f"{weights.path} contains a {arch}, but MODEL.RESNETS.DEPTH is {depth}; set it to {arch[6:]}")
    recorded = weights.provenance.to_keys() if weights.provenance else {}
    unknown = [key for key in CHECKED_KEYS if key not in recorded]
    if unknown:
        log.info(f"{weights.path} does not record {', '.join(unknown)}, which are not checked")
    for key, expected in recorded.items():
        value = get(cfg, key)
        if key == "MODEL.RESNETS.STRIDE_IN_1X1" and depth < 50:  # basic blocks have no 1x1 to stride in
            continue
        if not _is_close(value, expected):
            problem = f"{key} is {value}, but {weights.path} was pretrained with {expected}"
            raise UserError(f"{problem}; set it to {expected}")


def check_same_weights(path: str, summary: Mapping[str, Any], output_dir: str) -> None:
    """Check that a run is resumed with the weights that it was started with: it would ignore any others.

    The file's content is compared, because run and weights may have been moved. A file that no longer exists passes.

    Args:
        path: MODEL.WEIGHTS. If empty, nothing is compared.
        summary: `Weights.summary` of the weights that the run was started with.

    Raises:
        UserError: ``path`` is another file, or the run was started from random values.
    """
    digest = summary.get("sha256")  # empty for random values
    if "://" in path and digest and path != summary.get("path"):
        path = find_weights(path)
    if not path or (digest and (not os.path.isfile(path) or sha256(path) == digest)):
        return
    initial = f"{summary.get('path')!r} (SHA-256 {digest[:8]}...)" if digest else "random values"
    problem = f"{output_dir} was started from {initial}, and --resume reads its checkpoint"
    remedy = "set MODEL.WEIGHTS '' to resume, or omit --resume to use that file"
    raise UserError(f"MODEL.WEIGHTS is {path!r}, but {problem}; {remedy}")


def load_weights(
    model_state: Callable[[], Mapping[str, Tensor]], weights: Weights, *, require_heads: bool = False
) -> None:
    """Copy ``weights`` into a detector; log the number of loaded tensors and the heads that stay random.

    Args:
        model_state: returns the detector's tensors under Detectron2's names, in its storage (as ``state_dict`` does).
        require_heads: the heads must load too (to resume, or for evaluation only).

    Raises:
        UserError: a tensor of the stem or res2-res5 (with ``require_heads``, any tensor) is missing, has no place in
            the detector or has another shape; nothing was written.
    """
    path = weights.path
    if not path:
        if require_heads:
            raise UserError(f"MODEL.WEIGHTS is empty; {_NAME_A_DETECTOR}")
        log.info("MODEL.WEIGHTS is empty: the backbone is initialized at random")
        return
    target = _select_learned(from_c4(model_state()))
    state = _select_learned(weights.state)
    required = {
        name for name in (*target, *state) if (require_heads or name.startswith(PREFIX)) and not name.endswith(COUNTER)
    }
    remedy = "use the config it was trained with" if require_heads else "check MODEL.RESNETS, or convert again"
    missing = [name for name in target if name not in state and name in required]
    if missing and require_heads and all(name.startswith(PREFIX) for name in state):
        raise UserError(f"{path} contains only a backbone, not a detector; {_NAME_A_DETECTOR}")
    if missing:
        raise UserError(f"{path} lacks {shorten_list(missing)} of this detector; {remedy}")
    extra = [name for name in state if name not in target and name in required]
    if extra:
        raise UserError(f"{path} contains {shorten_list(extra)}, which this detector does not have; {remedy}")
    loaded = [name for name in target if name in state and target[name].shape == state[name].shape]
    random = [name for name in target if name not in loaded and not name.endswith(COUNTER)]
    for name in random:
        if name in required:
            expected = tuple(target[name].shape)
            actual = tuple(state[name].shape)
            raise UserError(f"{path}: {name} has shape {actual}, the detector needs {expected}; {remedy}")
    with torch.no_grad():
        for name in loaded:
            target[name].copy_(state[name])
    modules = sorted({"backbone.fpn" if ".fpn_" in name else ".".join(name.split(".")[:2]) for name in random})
    log.info(f"loaded {len(loaded)} tensors from {path}; random: {', '.join(modules) or 'nothing'}")


def _select_learned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not any(part in name for part in _CONFIG_BUFFERS)}


def _is_close(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_is_close(x, y) for x, y in zip(a, b, strict=True))
    return math.isclose(a, b, rel_tol=1e-4) if isinstance(a, (int, float)) and isinstance(b, float) else a == b
