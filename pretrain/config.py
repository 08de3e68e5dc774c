"""Every key of pretraining and probing, its meaning and its neutral default; load, override, validate, dump.

The language is Detectron2's (YAML, `_BASE_`, `KEY VALUE` overrides); its words are used where it has them.
A recipe's values stand in configs/pretrain/*.yaml, never here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from fvcore.common.config import CfgNode

from .common.config_io import merge_file, merge_overrides
from .common.errors import UserError, nearest
from .methods import METHODS
from .views import RECIPES

# Prefixes of keys that never change any stage's result: where it runs, where data lies, how often it writes.
FREE_ANYWHERE = ("OUTPUT_DIR", "DEVICE", "DATA.ROOT", "DATA.DOWNLOAD", "DATALOADER.NUM_WORKERS", "SOLVER.CHECKPOINT_",
                 "SOLVER.LOG_PERIOD", "SOLVER.COMPILE")  # fmt: skip

# Prefixes of keys that do not change what pretraining learns, so a run may be resumed under other values: besides the
# ones above, what only probes read (for a probe itself these do change the result).
FREE_ON_RESUME = (*FREE_ANYWHERE, "DATA.VAL", "DATA.PROBE_TRAIN", "PROBE.", "LINEAR.")


def default_config() -> CfgNode:
    """The tree of all keys with their defaults (MoCo v2's where a value must stand)."""
    c = CfgNode()

    c.METHOD = CfgNode()
    c.METHOD.NAME = "mocov2"  # a key of pretrain.methods.METHODS
    c.METHOD.TEMPERATURE = 0.2  # tau
    c.METHOD.NUM_KEYS = 1  # M': positive keys per image
    c.METHOD.LAMBDA = 1.0  # jcl: weight of the covariance; sce: weight of the contrastive part, in [0, 1]
    c.METHOD.LAMBDA_SCHEDULE = "constant"  # constant | linear (jcl: lambda (epoch + 1) / epochs)
    c.METHOD.KEY_TEMPERATURE = 0.05  # sce, ressl: tau_m, of the key encoder's similarities
    c.METHOD.MASK_POSITIVE = False  # sce: True is the equation (s_ii = 0), False the published pseudo-code (logit 0)
    c.METHOD.K1 = 1.0  # tcl: weight of the positives' term
    c.METHOD.K2 = 1.0  # tcl: weight of the negatives' term
    c.METHOD.LABELS = "index"  # supcon, tcl: index (self-supervised: the image's index) | class (supervised)

    c.MODEL = CfgNode()
    c.MODEL.ARCH = "resnet50"  # resnet18 | resnet34 | resnet50 | resnet101
    c.MODEL.STEM = "imagenet"  # imagenet (7x7 stride 2, max pool) | cifar (3x3 stride 1, no pool)
    c.MODEL.WEIGHTS = ""  # checkpoint whose backbone starts both encoders; empty: random
    c.MODEL.HEAD_HIDDEN_DIMS = [2048]  # hidden layers of the projection head; [] is one linear layer (MoCo v1)
    c.MODEL.HEAD_BN = False  # batch norm after each hidden layer (SCE, SimCLR)
    c.MODEL.EMBEDDING_DIM = 128  # d
    c.MODEL.QUEUE_SIZE = 65536  # K, negatives in the queue
    c.MODEL.EMA_MOMENTUM = 0.999  # m, of the key encoder
    c.MODEL.EMA_SCHEDULE = "constant"  # constant | cosine (m rises to 1)
    c.MODEL.EMA_UPDATE = "before_keys"  # before_keys (MoCo, JCL) | after_step (SCE's pseudo-code)
    c.MODEL.BN_GROUPS = 0  # parts of the global batch that share BN statistics; 0: one per process; 1: SyncBN over all

    c.VIEWS = CfgNode()
    c.VIEWS.QUERY = "moco_v2"  # a key of pretrain.views.RECIPES
    c.VIEWS.KEY = "moco_v2"
    c.VIEWS.IMAGE_SIZE = 224  # pixels a side
    c.VIEWS.EXECUTOR = "cpu"  # cpu | device (jitter, gray and blur in batches on the training device)

    c.DATA = CfgNode()
    c.DATA.ROOT = "datasets"
    c.DATA.TRAIN = "imagenet"  # a named data set (its train split) or folder:/path
    c.DATA.VAL = ""  # where probes are scored; empty: the same data set's val split
    c.DATA.PROBE_TRAIN = ""  # labelled images for probes; empty: DATA.TRAIN
    c.DATA.DOWNLOAD = False

    c.DATALOADER = CfgNode()
    c.DATALOADER.NUM_WORKERS = 4  # worker processes a rank
    c.DATALOADER.ON_CORRUPT = "error"  # error | skip (replace the image, count it, fail above 1 in 1,000)

    c.SOLVER = CfgNode()
    c.SOLVER.OPTIMIZER = "sgd"  # sgd | adamw | lars
    c.SOLVER.BASE_LR = 0.03  # at the global batch size below
    c.SOLVER.MOMENTUM = 0.9
    c.SOLVER.WEIGHT_DECAY = 1e-4
    c.SOLVER.LARS_TRUST = 0.001  # lars: trust coefficient (eta); a layer's rate is min(eta |w| / |g|, lr)
    c.SOLVER.IMS_PER_BATCH = 256  # N, the global batch, whatever the number of processes
    c.SOLVER.EPOCHS = 200
    c.SOLVER.LR_SCHEDULE = "cosine"  # cosine | step
    c.SOLVER.STEPS = [120, 160]  # step: epochs at which the learning rate falls
    c.SOLVER.GAMMA = 0.1  # step: by this factor
    c.SOLVER.WARMUP_EPOCHS = 0.0  # linear, from 0
    c.SOLVER.PER_STEP_LR = True  # False: the learning rate changes between epochs only (MoCo's scripts)
    c.SOLVER.AMP = "none"  # none | bf16 | fp16 (with a gradient scaler)
    c.SOLVER.CHANNELS_LAST = False
    c.SOLVER.COMPILE = False  # torch.compile the encoders
    c.SOLVER.CHECKPOINT_PERIOD = 0  # optimiser steps; 0: every epoch
    c.SOLVER.CHECKPOINT_KEEP = 2  # newest checkpoints kept beside the final one
    c.SOLVER.LOG_PERIOD = 20  # optimiser steps between lines of metrics.json
    c.SOLVER.MAX_STEPS = 0  # stop after so many optimiser steps, as if the run ended; 0: EPOCHS decides

    c.PROBE = CfgNode()
    c.PROBE.KNN_PERIOD = 0  # epochs between kNN evaluations during pretraining; 0: only at the end
    c.PROBE.KNN_K = 200
    c.PROBE.KNN_TEMPERATURE = 0.07
    c.PROBE.KNN_MAX_IMAGES = 0  # at most so many training images during pretraining (evenly spaced); 0: all
    c.PROBE.IMAGE_SIZE = 0  # pixels a side for evaluation; 0: VIEWS.IMAGE_SIZE
    c.PROBE.RESIZE = 0  # shorter side before the centre crop; 0: image size x 256/224 (imagenet stem), none (cifar)

    c.LINEAR = CfgNode()  # the linear probe, a stage of its own (configs/linear/*.yaml)
    c.LINEAR.ENCODER = "query"  # query | key
    c.LINEAR.BASE_LR = 30.0
    c.LINEAR.IMS_PER_BATCH = 256
    c.LINEAR.EPOCHS = 100
    c.LINEAR.LR_SCHEDULE = "step"  # step | cosine
    c.LINEAR.STEPS = [60, 80]  # epochs
    c.LINEAR.GAMMA = 0.1
    c.LINEAR.MOMENTUM = 0.9
    c.LINEAR.WEIGHT_DECAY = 0.0
    c.LINEAR.AUGMENT = "crop_flip"  # crop_flip (random resized crop, flip) | pad_flip (padding 4, flip) | none
    c.LINEAR.LRS = []  # several heads trained side by side, one a learning rate; [] is [BASE_LR]

    c.OUTPUT_DIR = ""  # the run folder
    c.SEED = 0
    c.DEVICE = "auto"  # auto (cuda where there is one) | cpu | cuda
    return c


def load_config(config_file: str | Path | None = None, overrides: Sequence[str] = ()) -> CfgNode:
    """Defaults, then a YAML file, then ``KEY VALUE`` overrides; checked and frozen.

    Raises:
        UserError: unknown key (the nearest known one is named), wrong type, value out of range.
    """
    cfg = default_config()
    if config_file:
        merge_file(cfg, config_file)
    merge_overrides(cfg, overrides)
    validate(cfg)
    cfg.freeze()
    return cfg


def from_yaml_text(text: str, what: str = "a kept config") -> CfgNode:
    """The config kept as text in a checkpoint or in a run folder's config.yaml.

    Args:
        what: names it in messages.

    Raises:
        UserError: it is not a config, or has a key that this version does not know.
    """
    cfg = default_config()
    try:
        cfg.merge_from_other_cfg(CfgNode.load_cfg(text))
    except (KeyError, ValueError, TypeError, AttributeError, AssertionError, yaml.YAMLError) as error:
        reason = " ".join(str(error.args[0] if isinstance(error, KeyError) else error).split())
        raise UserError(f"{what} is not one of this version ({reason}); use the version it was made with") from error
    cfg.freeze()
    return cfg


_CHOICES = {
    "METHOD.LAMBDA_SCHEDULE": ("constant", "linear"),
    "METHOD.LABELS": ("index", "class"),
    "MODEL.ARCH": ("resnet18", "resnet34", "resnet50", "resnet101"),
    "MODEL.STEM": ("imagenet", "cifar"),
    "MODEL.EMA_SCHEDULE": ("constant", "cosine"),
    "MODEL.EMA_UPDATE": ("before_keys", "after_step"),
    "VIEWS.EXECUTOR": ("cpu", "device"),
    "DATALOADER.ON_CORRUPT": ("error", "skip"),
    "SOLVER.OPTIMIZER": ("sgd", "adamw", "lars"),
    "SOLVER.LR_SCHEDULE": ("cosine", "step"),
    "SOLVER.AMP": ("none", "bf16", "fp16"),
    "LINEAR.ENCODER": ("query", "key"),
    "LINEAR.LR_SCHEDULE": ("step", "cosine"),
    "LINEAR.AUGMENT": ("crop_flip", "pad_flip", "none"),
    "DEVICE": ("auto", "cpu", "cuda"),
}

# key: (smallest, largest, is the smallest itself allowed)
_RANGES = {
    "METHOD.TEMPERATURE": (0, float("inf"), False),
    "METHOD.KEY_TEMPERATURE": (0, float("inf"), False),
    "METHOD.NUM_KEYS": (1, 1024, True),
    "METHOD.LAMBDA": (0, float("inf"), True),
    "METHOD.K1": (0, float("inf"), True),
    "METHOD.K2": (0, float("inf"), True),
    "MODEL.EMBEDDING_DIM": (1, 1 << 20, True),
    "MODEL.QUEUE_SIZE": (1, 1 << 30, True),
    "MODEL.EMA_MOMENTUM": (0, 1, True),
    "MODEL.BN_GROUPS": (0, 1 << 20, True),
    "VIEWS.IMAGE_SIZE": (8, 4096, True),
    "DATALOADER.NUM_WORKERS": (0, 1024, True),
    "SOLVER.BASE_LR": (0, float("inf"), True),
    "SOLVER.MOMENTUM": (0, 1, True),
    "SOLVER.LARS_TRUST": (0, float("inf"), False),
    "SOLVER.GAMMA": (0, float("inf"), True),
    "SOLVER.WEIGHT_DECAY": (0, float("inf"), True),
    "SOLVER.IMS_PER_BATCH": (1, 1 << 30, True),
    "SOLVER.EPOCHS": (1, 1 << 30, True),
    "SOLVER.WARMUP_EPOCHS": (0, float("inf"), True),
    "SOLVER.CHECKPOINT_PERIOD": (0, 1 << 40, True),
    "SOLVER.CHECKPOINT_KEEP": (1, 1 << 30, True),
    "SOLVER.LOG_PERIOD": (1, 1 << 30, True),
    "SOLVER.MAX_STEPS": (0, 1 << 40, True),
    "PROBE.KNN_PERIOD": (0, 1 << 30, True),
    "PROBE.KNN_K": (1, 1 << 30, True),
    "PROBE.KNN_TEMPERATURE": (0, float("inf"), False),
    "PROBE.KNN_MAX_IMAGES": (0, 1 << 40, True),
    "PROBE.IMAGE_SIZE": (0, 4096, True),
    "PROBE.RESIZE": (0, 1 << 20, True),
    "LINEAR.BASE_LR": (0, float("inf"), True),
    "LINEAR.IMS_PER_BATCH": (1, 1 << 30, True),
    "LINEAR.EPOCHS": (1, 1 << 30, True),
    "LINEAR.GAMMA": (0, float("inf"), True),
    "LINEAR.MOMENTUM": (0, 1, True),
    "LINEAR.WEIGHT_DECAY": (0, float("inf"), True),
    "SEED": (0, (1 << 32) - 1, True),  # times a million and more it must fit the 64 bits of a generator's seed
}


def validate(cfg: CfgNode) -> None:
    """Checks every choice and range; one line with the value, the limit and the remedy.

    Raises:
        UserError: at the first value that cannot work.
    """
    if cfg.METHOD.NAME not in METHODS:
        known = ", ".join(sorted(METHODS))
        raise UserError(f"METHOD.NAME {cfg.METHOD.NAME!r} is not one of {known}{nearest(cfg.METHOD.NAME, METHODS)}")
    for key, choices in _CHOICES.items():
        value = _leaf(cfg, key)
        if value not in choices:
            raise UserError(f"{key} is {value!r}; choose one of {', '.join(choices)}")
    for key, (low, high, closed) in _RANGES.items():
        value = _leaf(cfg, key)
        if not _is_number(value) or not low <= value <= high or (value == low and not closed):
            raise UserError(f"{key} is {value}; it must be {'at least' if closed else 'above'} {low}" + _at_most(high))
    for key in ("VIEWS.QUERY", "VIEWS.KEY"):
        if _leaf(cfg, key) not in RECIPES:
            raise UserError(
                f"{key} {_leaf(cfg, key)!r} is not one of {', '.join(RECIPES)}{nearest(_leaf(cfg, key), RECIPES)}"
            )
    if any(not isinstance(width, int) or width < 1 for width in cfg.MODEL.HEAD_HIDDEN_DIMS):
        raise UserError(f"MODEL.HEAD_HIDDEN_DIMS is {cfg.MODEL.HEAD_HIDDEN_DIMS}; every width must be at least 1")
    for key, what in (("SOLVER.STEPS", "epochs"), ("LINEAR.STEPS", "epochs"), ("LINEAR.LRS", "learning rates")):
        values = _leaf(cfg, key)
        if any(not _is_number(value) or value < 0 for value in values):
            raise UserError(f"{key} is {values}; it must be a list of {what}, numbers of at least 0")
    method = METHODS[cfg.METHOD.NAME]
    if cfg.METHOD.LAMBDA_SCHEDULE != "constant" and cfg.METHOD.NAME != "jcl":
        raise UserError(
            f"METHOD.LAMBDA_SCHEDULE is {cfg.METHOD.LAMBDA_SCHEDULE}, but {cfg.METHOD.NAME} has no schedule; set it "
            "constant, or use jcl"
        )
    size = cfg.PROBE.IMAGE_SIZE or cfg.VIEWS.IMAGE_SIZE
    if cfg.PROBE.RESIZE and size > cfg.PROBE.RESIZE:  # else found out when pretraining has ended
        raise UserError(f"PROBE.RESIZE is {cfg.PROBE.RESIZE}, below the crop of {size} pixels; raise it, or set 0")
    if cfg.METHOD.NAME == "sce" and cfg.METHOD.LAMBDA > 1:
        raise UserError(f"METHOD.LAMBDA is {cfg.METHOD.LAMBDA}; for sce it must be at most 1 (1 is MoCo, 0 is ReSSL)")
    if cfg.METHOD.LABELS == "class" and cfg.METHOD.NAME not in ("supcon", "tcl"):
        raise UserError(f"METHOD.LABELS is class, but {cfg.METHOD.NAME} has no use for labels; use supcon or tcl")
    if cfg.METHOD.NUM_KEYS > 1 and not method.many_keys:
        many = ", ".join(name for name, other in METHODS.items() if other.many_keys)
        raise UserError(f"METHOD.NUM_KEYS is {cfg.METHOD.NUM_KEYS}, but {cfg.METHOD.NAME} takes 1; {many} take more")


def _leaf(cfg: CfgNode, dotted: str) -> Any:
    for part in dotted.split("."):
        cfg = cfg[part]
    return cfg


def _is_number(value: Any) -> bool:
    """True for what a float can hold: not NaN, an infinity, or a whole number of hundreds of digits."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _at_most(high: float) -> str:
    return "" if high == float("inf") else f" and at most {high}"
