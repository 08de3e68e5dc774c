"""What the keys of a detector's config mean, and the values that they may have: checked before a run, where a wrong one
would end with a traceback later.

Meanings are those of this project's own keys and of what decides the training; detectron2/config/defaults.py has the
others.
"""

from __future__ import annotations

import math
import re

from fvcore.common.config import CfgNode

from pretrain.common.config.overrides import Key
from pretrain.common.config.yaml_io import expected_type, flatten
from pretrain.common.errors import UserError

from .config import ALLOWED, OWN, REFUSED, default_config, keys

MEANINGS = {
    "DATASETS.TEST": "as TRAIN; evaluated at the end, and every TEST.EVAL_PERIOD iterations",
    "DATASETS.TRAIN": "names such as coco_2017_train, or 'coco:/path/annotations.json:/path/images'; category ids may "
    "be any; with :skip_bad at the end, bad records are skipped and listed; Detectron2 engine: any name in its "
    "DatasetCatalog",
    "INPUT.FORMAT": "order of the color channels; that of the pretraining",
    "INPUT.MAPPER": "Detectron2 engine: a name in transfer.MAPPERS, which your module of --import registers",
    "MODEL.BACKBONE.FREEZE_AT": "how many stages are not trained; 0: all are trained; 5: the ResNet is frozen",
    "MODEL.DEVICE": "cuda or cpu; cuda falls back to the CPU where there is no GPU",
    "MODEL.PIXEL_MEAN": "per channel, from 0 to 255; that of the pretraining",
    "MODEL.PIXEL_STD": "per channel, from 0 to 255; that of the pretraining",
    "MODEL.RESNETS.NORM": "BN: statistics of each process; SyncBN: of all; FrozenBN: those of the pretraining",
    "MODEL.RESNETS.RES2_OUT_CHANNELS": "64 for a ResNet-18 or ResNet-34, 256 for a ResNet-50 or ResNet-101",
    "MODEL.RESNETS.STRIDE_IN_1X1": "False: torchvision's ResNet; True: MSRA's",
    "MODEL.ROI_HEADS.NUM_CLASSES": "categories in the annotation files",
    "MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS": "keypoints per instance in the annotation files",
    "MODEL.WEIGHTS": "the converted backbone to start from, or a detector to evaluate: a file, or an address of "
    "detectron2:// or https://; empty: random values",
    "OUTPUT_DIR": "the run folder",
    "SEED": "of weights, order of the images and sampling; -1: drawn at the start, and recorded",
    "SOLVER.ACCUMULATE": "parts of each process's batch that go through the detector one by one, for less memory; "
    "batch norms then see a part at a time",
    "SOLVER.AMP.ENABLED": "half precision: float16 on a GPU, or bfloat16 (BF16)",
    "SOLVER.BASE_LR": "learning rate, for a batch of IMS_PER_BATCH images; 0.02 for 16 is usual",
    "SOLVER.BF16": "with AMP.ENABLED: bfloat16 instead of float16; also on a CPU",
    "SOLVER.CHECKPOINT_KEEP": "newest checkpoints kept, in addition to model_final.pth and model_best.pth; 0: all",
    "SOLVER.FROZEN_BN_ITER": "batches that give frozen batch norms their statistics before training, for every "
    "initialization alike; 0: those of the weights",
    "SOLVER.HOOKS": "names in transfer.HOOKS, which your module of --import registers",
    "SOLVER.IMS_PER_BATCH": "images per iteration, of all processes together",
    "SOLVER.MAX_ITER": "iterations; images in the training set / IMS_PER_BATCH of them make an epoch",
    "SOLVER.REFERENCE_WORLD_SIZE": "processes that batch, learning rate and schedule are written for; 0: any number",
    "TEST.AUG.ENABLED": "Detectron2 engine: also evaluate with resized and flipped images; not for keypoints",
    "TEST.BEST": "metric, such as bbox/AP, whose best evaluation (of the first set of DATASETS.TEST) is kept in "
    "model_best.pth; empty: none",
    "TEST.EVAL_PERIOD": "iterations between evaluations; 0: only at the end",
    "TEST.KEYPOINT_OKS_SIGMAS": "one per keypoint; empty: COCO's 17",
    "TEST.PRECISE_BN.ENABLED": "average the statistics of batch normalization over training images before a test",
    "TEST.PRECISE_BN.NUM_ITER": "batches for that, at most the iterations of the training",
}


_FROM_ZERO = (
    "DATALOADER.NUM_WORKERS", "SOLVER.BASE_LR", "SOLVER.BASE_LR_END", "SOLVER.CHECKPOINT_KEEP",
    "SOLVER.CLIP_GRADIENTS.CLIP_VALUE", "SOLVER.FROZEN_BN_ITER", "SOLVER.GAMMA",
    "SOLVER.REFERENCE_WORLD_SIZE", "SOLVER.WARMUP_FACTOR", "SOLVER.WARMUP_ITERS", "SOLVER.WEIGHT_DECAY",
    "SOLVER.WEIGHT_DECAY_NORM",
)  # fmt: skip
_FROM_ONE = (
    "SOLVER.ACCUMULATE", "SOLVER.CHECKPOINT_PERIOD", "SOLVER.IMS_PER_BATCH", "SOLVER.MAX_ITER",
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
        UserError: a key in `RANGES` is out of its range or not a number; names the first. Or the keypoints have
            another number of sigmas.
    """
    values = keys(OWN) | dict(flatten(cfg))
    for key, (low, high) in RANGES.items():
        value = values[key]
        number = value if isinstance(value, (int, float)) else math.nan
        if not (math.isfinite(number) and low <= number <= high):
            raise UserError(f"{key} is {value}; it must be {limits(key)}")
    points, sigmas = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS, len(cfg.TEST.KEYPOINT_OKS_SIGMAS) or 17  # COCO's own
    if cfg.MODEL.KEYPOINT_ON and cfg.DATASETS.TEST and points != sigmas:
        raise UserError(
            f"MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is {points}, but there are {sigmas} sigmas to evaluate with: set "
            "TEST.KEYPOINT_OKS_SIGMAS"
        )


def limits(key: str, default: object = None) -> str:
    """A key's range, its supported values or its type, in words."""
    if key in RANGES:
        low, high = RANGES[key]
        return f"at least {low}" + (f" and at most {high}" if high < math.inf else "")
    return ", ".join(str(value) or "''" for value in ALLOWED[key]) if key in ALLOWED else expected_type(default)


def check_training(cfg: CfgNode) -> None:
    """Checks what only a training reads, in a config that has passed `check_ranges`.

    Raises:
        UserError: an empty list, learning-rate steps that are out of order, an unknown sampler,
            statistics of frozen norms where none is frozen.
    """
    solver, steps = cfg.SOLVER, list(cfg.SOLVER.STEPS)
    if any(type(step) is not int for step in steps) or steps != sorted(set(steps)) or (steps and steps[0] < 1):
        raise UserError(f"SOLVER.STEPS is {tuple(steps)}; give increasing whole numbers of iterations, at least 1")
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
    if (sampler := cfg.DATALOADER.SAMPLER_TRAIN) not in ("TrainingSampler", "RepeatFactorTrainingSampler"):
        raise UserError(f"DATALOADER.SAMPLER_TRAIN is {sampler}; choose TrainingSampler or RepeatFactorTrainingSampler")
    if not cfg.DATASETS.TRAIN:
        raise UserError(f"DATASETS.TRAIN is {cfg.DATASETS.TRAIN}, empty; give at least one")
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


def describe_keys() -> list[Key]:
    """Every key of Detectron2 as --help-keys lists it."""
    refused = dict.fromkeys(keys(REFUSED), "the torchvision engine takes only this value")
    notes = refused | MEANINGS
    return [Key(key, default, limits(key, default), notes.get(key, "")) for key, default in flatten(default_config())]
