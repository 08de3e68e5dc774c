"""A checkpoint's backbone -> a weights file for Detectron2 (or back to torchvision), verified, with provenance.

    .pth          {"model": tensors under full names backbone.bottom_up.*, "provenance": ...}, read without heuristics
    .pkl          Detectron2's convention: arrays, "__author__", "matching_heuristics", names without prefix
    .safetensors  tensors under full names, and provenance in the metadata

OUTPUT.json next to the file contains the provenance and the file's SHA-256, which every later reader compares.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.common import interface
from pretrain.common.errors import UserError
from pretrain.common.files import atomic_writer, check_file, check_not_sharded, translate_write_errors, write_json
from pretrain.common.run.folder import read_stage
from pretrain.common.run.lease import claim
from pretrain.common.weights.provenance import InputFormat, Provenance
from pretrain.common.weights.resnet_names import PREFIX, is_bottleneck, to_detectron2

if TYPE_CHECKING:  # torch is imported only after the paths are checked
    from torch import Tensor

    from pretrain.common.weights.backbone import BackboneFile
    from pretrain.common.weights.file import WeightsFile

AUTHOR = "pretrain-to-transfer"
FORMATS = (".pth", ".pkl", ".safetensors")
log = logging.getLogger(__name__)


_STATISTICS_HINT = "the source does not record the mean and std of images; if known, pass --pixel-mean and --pixel-std"
_FORMAT_HINT = (
    "the detector's config.yaml is not next to it, so the order of its channels and its stride are not recorded"
)


@dataclass(frozen=True)
class Conversion:
    """A conversion: file, provenance, largest relative difference per stage, modules not read, choice of a pair."""

    output: Path
    provenance: Provenance
    differences: dict[str, float]
    unread: str
    choice: str

    def summary(self) -> str:
        """Describe source, output and verification in a few lines."""
        stages = ", ".join(f"{stage} {error:.1e}" for stage, error in self.differences.items())
        p = self.provenance
        origin = " ".join(filter(None, (p.method, p.arch, p.encoder)))
        epoch = "" if p.epoch is None else f", epoch {p.epoch}"
        trained_with = p.input or InputFormat()
        lines = [
            f"{p.source} ({origin}{epoch}) -> {self.output}",
            self.choice,
            f"not read: {self.unread}" if self.unread else "",
            "" if trained_with.format else _FORMAT_HINT,
            "" if trained_with.mean else _STATISTICS_HINT,
            f"verified on one image; largest relative difference per stage: {stages}",
        ]
        return "\n".join(filter(None, lines))


def convert(
    source: str | Path,
    output: str | Path,
    *,
    encoder: str = "query",
    prefix: str = "",
    pixel_mean: Iterable[float] = (),
    pixel_std: Iterable[float] = (),
    overwrite: bool = False,
    to_torchvision: bool = False,
) -> Conversion:
    """Convert a backbone to Detectron2's names, check the result, and record its provenance.

    Args:
        source: a run folder or a file.
        output: the file to write; its suffix is one of `FORMATS`.
        encoder: query or key, if the source has two encoders.
        prefix: prefix of the network to read, if the source has several; ``.`` means no prefix.
        pixel_mean, pixel_std: pretraining statistics of the RGB channels, 0 to 255, if the source does not record them.
        overwrite: replace an output that differs.
        to_torchvision: write torchvision's names: the backbone of a fine-tuned detector as a plain ResNet.

    Raises:
        UserError: unreadable or wrong source, stages that disagree, an output that exists and differs.
    """
    source = interface.read_path(source, "source")
    output = Path(interface.read_path(output, "output"))
    mean = _list_numbers(pixel_mean, "pixel_mean")
    std = _list_numbers(pixel_std, "pixel_std")
    check_format(output, to_torchvision)
    if not os.path.isdir(source):
        check_file(source, "run folder or checkpoint")
    with interface.set_torch_modes():  # imports torch
        file = open_source(source)
        _check_output(output, file.path)
        backbone = read_source(file, encoder, prefix)
        return _convert_backbone(backbone, file.path, output, mean, std, overwrite, to_torchvision)


def _convert_backbone(
    backbone: BackboneFile,
    path: Path,
    output: Path,
    mean: list[float],
    std: list[float],
    overwrite: bool,
    to_torchvision: bool,
) -> Conversion:
    """Convert a backbone that was read from the file ``path``; the other arguments are those of `convert`."""
    from .verify import check_conversion

    trained_with = _add_pixel_statistics(backbone.provenance.input or InputFormat(), mean, std)
    provenance = replace(backbone.provenance, input=trained_with)
    if backbone.stem == "cifar" and not to_torchvision:
        raise UserError(f"{path} has the CIFAR stem (3x3), but Detectron2's is 7x7; pretrain with MODEL.STEM imagenet")
    stride_in_1x1 = is_bottleneck(backbone.arch) and bool(trained_with.stride_in_1x1)
    if stride_in_1x1 and to_torchvision:
        problem = f"{path} was trained with STRIDE_IN_1X1 True, but torchvision's ResNet strides in the 3x3"
        raise UserError(f"{problem}; convert it to Detectron2's names, without --to-torchvision")
    tensors = backbone.state_dict
    if not to_torchvision:
        tensors = {PREFIX + name: tensor for name, tensor in to_detectron2(tensors, backbone.arch).items()}
    record = provenance.to_json()
    encoded = _encode(tensors, record, output.suffix, to_torchvision)
    check = partial(check_conversion, backbone=backbone, to_torchvision=to_torchvision, stride_in_1x1=stride_in_1x1)
    with claim(output.parent, "a conversion", file=output.name), translate_write_errors(output):
        if os.path.exists(output) and not overwrite and output.read_bytes() != encoded:
            raise UserError(f"{output} exists and differs; add --overwrite or choose another file")
        differences = _write(output, encoded, record, check)
    return Conversion(output, provenance, differences, backbone.unread, backbone.choice)


def check_format(output: Path, to_torchvision: bool) -> None:
    """Raise UserError if the suffix of an output is not that of a format; this imports no torch."""
    if output.suffix not in FORMATS or (to_torchvision and output.suffix == ".pkl"):
        raise UserError(f"OUTPUT {output} must end in .pth, .safetensors{'' if to_torchvision else ' or .pkl'}")


def _check_output(output: Path, source: Path) -> None:
    """Raise UserError if the output would replace the source or a run's checkpoint."""
    if os.path.exists(output) and os.path.samefile(output, source):
        raise UserError(f"OUTPUT {output} is the source itself; choose another file")
    if output.name.startswith(("checkpoint_", "model_")) and read_stage(output.parent):
        raise UserError(f"OUTPUT {output} has the name of a run's checkpoint in the run's folder; choose another file")


def _write(
    output: Path, encoded: bytes, provenance: Mapping[str, Any], check: Callable[..., dict[str, float]]
) -> dict[str, float]:
    """Write the output and its record once ``check`` has accepted the tensors that were written; return its result."""
    from pretrain.common.weights.file import read_weights_file

    record = output.with_name(output.name + ".json")
    with atomic_writer(output) as stream:
        stream.write(encoded)
        stream.flush()
        written = read_weights_file(stream.name)
        differences = check({name.removeprefix("model."): tensor for name, tensor in written.tensors.items()})
        record.unlink(missing_ok=True)  # it describes the earlier output
    write_json(record, {**provenance, "file_sha256": written.sha256})
    return differences


def open_source(source: str | Path) -> WeightsFile:
    """Read a run folder's newest undamaged checkpoint (of pretraining or of a detector), or a file itself.

    Raises:
        UserError: the path does not exist, the folder has no undamaged checkpoint, or the file cannot be read.
    """
    from pretrain.common.weights import checkpoint
    from pretrain.common.weights.file import read_weights_file

    from ..training import checkpoints

    if not os.path.isdir(source):
        return read_weights_file(source)
    paths = checkpoints.list_checkpoints(source) or checkpoint.list_checkpoints(source)
    newest = checkpoint.load_first_undamaged(source, paths, read_weights_file)
    if newest:
        return newest[1]
    check_not_sharded(source)
    remedy = "resume its training, or choose another folder or file"
    raise UserError(f"{source} contains no checkpoint (checkpoint_*.pth or, of a detector, model_*.pth); {remedy}")


def read_source(source: WeightsFile, encoder: str = "query", prefix: str = "") -> BackboneFile:
    """Read the backbone in a file, also in Caffe2's names, with its provenance.

    Raises:
        UserError: no backbone in it.
    """
    from pretrain.common.weights.backbone import extract_backbone

    from .caffe2 import from_caffe2

    return extract_backbone(from_caffe2(source), encoder, prefix)


def _list_numbers(values: Any, name: str) -> list[float]:
    """Return an argument's numbers, which may be in a list, a tuple, or an array or tensor."""
    try:
        return [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{name} is {values!r}; pass one number per channel, as in [123.675, 116.28, 103.53]"
        ) from error


def _add_pixel_statistics(recorded: InputFormat, mean: list[float], std: list[float]) -> InputFormat:
    """Add --pixel-mean and --pixel-std, which the source must not record itself."""
    if not (mean or std):
        return recorded
    keys = ("MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD")
    known = [f"{key} {value}" for key, value in recorded.to_keys().items() if key in keys]
    if known:
        raise UserError(f"the source records {', '.join(known)}; omit --pixel-mean and --pixel-std")
    if any(len(values) != 3 or not all(0 <= value <= 255 for value in values) for values in (mean, std)) or 0 in std:
        raise UserError(f"--pixel-mean {[*mean]} and --pixel-std {[*std]} must be 3 numbers from 0 to 255, std above 0")
    return replace(recorded, mean=mean, std=std)


def _encode(tensors: Mapping[str, Tensor], provenance: Mapping[str, Any], suffix: str, to_torchvision: bool) -> bytes:
    if suffix == ".safetensors":
        from safetensors.torch import save

        return save(dict(tensors), metadata={"provenance": json.dumps(provenance)})
    if suffix == ".pkl":
        arrays = {name.removeprefix(PREFIX): tensor.numpy() for name, tensor in tensors.items()}
        content = {"model": arrays, "__author__": AUTHOR, "matching_heuristics": True, "provenance": dict(provenance)}
        return pickle.dumps(content, protocol=2)
    import torch

    buffer = io.BytesIO()
    # A plain state dict, as torchvision's own files are; Detectron2's checkpointer reads "model" and ignores the rest.
    torch.save(dict(tensors) if to_torchvision else {"model": dict(tensors), "provenance": dict(provenance)}, buffer)
    return buffer.getvalue()
