"""How a probe scores a backbone, from its config alone, without torch; whether two trained classifiers are the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fvcore.common.config import CfgNode

from ..common.config.yaml_io import flatten
from ..common.errors import UserError
from ..config import default_config

if TYPE_CHECKING:
    from .data import ProbeData


def protocol(cfg: CfgNode, probe: str = "", data: ProbeData | None = None) -> dict[str, Any]:
    """What decides a score apart from the backbone: data, image size, precision and the settings of the probe.

    Args:
        probe: linear | knn; empty: only what decides how features are computed.
        data: adds the numbers of labeled images.
    """
    settings = {}
    if probe == "linear":
        settings = {key: cfg.LINEAR[key] for key in sorted(cfg.LINEAR)}
        if len(cfg.LINEAR.LRS) > 1:
            settings["chosen_on"] = "a tenth of the training images"
    elif probe == "knn":
        knn = cfg.PROBE
        bank = min(len(data.train), knn.KNN_MAX_IMAGES or len(data.train)) if data else knn.KNN_K
        settings = {"k": min(knn.KNN_K, bank), "temperature": knn.KNN_TEMPERATURE, "max_images": knn.KNN_MAX_IMAGES}
    (size, resize), (train, val) = evaluation_size(cfg), data_names(cfg)
    counts = {"train_images": len(data.train), "val_images": len(data.val)} if data else {}
    usual = default_config()  # results of versions without these keys have the usual values
    keys = {"mean": ("VIEWS", "MEAN"), "std": ("VIEWS", "STD")}
    others = {
        name: cfg[section][key] for name, (section, key) in keys.items() if cfg[section][key] != usual[section][key]
    }
    return {**settings, "image_size": size, "resize": resize, **others, "amp": cfg.SOLVER.AMP,
            "on_corrupt": cfg.DATALOADER.ON_CORRUPT, "train": train, "val": val, **counts}  # fmt: skip


def data_names(cfg: CfgNode) -> tuple[str, str]:
    train = cfg.DATA.PROBE_TRAIN or cfg.DATA.TRAIN
    return train, cfg.DATA.VAL or train


def evaluation_size(cfg: CfgNode) -> tuple[int, int]:
    """(crop, shorter side before it) in pixels; 0 for the second: the image is resized straight to the crop."""
    size = cfg.PROBE.IMAGE_SIZE or cfg.VIEWS.IMAGE_SIZE
    is_cropped = cfg.PROBE.CROP == "center" or (cfg.PROBE.CROP == "auto" and cfg.MODEL.STEM == "imagenet")
    return size, cfg.PROBE.RESIZE or (round(size * 256 / 224) if is_cropped else 0)


def linear_settings(cfg: CfgNode) -> dict[str, Any]:
    """What the result of a linear probe depends on, apart from the backbone: protocol, data, seed."""
    return {**{key: value for key, value in flatten(cfg) if key.startswith(("LINEAR.", "SEED"))}, **protocol(cfg)}


def check_same_probe(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises UserError if the probe in ``folder`` was made by other settings, each of which is named."""
    keys = dict.fromkeys([*now, *before])
    changed = [f"{key} {before.get(key)!r} -> {now.get(key)!r}" for key in keys if before.get(key) != now.get(key)]
    if changed:
        raise UserError(f"{folder} holds a different probe ({'; '.join(changed)}); choose another OUTPUT_DIR")
