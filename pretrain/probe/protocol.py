"""Evaluation settings of a probe, from the config alone (no torch)."""

from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from ..common.config.keys import compare
from ..common.config.yaml_io import flatten
from ..common.errors import UserError
from ..keys import list_keys
from .data import ProbeData, data_names


def build_linear_protocol(cfg: CfgNode, data: ProbeData | None = None) -> dict[str, Any]:
    """Build the record of what determines a linear probe's score apart from the backbone; see `build_protocol`."""
    settings = {key: cfg.LINEAR[key] for key in sorted(cfg.LINEAR)}
    if len(cfg.LINEAR.LRS) > 1:
        settings["chosen_on"] = "a tenth of the training images"
    return {**settings, **build_protocol(cfg, data)}


def build_knn_protocol(cfg: CfgNode, data: ProbeData | None = None) -> dict[str, Any]:
    """Build the record of what determines a kNN score apart from the backbone; see `build_protocol`."""
    knn = cfg.PROBE
    bank = min(len(data.train), knn.KNN_MAX_IMAGES or len(data.train)) if data else knn.KNN_K
    settings = {"k": min(knn.KNN_K, bank), "temperature": knn.KNN_TEMPERATURE, "max_images": knn.KNN_MAX_IMAGES}
    return {**settings, **build_protocol(cfg, data)}


def build_protocol(cfg: CfgNode, data: ProbeData | None = None) -> dict[str, Any]:
    """Build the record of what determines the features and what they are scored on: data, image size, precision.

    Args:
        data: adds the numbers of labeled images.
    """
    size, resize = choose_evaluation_size(cfg)
    settings: dict[str, Any] = {"image_size": size, "resize": resize}
    keys = list_keys()
    for key in ("MEAN", "STD"):  # like float32_precision omitted at the default, as in results of earlier versions
        if cfg.VIEWS[key] != keys[f"VIEWS.{key}"].default:
            settings[key.lower()] = cfg.VIEWS[key]
    if cfg.FLOAT32_PRECISION:
        settings["float32_precision"] = cfg.FLOAT32_PRECISION
    train, val = data_names(cfg)
    settings |= {"amp": cfg.SOLVER.AMP, "on_corrupt": cfg.DATALOADER.ON_CORRUPT, "train": train, "val": val}
    if data:
        settings |= {"train_images": len(data.train), "val_images": len(data.val)}
    return settings


def choose_evaluation_size(cfg: CfgNode) -> tuple[int, int]:
    """Return (crop, shorter side before it) in pixels; the second is 0 if images are resized straight to the crop."""
    size = cfg.PROBE.IMAGE_SIZE or cfg.VIEWS.IMAGE_SIZE
    is_cropped = cfg.PROBE.CROP == "center" or (cfg.PROBE.CROP == "auto" and cfg.MODEL.STEM == "imagenet")
    return size, cfg.PROBE.RESIZE or (round(size * 256 / 224) if is_cropped else 0)


def list_linear_settings(cfg: CfgNode) -> dict[str, Any]:
    """List the settings that a linear probe's result depends on, apart from the backbone: also data and seed."""
    linear = {key: value for key, value in flatten(cfg) if key.startswith("LINEAR.")}
    return {**linear, "SEED": cfg.SEED, **build_protocol(cfg)}


def check_same_probe(folder: Path, recorded: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise UserError if the probe in ``folder`` was run with other settings; the message names them."""
    changes = "; ".join(map(str, compare(list_keys(), recorded, current)))
    if changes:
        raise UserError(f"{folder} contains a different probe ({changes}); choose another OUTPUT_DIR")
