"""Checks a config's numbers for both engines before a run: later, a wrong one would end it with a traceback."""

from __future__ import annotations

import math
import re

from fvcore.common.config import CfgNode

from pretrain.common.config_io import flatten
from pretrain.common.errors import UserError

from .config import ALLOWED

_LARGEST = float("inf")
_LARGEST_FLOAT32 = 3.4e38  # the optimizer's factors are converted to float32
RANGES: dict[str, tuple[float, float, bool]] = {  # smallest, largest, whether the smallest is allowed
    "DATALOADER.NUM_WORKERS": (0, 1024, True),
    "SOLVER.BASE_LR": (0, _LARGEST_FLOAT32, True),
    "SOLVER.BASE_LR_END": (0, _LARGEST_FLOAT32, True),
    "SOLVER.BIAS_LR_FACTOR": (0, _LARGEST_FLOAT32, True),
    "SOLVER.CHECKPOINT_PERIOD": (1, _LARGEST, True),
    "SOLVER.CLIP_GRADIENTS.CLIP_VALUE": (0, _LARGEST_FLOAT32, False),
    "SOLVER.GAMMA": (0, _LARGEST_FLOAT32, True),
    "SOLVER.IMS_PER_BATCH": (1, _LARGEST, True),
    "SOLVER.MAX_ITER": (1, _LARGEST, True),
    "SOLVER.MOMENTUM": (0, 1, True),
    "SOLVER.NUM_DECAYS": (1, _LARGEST, True),
    "SOLVER.REFERENCE_WORLD_SIZE": (0, _LARGEST, True),
    "SOLVER.WARMUP_FACTOR": (0, _LARGEST_FLOAT32, True),
    "SOLVER.WARMUP_ITERS": (0, _LARGEST, True),
    "SOLVER.WEIGHT_DECAY": (0, _LARGEST_FLOAT32, True),
    "SOLVER.WEIGHT_DECAY_BIAS": (0, _LARGEST_FLOAT32, True),  # or null
    "SOLVER.WEIGHT_DECAY_NORM": (0, _LARGEST_FLOAT32, True),
    "TEST.PRECISE_BN.NUM_ITER": (1, _LARGEST, True),
    "SEED": (-1, 2**31 - 1, True),  # -1: random
}


def check_ranges(cfg: CfgNode) -> None:
    """Checks the numbers that a training and an evaluation read.

    Raises:
        UserError: a key in `RANGES` is out of its range or not a number; names the first.
    """
    values = dict(flatten(cfg))
    for key, (low, high, closed) in RANGES.items():
        value = values[key]
        if value is None and key == "SOLVER.WEIGHT_DECAY_BIAS":
            continue
        number = value if isinstance(value, (int, float)) else math.nan
        if not (math.isfinite(number) and low <= number <= high) or (number == low and not closed):
            raise UserError(f"{key} is {value}; it must be {limits(key)}")


def limits(key: str) -> str:
    """The range of a key in `RANGES` in words."""
    low, high, closed = RANGES[key]
    most = "" if high == _LARGEST else f" and at most {high}"
    return f"{'at least' if closed else 'above'} {low}{most}"


def check_training(cfg: CfgNode) -> None:
    """Checks what only a training reads, in a config that has passed `check_ranges`.

    Raises:
        UserError: an empty list, learning-rate steps that are out of order, an unknown sampler, numbers
            of keypoints that do not fit, statistics of frozen norms where none is frozen.
    """
    solver, steps = cfg.SOLVER, list(cfg.SOLVER.STEPS)
    if any(type(step) is not int for step in steps) or steps != sorted(set(steps)) or (steps and steps[0] < 1):
        raise UserError(f"SOLVER.STEPS is {tuple(steps)}; give increasing whole numbers of iterations, at least 1")
    if solver.LR_SCHEDULER_NAME == "WarmupCosineLR" and solver.BASE_LR == 0:
        raise UserError("SOLVER.BASE_LR is 0; WarmupCosineLR needs one above 0")
    points, sigmas = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS, len(cfg.TEST.KEYPOINT_OKS_SIGMAS) or 17  # COCO's own
    if cfg.MODEL.KEYPOINT_ON and cfg.DATASETS.TEST and points != sigmas:
        raise UserError(
            f"MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is {points}, but there are {sigmas} sigmas to evaluate with: set "
            "TEST.KEYPOINT_OKS_SIGMAS"
        )
    for key in ("FROZEN_BN_ITER", "CHECKPOINT_KEEP"):
        if (count := cfg.SOLVER.get(key, 0)) < 0:
            raise UserError(f"SOLVER.{key} is {count}; it must be at least 0")
    if cfg.SOLVER.get("BF16", False) and not cfg.SOLVER.AMP.ENABLED:
        raise UserError("SOLVER.BF16 is True, but SOLVER.AMP.ENABLED is False; set it True as well")
    if best := cfg.TEST.get("BEST", ""):
        tasks = ["bbox", *(["segm"] if cfg.MODEL.MASK_ON else []), *(["keypoints"] if cfg.MODEL.KEYPOINT_ON else [])]
        if best.partition("/")[0] not in tasks or not re.fullmatch(r"AP(50|75|[smlrcf]|-.+)?", best.partition("/")[2]):
            known = ", ".join(f"{task}/AP" for task in tasks)
            raise UserError(f"TEST.BEST is {best!r}; name a metric of this detector's ({known}, bbox/AP50, ...)")
        if not cfg.DATASETS.TEST:
            raise UserError(f"TEST.BEST is {best!r}, but DATASETS.TEST is empty; name a data set, or leave BEST empty")
    count, norm = cfg.SOLVER.get("FROZEN_BN_ITER", 0), cfg.MODEL.RESNETS.NORM
    if count and norm != "FrozenBN" and (cfg.MODEL.BACKBONE.FREEZE_AT == 0 or "BN" not in norm):
        raise UserError(
            f"SOLVER.FROZEN_BN_ITER is {count}, but no batch norm of the ResNet is frozen (MODEL.RESNETS.NORM "
            f"{norm!r}, MODEL.BACKBONE.FREEZE_AT {cfg.MODEL.BACKBONE.FREEZE_AT}); set FREEZE_AT (5: all), or "
            "FROZEN_BN_ITER 0"
        )
    if (sampler := cfg.DATALOADER.SAMPLER_TRAIN) not in (known := ALLOWED["DATALOADER.SAMPLER_TRAIN"]):
        raise UserError(f"DATALOADER.SAMPLER_TRAIN is {sampler}; choose {' or '.join(known)}")
    for key, value in (("DATASETS.TRAIN", cfg.DATASETS.TRAIN), ("INPUT.MIN_SIZE_TRAIN", cfg.INPUT.MIN_SIZE_TRAIN)):
        if not value:
            raise UserError(f"{key} is empty; give at least one")


def check_parts(cfg: CfgNode, world: int) -> None:
    """Checks that the batch can be divided among the processes, and that each has an image for each of its parts.

    Raises:
        UserError: it cannot, or it has not.
    """
    if cfg.SOLVER.IMS_PER_BATCH % world:
        raise UserError(
            f"SOLVER.IMS_PER_BATCH is {cfg.SOLVER.IMS_PER_BATCH}; it must be a multiple of the {world} processes"
        )
    parts, mine = cfg.SOLVER.get("ACCUMULATE", 1), cfg.SOLVER.IMS_PER_BATCH // world
    if parts != 1 and not 1 <= parts <= mine:
        raise UserError(
            f"SOLVER.ACCUMULATE is {parts}; it must be from 1 to {mine}, the images of SOLVER.IMS_PER_BATCH per process"
        )
