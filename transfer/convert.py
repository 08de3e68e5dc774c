"""A checkpoint's backbone -> a weights file for Detectron2 (or back to torchvision), verified, with provenance.

    .pth          {"model": tensors under full names backbone.bottom_up.*, "provenance": ...}; read whole, no heuristics
    .pkl          Detectron2's convention: arrays, "__author__", "matching_heuristics"; names without prefix
    .safetensors  tensors under full names; provenance in the metadata

Beside each stands OUTPUT.json: the provenance with the file's own SHA-256.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.common import checkpoint
from pretrain.common.backbone_file import BackboneFile, check_tensors, load_backbone
from pretrain.common.errors import UserError
from pretrain.common.lock import claim
from pretrain.common.run_folder import atomic_write, stage_of, write_json
from pretrain.common.weights_file import read_file, sha256, state_tensors
from pretrain.common.weights_file import tensor_digest as digest

from . import checkpoints, proof
from .resnet_names import PREFIX, is_bottleneck, to_detectron2, to_torchvision
from .weights import detector_config, history

AUTHOR = "pretrain-to-transfer"
FORMATS = (".pth", ".pkl", ".safetensors")
# What the pretraining of every supported source feeds its network: RGB, ImageNet's mean and standard deviation, 0-255.
INPUT = {
    "INPUT.FORMAT": "RGB",
    "MODEL.PIXEL_MEAN": [123.675, 116.28, 103.53],
    "MODEL.PIXEL_STD": [58.395, 57.12, 57.375],
}


@dataclass(frozen=True)
class Conversion:
    """What was done: the file, its provenance, the largest relative difference a stage, who computed the target."""

    output: Path
    provenance: dict[str, Any]
    errors: dict[str, float]
    judge: str

    def summary(self) -> str:
        stages = ", ".join(f"{stage} {error:.1e}" for stage, error in self.errors.items())
        p = self.provenance
        origin = " ".join(str(p[key]) for key in ("method", "arch", "encoder") if p.get(key))
        epoch = f", epoch {p['epoch']}" if "epoch" in p else ""
        return (
            f"{p['source']} ({origin}{epoch}) -> {self.output}\n"
            f"one image through both ({self.judge}): largest relative difference {stages}"
        )


def convert(
    source: str | Path,
    output: str | Path,
    *,
    encoder: str = "query",
    unsafe_pickle: bool = False,
    overwrite: bool = False,
    back: bool = False,
) -> Conversion:
    """Converts ``source`` (a run folder or a file) to ``output``, whose suffix names the format.

    Args:
        encoder: query | key, where the source has two.
        unsafe_pickle: unpickle anything the source holds; only for files from a source you trust.
        overwrite: replace an output that differs.
        back: write torchvision's names: the backbone of a fine-tuned detector as a plain ResNet.

    Raises:
        UserError: unreadable or wrong source, stages that disagree, an output that stands already and differs.
    """
    output = Path(output)
    if output.suffix not in FORMATS or (back and output.suffix == ".pkl"):
        raise UserError(f"OUTPUT {output} must end in .pth, .safetensors{'' if back else ' or .pkl'}")
    path = find_source(source, unsafe_pickle)
    backbone = load_backbone(path, encoder, unsafe_pickle, rename=to_torchvision)
    if backbone.stem == "cifar" and not back:
        raise UserError(
            f"{path} has the CIFAR stem (3x3, no pooling); Detectron2's stem is 7x7: pretrain with MODEL.STEM imagenet"
        )
    detector = detector_config(path)
    provenance = _provenance(backbone, history(path), detector)
    if backbone.arch in ("resnet50", "resnet101") and provenance["MODEL.RESNETS.STRIDE_IN_1X1"]:
        raise UserError(f"{path} was trained with STRIDE_IN_1X1 True, which torchvision's ResNet cannot compute")
    names = backbone.state_dict
    tensors = names if back else {PREFIX + k: v for k, v in to_detectron2(names, backbone.arch).items()}
    provenance["tensors"] = {name: digest(tensor) for name, tensor in tensors.items()}
    data = _encode(tensors, provenance, output.suffix, back)
    if os.path.isdir(output):
        raise UserError(f"{output} is a folder; name a file in it")
    if (os.path.exists(output) and os.path.samefile(output, path)) or _is_checkpoint_of_run(output):
        raise UserError(f"OUTPUT {output} is a run's checkpoint, which a conversion would destroy; name another file")
    with claim(output.parent, "conversion", of=output.name):
        if os.path.exists(output) and not overwrite and not _holds(output, data):
            raise UserError(f"{output} exists and differs; add --overwrite or name another file")
        errors, judge = _write_proven(output, data, backbone, back)
        write_json(output.with_name(output.name + ".json"), {**provenance, "file_sha256": sha256(output)})
    return Conversion(output, provenance, errors, judge)


def _is_checkpoint_of_run(path: Path) -> bool:
    return path.name.startswith(("checkpoint_", "model_")) and stage_of(path.parent) in ("pretrain", "transfer")


def find_source(source: str | Path, unsafe_pickle: bool = False, warn: Callable[[str], None] = print) -> Path:
    """A run folder's newest good checkpoint (of pretraining or of a detector), or a file itself.

    Raises:
        UserError: nothing there, or no checkpoint that reads whole.
    """
    source = Path(source)
    if os.path.isdir(source):
        if found := checkpoints.newest(source, warn, unsafe_pickle=unsafe_pickle):
            return found[0]
        if stage_of(source) == "transfer":
            raise UserError(
                f"{source} is a detector's run folder, but holds no checkpoint (model_*.pth); resume its training, or "
                "name another folder or file"
            )
    return checkpoint.resolve(source, warn)


def _provenance(backbone: BackboneFile, before: Mapping[str, Any], detector: Mapping[str, Any]) -> dict[str, Any]:
    """The source's provenance and what a detector's config must agree with, under Detectron2's keys.

    Args:
        before: of a detector's backbone, what it was before its fine-tuning.
    """
    bottleneck = is_bottleneck(backbone.arch)
    fits = {
        "MODEL.RESNETS.DEPTH": int(backbone.arch.removeprefix("resnet")),
        "MODEL.RESNETS.STRIDE_IN_1X1": False,
        "MODEL.RESNETS.RES2_OUT_CHANNELS": 256 if bottleneck else 64,
        **INPUT,
    }
    own = dict(backbone.provenance)
    if before:  # method, epoch and config are those of the pretraining, not of the fine-tuning
        own = {key: own[key] for key in ("source", "source_sha256", "arch", "stem")}
        own["earlier_source"] = before.get("source")
    return {**fits, **before, **own, **detector}


def _encode(tensors: Mapping[str, Tensor], provenance: Mapping[str, Any], suffix: str, back: bool) -> bytes:
    if suffix == ".safetensors":
        from safetensors.torch import save

        return save(dict(tensors), metadata={"provenance": json.dumps(provenance)})
    if suffix == ".pkl":
        arrays = {name.removeprefix(PREFIX): tensor.numpy() for name, tensor in tensors.items()}
        content = {"model": arrays, "__author__": AUTHOR, "matching_heuristics": True, "provenance": dict(provenance)}
        return pickle.dumps(content, protocol=2)
    buffer = io.BytesIO()
    # A plain state dict, as torchvision's own files are; Detectron2's checkpointer reads "model" and leaves the rest.
    torch.save(dict(tensors) if back else {"model": dict(tensors), "provenance": dict(provenance)}, buffer)
    return buffer.getvalue()


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; name another file") from error


def _write_proven(output: Path, data: bytes, backbone: BackboneFile, back: bool) -> tuple[dict[str, float], str]:
    """Writes a trial file beside ``output``, compares source and trial, and only then gives it its name."""
    trial = output.with_name(f".{output.stem}.trial{output.suffix}")  # of the one process that holds the output
    atomic_write(trial, data)
    try:
        if backbone.stem == "cifar":  # torchvision's names in and out: equal tensors are equal features
            _check_equal(trial, backbone)
            errors, judge = {str(stage): 0.0 for stage in proof.STAGES}, "equal tensors"
        else:
            errors, judge = _prove(trial, backbone, back)
        os.replace(trial, output)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from error
    finally:
        trial.unlink(missing_ok=True)
    return errors, judge


def _check_equal(trial: Path, backbone: BackboneFile) -> None:
    written = check_tensors(state_tensors(read_file(trial)[0], trial), backbone.arch, backbone.stem, trial)
    for name, tensor in backbone.state_dict.items():
        if not torch.equal(written[name], tensor):
            raise UserError(f"{name} differs after writing")


def _prove(trial: Path, backbone: BackboneFile, back: bool) -> tuple[dict[str, float], str]:
    image, arch = proof.test_image(), backbone.arch
    written = state_tensors(read_file(trial)[0], trial)
    if back:
        source = proof.plain_stages(to_detectron2(backbone.state_dict, arch), arch, image)
        target = proof.torchvision_stages(written, arch, image)
        return proof.compare(source, target, trial.name), "torchvision's ResNet"
    source = proof.torchvision_stages(backbone.state_dict, arch, image)
    errors = proof.compare(source, proof.plain_stages(proof.without_prefix(written), arch, image), trial.name)
    if not proof.has_detectron2() or trial.suffix == ".safetensors":  # Detectron2 cannot read safetensors
        return errors, "a plain forward pass under Detectron2's names"
    return proof.compare(source, proof.detectron2_stages(trial, arch, image), trial.name), "Detectron2's ResNet"
