"""Loads weights into a detector of either engine, and refuses what does not fit, before the first iteration.

Both engines hand over their tensors under Detectron2's names (the live storage, which is written in place), so there is
one loader. Stock Detectron2 prints the same warnings for a good file and for one it loads nothing from.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from fvcore.common.config import CfgNode
from torch import Tensor

from pretrain.common.backbone_file import DEPTHS, as_float32, infer_arch
from pretrain.common.errors import UserError
from pretrain.common.run_folder import read_json
from pretrain.common.weights_file import check_digests, read_file, read_provenance, sha256, state_tensors

from .resnet_names import PREFIX, to_torchvision

_COUNTER = ".num_batches_tracked"  # read by no forward pass; frozen norms do not have it
_STAGES = ("stem.conv1.", "res2.", "res3.", "res4.", "res5.")
_CLASSIFIER = ("stem.fc.weight", "stem.fc.bias")  # in the published MSRA files
_NAME_ONE = "name a fine-tuned detector, or add --resume to evaluate the newest checkpoint in OUTPUT_DIR (model_*.pth)"
_CONVERT = "convert it first: python tools/convert_to_d2.py CHECKPOINT OUTPUT"


@dataclass(frozen=True)
class Weights:
    """A weights file as read.

    Attributes:
        path: empty for random initialisation.
        sha256: of the file.
        state: Detectron2's full names -> tensors.
        provenance: what convert.py wrote; of a detector its `history` and the keys of the config.yaml beside it.
    """

    path: str
    sha256: str
    state: dict[str, Tensor]
    provenance: dict[str, Any]

    def summary(self) -> dict[str, Any]:
        """Plain values for results.json: path, sha256 and the provenance without the tensors' digests."""
        origin = {key: value for key, value in self.provenance.items() if key != "tensors"}
        return {"path": self.path, "sha256": self.sha256, "provenance": origin}


def read_weights(path: str | Path, unsafe_pickle: bool = False) -> Weights:
    """Reads a `.pth`, `.pkl` or `.safetensors` file of a backbone or a whole detector in Detectron2's names.

    Raises:
        UserError: missing or damaged file, other names, a tensor that is not finite or not what was converted.
    """
    path = str(path)
    if not path:
        return Weights("", "", {}, {})
    if "://" in path:
        raise UserError(f"MODEL.WEIGHTS {path} is an address; download it and {_CONVERT}")
    content, metadata = read_file(path, unsafe_pickle)
    if path.endswith(".pkl") and "__author__" not in content:
        raise UserError(
            f"{path} is a bare pickle, which Detectron2 reads as Caffe2's, without BN statistics; {_CONVERT}"
        )
    state = {name.removeprefix("module."): tensor for name, tensor in state_tensors(content, path).items()}
    if content.get("matching_heuristics"):  # names without prefix, as Detectron2's own backbones have them
        state = {(PREFIX + n if n.startswith(_STAGES) else n): t for n, t in state.items() if n not in _CLASSIFIER}
    if not any(name.startswith(PREFIX) for name in state):
        shown = ", ".join(list(state)[:3]) or "nothing"
        raise UserError(f"{path} holds no {PREFIX}* (it holds {shown}, ...); {_CONVERT}")
    for name, tensor in state.items():
        _check_values(path, name, tensor)
    provenance = read_provenance(content, metadata, path)
    check_digests(state, provenance, path)
    return Weights(path, sha256(path), state, provenance or {**history(Path(path)), **detector_config(Path(path))})


def detector_config(path: Path) -> dict[str, Any]:
    """The keys of INPUT and STRIDE_IN_1X1 from the config.yaml that Detectron2 keeps beside its checkpoints."""
    beside = path.parent / "config.yaml"
    if not os.path.isfile(beside):
        return {}
    try:
        config = yaml.safe_load(beside.read_text(encoding="utf-8"))
        return {
            "INPUT.FORMAT": config["INPUT"]["FORMAT"],
            "MODEL.PIXEL_MEAN": list(config["MODEL"]["PIXEL_MEAN"]),
            "MODEL.PIXEL_STD": list(config["MODEL"]["PIXEL_STD"]),
            "MODEL.RESNETS.STRIDE_IN_1X1": bool(config["MODEL"]["RESNETS"]["STRIDE_IN_1X1"]),
        }
    except (yaml.YAMLError, LookupError, TypeError, ValueError, RecursionError, OSError):
        return {}  # the config.yaml of pretraining, which has no such keys, or another program's


def history(path: Path) -> dict[str, Any]:
    """Where a detector's backbone came from before its fine-tuning, and ``fine_tuned_on``; {} for other files.

    Raises:
        UserError: initial_weights.json, in which the detector's run folder keeps this, is damaged.
    """
    kept = path.parent / "initial_weights.json"
    if not path.name.startswith("model_") or not kept.is_file():
        return {}
    start = read_json(kept)
    provenance = (start.get("provenance") or {}) if start.get("path") else {"method": "random"}
    try:
        trained_on = list(yaml.safe_load((path.parent / "config.yaml").read_text())["DATASETS"]["TRAIN"])
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        trained_on = ["data that are not recorded"]
    return {**provenance, "fine_tuned_on": [*provenance.get("fine_tuned_on", []), *trained_on]}


def check_config(weights: Weights, cfg: CfgNode, log: Callable[[str], None] = print) -> None:
    """Compares the network and the input that ``cfg`` describes with those of the weights' pretraining.

    Raises:
        UserError: a key of ``cfg`` under which the weights would load but compute other features.
    """
    depth, width = cfg.MODEL.RESNETS.DEPTH, cfg.MODEL.RESNETS.RES2_OUT_CHANNELS
    if f"resnet{depth}" not in DEPTHS:
        known = ", ".join(arch.removeprefix("resnet") for arch in DEPTHS)
        raise UserError(f"MODEL.RESNETS.DEPTH is {depth}; choose one of {known}")
    if (depth in (18, 34)) != (width == 64):
        raise UserError(
            f"MODEL.RESNETS.RES2_OUT_CHANNELS is {width}; a ResNet-{depth} needs {64 if depth < 50 else 256}"
        )
    if not weights.path:
        return
    backbone = {n.removeprefix(PREFIX): t for n, t in weights.state.items() if n.startswith(PREFIX)}
    arch = infer_arch(to_torchvision(backbone), weights.path)
    if arch != f"resnet{depth}":
        raise UserError(f"{weights.path} holds a {arch}, but MODEL.RESNETS.DEPTH is {depth}; set it to {arch[6:]}")
    keys = [key for key in weights.provenance if key.startswith(("MODEL.", "INPUT."))]
    if not keys:
        log(f"{weights.path} has no provenance: STRIDE_IN_1X1, PIXEL_MEAN, PIXEL_STD, FORMAT are not checked")
    for key in keys:
        node: Any = cfg
        for part in key.split("."):
            if not isinstance(node, CfgNode) or part not in node:
                raise UserError(f"{weights.path}: its provenance names {key}, which no config has; convert again")
            node = node[part]
        wanted = weights.provenance[key]
        if key == "MODEL.RESNETS.STRIDE_IN_1X1" and depth < 50:  # basic blocks have no 1x1 to stride in
            continue
        if not _close(node, wanted):
            raise UserError(f"{key} is {node}, but {weights.path} was pretrained with {wanted}; set {key} to {wanted}")


def check_same_weights(path: str, began: Mapping[str, Any], output_dir: str) -> None:
    """Refuses to resume a run under other weights than it began with, which it would neither read nor record.

    The file's content counts: run and weights may have been moved. Nothing of a file that is gone by now is needed.

    Args:
        path: MODEL.WEIGHTS; empty: whatever the run began with.
        began: `Weights.summary` of what the run began with.

    Raises:
        UserError: ``path`` is another file, or the run began with random values.
    """
    recorded = began.get("sha256")  # empty: it began with random values
    if not path or (recorded and (not os.path.isfile(path) or sha256(path) == recorded)):
        return
    start = f"{began.get('path')!r} (SHA-256 {recorded[:8]}...)" if recorded else "random values"
    raise UserError(
        f"MODEL.WEIGHTS is {path!r}, but {output_dir} began with {start}, and a resumed run reads none; keep that, or "
        "choose another OUTPUT_DIR"
    )


def load_weights(
    own_state: Callable[[], Mapping[str, Tensor]],
    weights: Weights,
    *,
    whole: bool = False,
    log: Callable[[str], None] = print,
) -> list[str]:
    """Copies ``weights`` into a detector.

    Args:
        own_state: gives the detector's tensors under Detectron2's names, sharing its storage (as ``state_dict`` does).
        whole: the heads must load too (resume, evaluation only).
        log: takes one line: what was loaded and which heads stay random.

    Returns:
        The names that keep their initial values.

    Raises:
        UserError: a tensor of the stem, res2-res5 (or any, where ``whole``) is missing, has no place in the detector
            or another shape, by its name; nothing was written.
    """
    own = own_state()
    if not weights.path:
        if whole:
            raise UserError(f"MODEL.WEIGHTS is empty; {_NAME_ONE}")
        log("MODEL.WEIGHTS is empty: the backbone starts from random values")
        return [name for name in own if not name.endswith(_COUNTER)]
    state, path = weights.state, weights.path
    strict = (lambda name: True) if whole else (lambda name: name.startswith(PREFIX))
    ignored = (_COUNTER, "pixel_mean", "pixel_std")  # the config's own values, not persistent in the torchvision engine
    missing = [name for name in own if name not in state and strict(name) and not name.endswith(ignored)]
    if missing and whole and all(name.startswith(PREFIX) for name in state):
        raise UserError(f"{path} holds a backbone only, no detector; {_NAME_ONE}")
    if missing:
        raise UserError(f"{path} lacks {_list(missing)} of this detector; {_remedy(whole)}")
    extra = [name for name in state if name not in own and strict(name) and not name.endswith(ignored)]
    if extra:
        raise UserError(f"{path} holds {_list(extra)}, for which this detector has no place; {_remedy(whole)}")
    shared = [name for name in own if name in state and not name.endswith(("pixel_mean", "pixel_std"))]
    wrong = [name for name in shared if own[name].shape != state[name].shape]
    for name in filter(strict, wrong):
        needed, found = tuple(own[name].shape), tuple(state[name].shape)
        turned = " (transposed?)" if sorted(needed) == sorted(found) else ""
        raise UserError(f"{path}: {name} has shape {found}, the detector needs {needed}{turned}; {_remedy(whole)}")
    copied = [name for name in shared if name not in wrong]
    with torch.no_grad():
        for name in copied:
            own[name].copy_(state[name])
    now = own_state()
    for name in copied:
        if not torch.equal(now[name].cpu(), state[name].to(now[name].dtype).cpu()):
            raise RuntimeError(f"{name} did not take its value from {path}")
    left = [n for n in own if (n not in state or n in wrong) and not n.endswith(ignored)]
    parts = sorted({"backbone.fpn" if ".fpn_" in name else ".".join(name.split(".")[:2]) for name in left})
    log(f"loaded {len(copied)} tensors from {path}; random: {', '.join(parts) or 'nothing'}")
    return left


def _check_values(path: str, name: str, tensor: Tensor) -> None:
    """What the conversion refuses is refused here, too: a copy would silently turn integers into floats."""
    if not name.endswith(_COUNTER):
        tensor = as_float32(tensor, name, path)
    if not torch.isfinite(tensor).all():
        raise UserError(f"{path}: {name} has values that are not finite; {_CONVERT}")
    if name.endswith("running_var") and (tensor < 0).any():
        raise UserError(f"{path}: {name} has a variance below 0; {_CONVERT}")


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_close(x, y) for x, y in zip(a, b, strict=True))
    return math.isclose(a, b, rel_tol=1e-4) if isinstance(a, (int, float)) and isinstance(b, float) else a == b


def _remedy(whole: bool) -> str:
    return "use the config it was trained with" if whole else "check MODEL.RESNETS and MODEL.BACKBONE, or convert again"


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
