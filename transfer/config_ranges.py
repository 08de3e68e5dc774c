"""Checks a config's numbers for both engines before a run: later, a wrong one would end it with a traceback."""

from __future__ import annotations

import math
import re

from fvcore.common.config import CfgNode

from pretrain.common.config_io import flatten
from pretrain.common.errors import UserError

from .config import ALLOWED, OWN, keys

_FROM_ZERO = (
    "DATALOADER.NUM_WORKERS", "SOLVER.BASE_LR", "SOLVER.BASE_LR_END", "SOLVER.BIAS_LR_FACTOR",
    "SOLVER.CHECKPOINT_KEEP", "SOLVER.FROZEN_BN_ITER", "SOLVER.GAMMA", "SOLVER.REFERENCE_WORLD_SIZE",
    "SOLVER.WARMUP_FACTOR", "SOLVER.WARMUP_ITERS", "SOLVER.WEIGHT_DECAY", "SOLVER.WEIGHT_DECAY_BIAS",
    "SOLVER.WEIGHT_DECAY_NORM",
)  # fmt: skip
_FROM_ONE = (
    "SOLVER.ACCUMULATE", "SOLVER.CHECKPOINT_PERIOD", "SOLVER.IMS_PER_BATCH", "SOLVER.MAX_ITER", "SOLVER.NUM_DECAYS",
    "TEST.PRECISE_BN.NUM_ITER",
)  # fmt: skip
RANGES: dict[str, tuple[float, float]] = {  # smallest and largest value
    **dict.fromkeys(_FROM_ZERO, (0, math.inf)),
    **dict.fromkeys(_FROM_ONE, (1, math.inf)),
    "SOLVER.MOMENTUM": (0, 1),
    "SEED": (-1, 2**31 - 1),  # -1: random
}


def check_ranges(cfg: CfgNode) -> None:
    """Checks the numbers that a training and an evaluation read.

    Raises:
        UserError: a key in `RANGES` is out of its range or not a number; names the first.
    """
    values = keys(OWN) | dict(flatten(cfg))
    for key, (low, high) in RANGES.items():
        value = values[key]
        number = value if isinstance(value, (int, float)) else math.nan
        if not (math.isfinite(number) and low <= number <= high) and (key, value) != ("SOLVER.WEIGHT_DECAY_BIAS", None):
            raise UserError(f"{key} is {value}; it must be {limits(key)}")


def limits(key: str) -> str:
    """The range of a key in `RANGES` in words."""
    low, high = RANGES[key]
    return f"at least {low}" + (f" and at most {high}" if high < math.inf else "")


def check_training(cfg: CfgNode) -> None:
    """Checks what only a training reads, in a config that has passed `check_ranges`.

    Raises:
        UserError: an empty list, learning-rate steps that are out of order, an unknown sampler, numbers
            of keypoints that do not fit, statistics of frozen norms where none is frozen.
    """
    solver, steps = cfg.SOLVER, list(cfg.SOLVER.STEPS)
    if any(type(step) is not int for step in steps) or steps != sorted(set(steps)) or (steps and steps[0] < 1):
        raise UserError(f"SOLVER.STEPS is {tuple(steps)}; give increasing whole numbers of iterations, at least 1")
    points, sigmas = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS, len(cfg.TEST.KEYPOINT_OKS_SIGMAS) or 17  # COCO's own
    if cfg.MODEL.KEYPOINT_ON and cfg.DATASETS.TEST and points != sigmas:
        raise UserError(
            f"MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is {points}, but there are {sigmas} sigmas to evaluate with: set "
            "TEST.KEYPOINT_OKS_SIGMAS"
        )
    if solver.get("BF16", False) and not solver.AMP.ENABLED:
        raise UserError("SOLVER.BF16 is True, but SOLVER.AMP.ENABLED is False; set it True as well")
    if best := cfg.TEST.get("BEST", ""):
        tasks = ["bbox", *(["segm"] if cfg.MODEL.MASK_ON else []), *(["keypoints"] if cfg.MODEL.KEYPOINT_ON else [])]
        if best.partition("/")[0] not in tasks or not re.fullmatch(r"AP(50|75|[smlrcf]|-.+)?", best.partition("/")[2]):
            known = ", ".join(f"{task}/AP" for task in tasks)
            raise UserError(f"TEST.BEST is {best!r}; name a metric of this detector's ({known}, bbox/AP50, ...)")
    count, norm = solver.get("FROZEN_BN_ITER", 0), cfg.MODEL.RESNETS.NORM
    if count and norm != "FrozenBN" and (cfg.MODEL.BACKBONE.FREEZE_AT == 0 or "BN" not in norm):
        raise UserError(
            f"SOLVER.FROZEN_BN_ITER is {count}, but no batch norm of the ResNet is frozen; set "
            "MODEL.BACKBONE.FREEZE_AT (5: all), or FROZEN_BN_ITER 0"
        )
    if (sampler := cfg.DATALOADER.SAMPLER_TRAIN) not in (known := ALLOWED["DATALOADER.SAMPLER_TRAIN"]):
        raise UserError(f"DATALOADER.SAMPLER_TRAIN is {sampler}; choose {' or '.join(known)}")
    for key, value in (("DATASETS.TRAIN", cfg.DATASETS.TRAIN), ("INPUT.MIN_SIZE_TRAIN", cfg.INPUT.MIN_SIZE_TRAIN)):
        if not value:
            raise UserError(f"{key} is {value}, empty; give at least one")
    if cfg.INPUT.MIN_SIZE_TRAIN_SAMPLING == "range" and len(cfg.INPUT.MIN_SIZE_TRAIN) != 2:
        raise UserError(
            f"INPUT.MIN_SIZE_TRAIN is {cfg.INPUT.MIN_SIZE_TRAIN}; INPUT.MIN_SIZE_TRAIN_SAMPLING range needs two values"
        )


def check_parts(cfg: CfgNode, world: int) -> None:
    """Checks that the batch can be divided among the processes, and that each has an image for each of its parts.

    Raises:
        UserError: it cannot, or it has not.
    """
    if cfg.SOLVER.IMS_PER_BATCH % world:
        raise UserError(
            f"SOLVER.IMS_PER_BATCH is {cfg.SOLVER.IMS_PER_BATCH}; it must be a multiple of the {world} processes"
        )
    parts, images = cfg.SOLVER.get("ACCUMULATE", 1), cfg.SOLVER.IMS_PER_BATCH // world
    if parts > images:
        raise UserError(
            f"SOLVER.ACCUMULATE is {parts}; it must be at most {images}, the images of SOLVER.IMS_PER_BATCH per process"
        )
