"""Every key of pretraining and probing: meaning, neutral default and limits. Loads, overrides and validates configs.

The language is Detectron2's (YAML, `_BASE_`, `KEY VALUE` overrides), with Detectron2's key names where it has them.
The values of recipes are in configs/pretrain/*.yaml, never here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from .common.config import extensions
from .common.config.limits import ABOVE_0, AT_LEAST_0, SHARE, Choice, Range
from .common.config.overrides import Key
from .common.config.yaml_io import expected_type, flatten, get, merge_file, merge_overrides, parse_yaml
from .common.errors import UserError
from .data.recipes import RECIPES
from .methods import METHODS

# Prefixes of keys that never change the result of any stage: where it runs, where data is, how often it writes.
FREE_ANYWHERE = ("OUTPUT_DIR", "DEVICE", "DATA.ROOT", "DATA.DOWNLOAD", "DATALOADER.NUM_WORKERS", "SOLVER.CHECKPOINT_",
                 "SOLVER.LOG_PERIOD", "SOLVER.COMPILE")  # fmt: skip

# Prefixes of keys that do not change what pretraining learns, so that a run may be resumed under other values: besides
# the ones above, those that only probes read (they do change the result of a probe), and the parts of a batch, which
# change the number of BN groups where that is 0: a resumed run then warns of it.
FREE_ON_RESUME = (*FREE_ANYWHERE, "SOLVER.ACCUMULATE", "DATA.VAL", "DATA.PROBE_", "PROBE.", "LINEAR.")

_BUILT_IN = {*METHODS, *RECIPES}  # before any module of the user's registers its own

_COUNT, _AT_LEAST_1, _PIXELS = Range(high=1 << 30), Range(1, 1 << 30), Range(high=4096)
_LR_SCHEDULE = Choice(("cosine", "step"))

_QUEUE_KEYS = ("MODEL.QUEUE_SIZE", "MODEL.EMA_MOMENTUM", "MODEL.EMA_SCHEDULE", "MODEL.EMA_UPDATE",
               "METHOD.DENSE_WEIGHT", "METHOD.DENSE_WARMUP_STEPS")  # fmt: skip

# Key -> the key that decides whether it is read, and the values of that key with which it is.
_SOLVER_READERS = {"SOLVER.LARS_TRUST": ("SOLVER.OPTIMIZER", ["lars"]),
                   "SOLVER.LARS_CLIP": ("SOLVER.OPTIMIZER", ["lars"]),
                   "SOLVER.MOMENTUM": ("SOLVER.OPTIMIZER", ["sgd", "lars"]),
                   "SOLVER.STEPS": ("SOLVER.LR_SCHEDULE", ["step"]),
                   "SOLVER.GAMMA": ("SOLVER.LR_SCHEDULE", ["step"])}  # fmt: skip


def _keys() -> dict[str, tuple[Any, Range | Choice | None, str]]:
    """Key -> default, limits (of each value in a list) and meaning; with those of the user's own methods and views.

    The defaults are MoCo v2's where there is no neutral one. Methods declare the other METHOD keys that they read.
    """
    extensions.load()
    remedy = ", or --import the module that registers another"
    methods, recipes = Choice(tuple(METHODS), remedy), Choice(tuple(RECIPES), remedy)
    return {
        "METHOD.NAME": ("mocov2", methods, "what is learned; pretrain/methods has its equation"),
        **{
            h.key: (h.default, h.allowed, h.meaning)
            for method in METHODS.values()
            for h in method.hyperparameters()
        },
        "METHOD.DENSE_WEIGHT": (0.0, SHARE, "w, of the loss of matched locations (DenseCL: 0.5); 0: no dense head"),
        "METHOD.DENSE_WARMUP_STEPS": (0, _COUNT, "optimizer steps at the start in which w is 0"),
        "MODEL.ARCH": ("resnet50", Choice(("resnet18", "resnet34", "resnet50", "resnet101")), "the backbone"),
        "MODEL.STEM": (
            "imagenet", Choice(("imagenet", "cifar")), "imagenet: 7x7 stride 2, max pool; cifar: 3x3 stride 1, no pool",
        ),
        "MODEL.WEIGHTS": ("", None, "checkpoint whose backbone starts both encoders; empty: random"),
        "MODEL.HEAD_HIDDEN_DIMS": (
            [2048], Range(1, 1 << 30, whole=True),
            "widths of the projection head's hidden layers; []: one linear layer (MoCo v1)",
        ),
        "MODEL.HEAD_BN": (False, None, "batch norm after each hidden layer of the head (SCE, SimCLR)"),
        "MODEL.EMBEDDING_DIM": (128, Range(1, 1 << 20), "D, the width of what the head returns"),
        "MODEL.QUEUE_SIZE": (65536, _AT_LEAST_1, "K, negatives in the queue"),
        "MODEL.EMA_MOMENTUM": (0.999, SHARE, "m, of the key encoder"),
        "MODEL.EMA_SCHEDULE": ("constant", Choice(("constant", "cosine")), "cosine: m rises to 1"),
        "MODEL.EMA_UPDATE": (
            "before_keys", Choice(("before_keys", "after_step")),
            "before_keys: MoCo, JCL; after_step: SCE's pseudo-code",
        ),
        "MODEL.BN_GROUPS": (
            0, Range(high=1 << 20),
            "parts of the global batch with their own BN statistics; 0: one per process and micro-batch, on one "
            "process with keys up to 8 and a multiple of the micro-batches; 1: SyncBN over all",
        ),
        "VIEWS.QUERY": ("moco_v2", recipes, "augmentation of the query's view (pretrain/data/recipes.py)"),
        "VIEWS.KEY": ("moco_v2", recipes, "augmentation of the keys' views"),
        "VIEWS.IMAGE_SIZE": (224, Range(8, 4096), "pixels per side"),
        "VIEWS.MEAN": ([0.485, 0.456, 0.406], SHARE, "of the RGB channels, from 0 to 1; ImageNet's"),
        "VIEWS.STD": ([0.229, 0.224, 0.225], Range(0.001, 1), "of the RGB channels"),
        "DATA.ROOT": ("datasets", None, "the folder of the named data sets"),
        "DATA.TRAIN": ("imagenet", None, "a named data set (its train split), or folder:/path"),
        "DATA.VAL": ("", None, "labeled images that probes are scored on; empty: the val split of the same data set"),
        "DATA.PROBE_TRAIN": ("", None, "labeled images that probes learn from; empty: DATA.TRAIN"),
        "DATA.DOWNLOAD": (False, None, "fetch a named data set that is missing and may be fetched"),
        "DATALOADER.NUM_WORKERS": (4, Range(high=1024), "worker processes per rank"),
        "DATALOADER.ON_CORRUPT": (
            "error", Choice(("error", "skip")), "skip: replace an unreadable image, and fail above 1 in 1,000",
        ),
        "SOLVER.OPTIMIZER": ("sgd", Choice(("sgd", "adamw", "lars")), "adamw and lars do not decay biases and norms"),
        "SOLVER.BASE_LR": (0.03, AT_LEAST_0, "learning rate, for a batch of REFERENCE_BATCH images if that is set"),
        "SOLVER.REFERENCE_BATCH": (0, _COUNT, "the learning rate is BASE_LR x IMS_PER_BATCH / this; 0: BASE_LR"),
        "SOLVER.MOMENTUM": (0.9, SHARE, "of sgd and lars"),
        "SOLVER.WEIGHT_DECAY": (1e-4, AT_LEAST_0, "of the optimizer"),
        "SOLVER.LARS_TRUST": (0.001, ABOVE_0, "lars: trust coefficient eta; a layer's rate is lr x eta |w| / |g|"),
        "SOLVER.LARS_CLIP": (False, None, "lars: a layer's rate is min(eta |w| / |g|, lr), as in LARC and solo-learn"),
        "SOLVER.IMS_PER_BATCH": (256, _AT_LEAST_1, "global batch size N, a multiple of processes x ACCUMULATE"),
        "SOLVER.ACCUMULATE": (
            1, _AT_LEAST_1,
            "micro-batches of each process's batch: less memory; loss and gradients are the same up to rounding with "
            "the same BN groups",
        ),
        "SOLVER.EPOCHS": (200, _AT_LEAST_1, "passes over the training images; the learning rate's schedule spans them"),
        "SOLVER.LR_SCHEDULE": ("cosine", _LR_SCHEDULE, "cosine: falls to 0; step: falls at STEPS"),
        "SOLVER.STEPS": ([120, 160], AT_LEAST_0, "step: epochs at which the learning rate falls"),
        "SOLVER.GAMMA": (0.1, AT_LEAST_0, "step: by this factor"),
        "SOLVER.WARMUP_EPOCHS": (0.0, AT_LEAST_0, "epochs in which the learning rate rises from 0, linearly"),
        "SOLVER.PER_STEP_LR": (True, None, "False: the learning rate changes between epochs only (MoCo's scripts)"),
        "SOLVER.AMP": ("none", Choice(("none", "bf16", "fp16")), "half precision; fp16: with a gradient scaler"),
        "SOLVER.CHANGE_RECIPE": (
            False, None, "resume with another AMP, BASE_LR, WARMUP_EPOCHS or own module, which results.json records",
        ),
        "SOLVER.CHANNELS_LAST": (False, None, "memory format of images and weights; faster on recent GPUs"),
        "SOLVER.COMPILE": (False, None, "torch.compile the encoders"),
        "SOLVER.CHECKPOINT_PERIOD": (0, _COUNT, "optimizer steps; 0: every epoch"),
        "SOLVER.CHECKPOINT_KEEP": (2, _AT_LEAST_1, "newest checkpoints kept besides the final one"),
        "SOLVER.LOG_PERIOD": (20, _AT_LEAST_1, "optimizer steps between lines of metrics.json"),
        "SOLVER.MAX_STEPS": (0, _COUNT, "the run ends after this many optimizer steps; 0: after EPOCHS"),
        "PROBE.KNN_PERIOD": (0, _COUNT, "epochs between kNN evaluations during pretraining; 0: only at the end"),
        "PROBE.KNN_K": (200, _AT_LEAST_1, "neighbors that vote"),
        "PROBE.KNN_TEMPERATURE": (0.07, ABOVE_0, "a neighbor's vote has weight exp(similarity / this)"),
        "PROBE.KNN_MAX_IMAGES": (0, _COUNT, "use at most this many training images, evenly spaced; 0: all"),
        "PROBE.IMAGE_SIZE": (0, _PIXELS, "pixels per side for evaluation; 0: VIEWS.IMAGE_SIZE"),
        "PROBE.CROP": (
            "auto", Choice(("auto", "center", "none")),
            "none: the image is resized to a square; auto: center for the imagenet stem, none for cifar",
        ),
        "PROBE.RESIZE": (0, Range(high=1 << 20), "shorter side before the center crop; 0: image size x 256/224"),
        "LINEAR.ENCODER": ("query", Choice(("query", "key")), "which encoder of a momentum pair is probed"),
        "LINEAR.BASE_LR": (30.0, AT_LEAST_0, "learning rate of the linear classifier"),
        "LINEAR.IMS_PER_BATCH": (256, _AT_LEAST_1, "the global batch"),
        "LINEAR.EPOCHS": (100, _AT_LEAST_1, "passes over the labeled training images"),
        "LINEAR.LR_SCHEDULE": ("step", _LR_SCHEDULE, "cosine: falls to 0; step: falls at STEPS"),
        "LINEAR.STEPS": ([60, 80], AT_LEAST_0, "step: epochs at which the learning rate falls"),
        "LINEAR.GAMMA": (0.1, AT_LEAST_0, "step: by this factor"),
        "LINEAR.MOMENTUM": (0.9, SHARE, "of SGD"),
        "LINEAR.WEIGHT_DECAY": (0.0, AT_LEAST_0, "of the classifier"),
        "LINEAR.AUGMENT": (
            "crop_flip", recipes,
            "augmentation; none: every image as in evaluation, so that features are computed once",
        ),
        "LINEAR.LRS": (
            [], AT_LEAST_0,
            "heads trained side by side, one per learning rate; the best one is chosen on a tenth of the training "
            "images, which none of them learns from; [] is [BASE_LR]",
        ),
        "OUTPUT_DIR": ("", None, "the run folder"),
        "IMPORTED": ("", None, "digest of your own modules, if METHOD.NAME or VIEWS are from there; set by each run"),
        "SEED": (0, Range(high=(1 << 32) - 1), "of weights, order and augmentation"),  # times a million it must fit in
        # the 64 bits of a generator's seed
        "DEVICE": ("auto", Choice(("auto", "cpu", "cuda")), "auto: cuda where there is a GPU"),
    }  # fmt: skip


def default_config() -> CfgNode:
    """The tree of all keys with their defaults."""
    cfg = CfgNode()
    for key, (default, *_) in _keys().items():
        *sections, leaf = key.split(".")
        node = cfg
        for section in sections:
            node = node.setdefault(section, CfgNode())
        node[leaf] = list(default) if isinstance(default, list) else default
    return cfg


def describe_keys() -> list[Key]:
    """Every key as --help-keys lists it; a method's own key names the methods that read it."""
    readers = {key: f" ({', '.join(names)})" for key, names in _readers().items() if len(names) < len(METHODS)}
    return [
        Key(
            key,
            default,
            f"{'a list, each ' * isinstance(default, list)}{limits or expected_type(default)}",
            meaning + readers.get(key, ""),
        )
        for key, (default, limits, meaning) in _keys().items()
    ]


def load_config(config_file: str | Path | None = None, overrides: Sequence[Any] = ()) -> CfgNode:
    """Defaults, then a YAML file, then ``KEY VALUE`` overrides; checked and frozen.

    Raises:
        UserError: unknown key (the nearest known one is named), wrong type, value out of range.
    """
    cfg = default_config()
    if config_file:
        merge_file(cfg, config_file)
    merge_overrides(cfg, overrides)
    validate(cfg)
    record_modules(cfg)
    cfg.freeze()
    return cfg


def record_modules(cfg: CfgNode) -> None:
    """Sets IMPORTED, by which a run is refused that began with other versions of the user's modules."""
    own = {cfg.METHOD.NAME, cfg.VIEWS.QUERY, cfg.VIEWS.KEY} - _BUILT_IN
    cfg.IMPORTED = extensions.digest() if own else ""


def from_yaml_text(text: str, what: str = "a saved config") -> CfgNode:
    """The config that a checkpoint or a run folder's config.yaml holds as text.

    Args:
        what: names it in messages.

    Raises:
        UserError: it is not a config, or has a key that this version does not know.
    """
    cfg = default_config()
    try:
        merge_overrides(cfg, [word for pair in flatten(parse_yaml(text)) for word in pair])
    except ValueError as error:
        raise UserError(f"{what} cannot be read ({error}); use the version of this project that wrote it") from error
    cfg.freeze()
    return cfg


def run_folder(cfg: CfgNode) -> Path:
    """The run folder of a pretraining."""
    return Path(cfg.OUTPUT_DIR or f"runs/{cfg.METHOD.NAME}_{cfg.MODEL.ARCH}")


def validate(cfg: CfgNode) -> None:
    """Raises UserError for the first value that cannot work: one line with the value, the limit and the remedy."""
    for key, (default, limits, _) in _keys().items():
        for value in get(cfg, key) if isinstance(default, list) else [get(cfg, key)]:
            if limits:
                limits.check(key, value)
    for key in ("VIEWS.MEAN", "VIEWS.STD"):
        if len(get(cfg, key)) != 3:
            raise UserError(f"{key} is {get(cfg, key)}; it must be 3 numbers, one per RGB channel")
    for name in (cfg.DATA.TRAIN, cfg.DATA.PROBE_TRAIN, cfg.DATA.VAL):
        folder = Path(name.removeprefix("folder:")).expanduser().resolve()
        output = Path(cfg.OUTPUT_DIR or "runs").resolve()
        if name.startswith("folder:") and output.is_relative_to(folder):
            raise UserError(f"OUTPUT_DIR {output} lies in {name}: its pictures would be images; choose another folder")
    _refuse_unread_keys(cfg)
    solver = cfg.SOLVER
    if solver.LR_SCHEDULE == "step" and any(epoch >= solver.EPOCHS for epoch in solver.STEPS):
        raise UserError(f"SOLVER.STEPS is {solver.STEPS}; each must be below SOLVER.EPOCHS {solver.EPOCHS}; set both")
    if solver.WARMUP_EPOCHS > solver.EPOCHS:
        raise UserError(
            f"SOLVER.WARMUP_EPOCHS is {solver.WARMUP_EPOCHS}; it must be at most SOLVER.EPOCHS {solver.EPOCHS}"
        )
    if METHODS[cfg.METHOD.NAME].kind == "batch" and solver.IMS_PER_BATCH == 1:
        raise UserError(
            f"SOLVER.IMS_PER_BATCH is 1, without negatives for METHOD.NAME {cfg.METHOD.NAME}; it must be at least 2"
        )
    if cfg.METHOD.DENSE_WARMUP_STEPS and not cfg.METHOD.DENSE_WEIGHT:
        raise UserError(
            f"METHOD.DENSE_WARMUP_STEPS is {cfg.METHOD.DENSE_WARMUP_STEPS}, but METHOD.DENSE_WEIGHT is 0; set both"
        )
    probe, crop = cfg.PROBE, cfg.PROBE.IMAGE_SIZE or cfg.VIEWS.IMAGE_SIZE
    if probe.RESIZE and (probe.CROP == "none" or crop > probe.RESIZE):
        raise UserError(
            f"PROBE.RESIZE is {probe.RESIZE} with PROBE.CROP {probe.CROP} of {crop} pixels; set RESIZE to at least the "
            "crop, or to 0, which CROP none needs"
        )


def _refuse_unread_keys(cfg: CfgNode) -> None:
    """Refuses a value that the method, the optimizer or the schedule would ignore."""
    keys, readers = _keys(), {key: ("METHOD.NAME", names) for key, names in _readers().items()} | _SOLVER_READERS
    for key, (chooser, names) in readers.items():
        value, default = get(cfg, key), keys[key][0]
        if get(cfg, chooser) not in names and value != default:
            raise UserError(
                f"{key} is {value}, which {chooser} {get(cfg, chooser)} does not read; set it to its default "
                f"{default}, or choose {' or '.join(names)}"
            )


def _readers() -> dict[str, list[str]]:
    """The methods that read each key of queue and key encoder and each hyperparameter, by its key."""
    readers: dict[str, list[str]] = {}
    for name, method in METHODS.items():
        for key in [h.key for h in method.hyperparameters()] + [*_QUEUE_KEYS] * (method.kind == "queue"):
            readers.setdefault(key, []).append(name)
    return readers
