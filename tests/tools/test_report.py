"""The report: what stands beside what, and what is never put together."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pretrain.common.config_io import dump, merge_file
from pretrain.common.errors import UserError
from pretrain.config import load_config
from tools import report
from transfer import config as transfer_config

CONFIGS = Path(__file__).parents[2] / "configs"
DIGITS = ("DATA.TRAIN", "digits", "MODEL.ARCH", "resnet18", "VIEWS.IMAGE_SIZE", "32", "SOLVER.EPOCHS", "15")


def write(folder: Path, data: dict[str, Any], config: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(data))
    if config:
        (folder / "config.yaml").write_text(config)


def pretrain(
    folder: Path, *overrides: str, recipe: str = "jcl_R50_IN1k_200ep", knn: float = 50.0, images: int = 0
) -> str:
    """Writes a finished pretraining to ``folder``; returns its config."""
    cfg = load_config(CONFIGS / "pretrain" / f"{recipe}.yaml", [*overrides, "OUTPUT_DIR", str(folder)])
    metrics = {"knn_top1": knn, "knn_top5": 90.0, "knn_train_images": images, "knn_val_images": images}
    content = {"stage": "pretrain", "method": cfg.METHOD.NAME, "arch": cfg.MODEL.ARCH, "epochs": cfg.SOLVER.EPOCHS,
               "steps": 10 * cfg.SOLVER.EPOCHS, "metrics": metrics}  # fmt: skip
    write(folder, content, dump(cfg))
    return dump(cfg)


def provenance(config: str, **change: Any) -> dict[str, Any]:
    """What a probe or a conversion records of the final checkpoint of a pretraining under ``config``."""
    cfg = load_config().load_cfg(config)
    return {
        "source": "checkpoint_final.pth", "source_sha256": "0123456789abcdef", "encoder": "query", "stem": "imagenet",
        "arch": cfg.MODEL.ARCH, "config": config, "method": cfg.METHOD.NAME, "epoch": cfg.SOLVER.EPOCHS,
        "step": 10 * cfg.SOLVER.EPOCHS, **change,
    }  # fmt: skip


def probe(
    folder: Path, stage: str, base: str, top1: float, *overrides: str, recipe: str = "", source: Any = None
) -> None:
    """Writes a probe under ``recipe`` over the config ``base`` of the pretraining, as the launcher has it."""
    cfg = load_config().load_cfg(base)
    if recipe:
        merge_file(cfg, CONFIGS / "linear" / recipe)
    cfg.merge_from_list(list(overrides))
    metrics = {"top1": top1, "top5": 88.0}
    metrics |= {"train_images": 100, "val_images": 100} if stage == "knn" else {}
    write(folder, {"stage": stage, "source": source or provenance(base), "metrics": metrics}, dump(cfg))


def detector(
    leaf: str = "coco_mask_R50_FPN_1x_jcl", weights: dict[str, Any] | None = None, engine: str = "detectron2",
    overrides: tuple[str, ...] = (), **change: Any,
) -> dict[str, Any]:  # fmt: skip
    """The results.json of a fine-tuning by a recipe; ``weights`` is their provenance, none is a random start."""
    cfg = transfer_config.load_config(CONFIGS / f"{leaf}.yaml", overrides)
    return {
        "stage": "transfer",
        "engine": {"name": engine, "version": "0.6"},
        "metrics": {
            "bbox": {"AP": 38.0, "AP50": 58.0, "AP75": None},
            "segm": {"AP": 36.0, "AP50": 56.0, "AP75": 38.0},
        },
        "iteration": cfg.SOLVER.MAX_ITER,
        "protocol": {
            "detector": "mask", "backbone": "R50-FPN", "norm": "SyncBN", "heads": "0conv2fc",
            "train": list(cfg.DATASETS.TRAIN), "test": list(cfg.DATASETS.TEST),
        },
        "schedule": {
            "iterations": cfg.SOLVER.MAX_ITER, "steps": list(cfg.SOLVER.STEPS), "name": "1x",
            "images_per_batch": cfg.SOLVER.IMS_PER_BATCH, "base_lr": cfg.SOLVER.BASE_LR,
        },
        "weights": {"path": "w.pth" if weights else "", "sha256": "fedcba98" * 8, "provenance": weights or {}},
        "config": dump(cfg), **change,
    }  # fmt: skip
