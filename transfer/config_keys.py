"""Meanings and allowed values of config keys, which are checked before a run.

Meanings are listed for this project's own keys and for keys that decide training; detectron2/config/defaults.py
has the others.
"""

import re
from typing import Any

from fvcore.common.config import CfgNode

from pretrain.common.config.limits import Choice
from pretrain.common.config.overrides import Key
from pretrain.common.config.yaml_io import expected_type, flatten, get
from pretrain.common.errors import UserError

from .config import ALLOWED, HONORED, LIMITS, MEANINGS, REJECTED, check_multiple, default_config, list_tasks

_FIXED_LENGTH = ("PIXEL_MEAN", "PIXEL_STD", "BBOX_REG_WEIGHTS")  # last words of keys: one number per channel or delta
_SAMPLERS = Choice(("TrainingSampler", "RepeatFactorTrainingSampler"))


def check_ranges(cfg: CfgNode) -> None:
    """Check the numbers and the precision that training and evaluation read.

    Raises:
        UserError: a key is out of its range or has a list of another form, or there is not one sigma per keypoint.
    """
    _check_lists(cfg)
    is_rotated = "Rotated" in cfg.MODEL.ANCHOR_GENERATOR.NAME
    # Others have another number of channels, or rotated boxes.
    has_standard_inputs = not cfg.INPUT.MAPPER and cfg.INPUT.FORMAT != "L" and not is_rotated
    for key, limits in LIMITS.items():
        value = get(cfg, key)
        if has_standard_inputs and key.endswith(_FIXED_LENGTH) and len(value) != len(HONORED[key]):
            raise UserError(f"{key} is {list(value)}; it must be {len(HONORED[key])} numbers")
        if cfg.INPUT.MAPPER and key.startswith("MODEL.PIXEL_"):  # its images may have other values
            continue
        for number in _list_numbers(value):
            limits.check(key, number)
    points = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS
    sigmas = len(cfg.TEST.KEYPOINT_OKS_SIGMAS) or 17  # COCO's own
    if cfg.MODEL.KEYPOINT_ON and cfg.DATASETS.TEST and points != sigmas:
        problem = f"MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is {points}, but TEST.KEYPOINT_OKS_SIGMAS has {sigmas} values"
        raise UserError(f"{problem}; set one per keypoint")


def _check_lists(cfg: CfgNode) -> None:
    """Raise UserError for a list whose length, nesting or elements do not suit a detector."""
    for section in ("RPN", "ROI_HEADS"):
        thresholds = list(cfg.MODEL[section].IOU_THRESHOLDS)
        count = len(cfg.MODEL[section].IOU_LABELS) - 1
        if len(thresholds) != count or thresholds != sorted(thresholds):
            form = f"{count} number(s) in increasing order"
            raise UserError(f"MODEL.{section}.IOU_THRESHOLDS is {thresholds}; it must be {form}")
    head = cfg.MODEL.RETINANET if cfg.MODEL.META_ARCHITECTURE == "RetinaNet" else cfg.MODEL.RPN
    maps = len(head.IN_FEATURES)
    for key in ("MODEL.ANCHOR_GENERATOR.SIZES", "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS"):
        lists = get(cfg, key)
        if len(lists) not in (1, maps) or not all(isinstance(item, (list, tuple)) and item for item in lists):
            form = f"a list of lists, one for all or one for each of the {maps} feature maps"
            raise UserError(f"{key} is {lists}; it must be {form}, as in {HONORED[key]}")
    for key in ("DATASETS.TRAIN", "DATASETS.TEST"):
        if not all(isinstance(name, str) for name in get(cfg, key)):
            raise UserError(f"{key} is {get(cfg, key)}; it must be a list of names, in quotes")


def _list_numbers(value: Any) -> list[Any]:
    """Return the numbers in nested lists, or the value itself if it is no list."""
    return [number for item in value for number in _list_numbers(item)] if isinstance(value, (list, tuple)) else [value]


def check_training(cfg: CfgNode) -> None:
    """Check what only training reads, in a config that has passed `check_ranges`.

    Raises:
        UserError: DATASETS.TRAIN is empty, learning-rate steps are out of order, FROZEN_BN_ITER is set although no
            norm is frozen, or another key does not suit the detector.
    """
    solver = cfg.SOLVER
    steps = list(solver.STEPS)
    if any(type(step) is not int for step in steps) or steps != sorted(set(steps)) or (steps and steps[0] < 1):
        raise UserError(f"SOLVER.STEPS is {tuple(steps)}; they must be increasing iteration numbers, each at least 1")
    if solver.BF16 and not solver.AMP.ENABLED:
        raise UserError("SOLVER.BF16 is True, but SOLVER.AMP.ENABLED is False; set it True as well")
    task, _, metric = cfg.TEST.BEST.partition("/")
    tasks = list_tasks(cfg)
    if cfg.TEST.BEST and (task not in tasks or not re.fullmatch(r"AP(50|75|[smlrcf]|-.+)?", metric)):
        known = ", ".join(f"{task}/AP" for task in tasks)
        raise UserError(f"TEST.BEST is {cfg.TEST.BEST!r}; choose a metric of this detector ({known}, bbox/AP50, ...)")
    norm = cfg.MODEL.RESNETS.NORM
    has_frozen_norms = norm == "FrozenBN" or (cfg.MODEL.BACKBONE.FREEZE_AT > 0 and "BN" in norm)
    if solver.FROZEN_BN_ITER and not has_frozen_norms:
        remedy = "set MODEL.BACKBONE.FREEZE_AT (5 freezes all), or SOLVER.FROZEN_BN_ITER 0"
        raise UserError(f"SOLVER.FROZEN_BN_ITER is {solver.FROZEN_BN_ITER}, but no norm is frozen; {remedy}")
    _SAMPLERS.check("DATALOADER.SAMPLER_TRAIN", cfg.DATALOADER.SAMPLER_TRAIN)
    if not cfg.DATASETS.TRAIN:
        raise UserError(f"DATASETS.TRAIN is {cfg.DATASETS.TRAIN}, which is empty; name at least one data set")
    sizes = list(cfg.INPUT.MIN_SIZE_TRAIN)
    is_range = cfg.INPUT.MIN_SIZE_TRAIN_SAMPLING == "range"
    if not sizes or (is_range and len(sizes) != 2):
        remedy = "INPUT.MIN_SIZE_TRAIN_SAMPLING range needs two values" if is_range else "give at least one size"
        raise UserError(f"INPUT.MIN_SIZE_TRAIN is {sizes}; {remedy}")


def check_batch_division(cfg: CfgNode, world_size: int) -> None:
    """Raise UserError unless the batch divides evenly among the processes and their micro-batches."""
    accumulate = cfg.SOLVER.ACCUMULATE
    reason = f"{world_size} processes x SOLVER.ACCUMULATE {accumulate}"
    check_multiple(cfg.SOLVER.IMS_PER_BATCH, world_size * accumulate, reason)


def describe_keys() -> list[Key]:
    """Describe every key of Detectron2 for --help-keys."""
    meanings = dict.fromkeys(REJECTED, "the torchvision engine takes only this value") | MEANINGS
    return [
        Key(key, default, _describe_limits(key, default), meanings.get(key, ""))
        for key, default in flatten(default_config())
    ]


def _describe_limits(key: str, default: object) -> str:
    """Return a key's range, its supported values or its type, in words."""
    if key in LIMITS:
        return str(LIMITS[key])
    return ", ".join(str(value) or "''" for value in ALLOWED[key]) if key in ALLOWED else expected_type(default)
