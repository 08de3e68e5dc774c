"""Reads what is recorded about a weights file: in the file, in FILE.json next to it, or in a detector's run folder."""

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..config.yaml_io import flatten, parse_yaml
from ..errors import UserError
from ..files import read_json
from ..run import file_names
from .provenance import MSRA, InputFormat, Provenance
from .resnet_names import PREFIX, from_c4, infer_arch, to_torchvision


def read_record(
    path: Path, digest: str, content: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Provenance | None:
    """Return what is recorded about a file; None if nothing is.

    A file's own record comes first. A plain state dict, such as torchvision's files, has no place for one inside; its
    FILE.json then has the file's SHA-256. Files of other projects may say what their input was.

    Only a detector in Detectron2's names that records nothing itself belongs to the run folder that it lies in: plain
    backbones and files of other projects may lie next to any config.yaml.

    Raises:
        UserError: the file has changed since its conversion, or initial_weights.json is damaged.
    """
    converted = _read_conversion(path, digest, content)
    if converted:
        return converted
    if content.get("__author__") == "Detectron2 Model Zoo":
        std = content.get("model", {}).get("pixel_std", 1)  # a few detectors trained from scratch have another one
        return Provenance(input=MSRA if (np.asarray(std) == 1).all() else InputFormat())
    meta = content.get("meta")
    config = meta.get("config") or meta.get("cfg") if isinstance(meta, dict) else ""
    if re.search(r"style\s*=\s*['\"]caffe['\"]", str(config)):  # a detector of mmdetection, whose mean and std vary
        return Provenance(input=InputFormat(MSRA.format, stride_in_1x1=MSRA.stride_in_1x1))
    detector = _select_detector(content, tensors)
    return _read_run_folder(path, content, detector) if detector else None


def _read_conversion(path: Path, digest: str, content: Mapping[str, Any]) -> Provenance | None:
    record: dict[str, Any] = {}
    with contextlib.suppress(UserError):  # there is none, or it is another program's
        record = read_json(f"{path}.json")
    recorded_sha256 = record.pop("file_sha256", None)
    if recorded_sha256 and recorded_sha256 != digest:
        problem = f"{path} has changed since its conversion (its SHA-256 differs from {path}.json)"
        raise UserError(f"{problem}; convert again, or delete {path}.json if you replaced the file on purpose")
    return Provenance.from_json(content.get("provenance") or (record if recorded_sha256 else None))


def _select_detector(content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a detector in Detectron2's names, without a prefix; {} if the file has no detector."""
    anchors = (re.fullmatch(r"(|.*\.)backbone\.(bottom_up\.)?stem\.conv1\.weight", name) for name in tensors)
    prefix = next((match[1] for match in anchors if match), None)
    if prefix is None:
        return {}
    detector = from_c4({name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)})
    has_heads = any(not name.startswith(PREFIX) for name in detector)
    return detector if has_heads or "iteration" in content else {}  # Detectron2's checkpoints count iterations


def _read_run_folder(path: Path, content: Mapping[str, Any], detector: Mapping[str, Tensor]) -> Provenance:
    """Read the record of a detector.

    - config.yaml, or the config in a checkpoint of this project, records its input.
    - initial_weights.json records where its backbone came from before its fine-tuning.
    """
    # A link may lie next to its own config.yaml, as in a download cache, or lead into the run folder.
    for folder in dict.fromkeys([path.parent, path.resolve().parent]):
        config = _parse(content.get("config")) or _read_yaml(folder / file_names.CONFIG)
        if not _describes(config, detector):
            continue
        trained_on = config.get("DATASETS.TRAIN")
        names = tuple(map(str, trained_on)) if isinstance(trained_on, list) else ()
        start: Provenance | None = None
        if (folder / file_names.INITIAL_WEIGHTS).is_file():
            summary = read_json(folder / file_names.INITIAL_WEIGHTS)
            start = Provenance.from_json(summary.get("provenance")) or Provenance()
            start = start if summary.get("path") else Provenance(method="random")
        return Provenance.from_detector(start, InputFormat.from_keys(config), names)
    return Provenance(input=InputFormat())


def _describes(config: Mapping[str, Any], detector: Mapping[str, Tensor]) -> bool:
    """Return whether a config has the ResNet and the number of classes of a detector."""
    resnet = {name.removeprefix(PREFIX): tensor for name, tensor in detector.items() if name.startswith(PREFIX)}
    classifier = detector.get("roi_heads.box_predictor.cls_score.weight")  # one row is the background's
    classes = config.get("MODEL.ROI_HEADS.NUM_CLASSES")
    if classifier is not None and classes is not None and len(classifier) != classes + 1:
        return False
    with contextlib.suppress(UserError):  # incomplete
        return infer_arch(to_torchvision(resnet), "the detector") == f"resnet{config.get('MODEL.RESNETS.DEPTH')}"
    return False


def _read_yaml(path: Path) -> dict[str, Any]:
    """Return the values of a YAML file by their dotted keys; {} if there is none, or it is another program's."""
    with contextlib.suppress(OSError, ValueError):
        return _parse(path.read_text(encoding="utf-8"))
    return {}


def _parse(text: Any) -> dict[str, Any]:
    with contextlib.suppress(ValueError, UserError):
        return dict(flatten(parse_yaml(text))) if isinstance(text, str) else {}
    return {}
