"""Every key of pretraining and probing: meaning, neutral default and limits. Loads, overrides and checks configs.

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
_PLACES = ("OUTPUT_DIR", "DEVICE", "DATA.ROOT", "DATA.DOWNLOAD", "DATALOADER.NUM_WORKERS")
FREE_ANYWHERE = (*_PLACES, "SOLVER.CHECKPOINT_", "SOLVER.LOG_PERIOD", "SOLVER.COMPILE")

# Prefixes of keys that do not change what pretraining learns: also those that only probes read (they do change the
# result of a probe), and the micro-batches, which change the number of BN groups where that is 0: a resumed run then
# warns.
FREE_ON_RESUME = (*FREE_ANYWHERE, "SOLVER.ACCUMULATE", "DATA.VAL", "DATA.PROBE_", "PROBE.", "LINEAR.")

# Keys that a resumed run may change although they distinguish runs: the digest of the images, not their path, decides
# whether the data are the same; MAX_STEPS ends the same schedule early; the memory format changes only rounding.
_SAME_STEPS = ("DATA.TRAIN", "DATALOADER.ON_CORRUPT", "SOLVER.MAX_STEPS", "SOLVER.CHANNELS_LAST")
MAY_CHANGE = (*FREE_ON_RESUME, *_SAME_STEPS, "SOLVER.CHANGE_RECIPE")

# Means and standard deviations are of the training images (CIFAR's as in the released code of SCE and TCL).
_MEAN = [0.485, 0.456, 0.406]  # ImageNet's
_STD = [0.229, 0.224, 0.225]
_DATA_SET_KEYS = ("MODEL.STEM", "VIEWS.IMAGE_SIZE", "VIEWS.MEAN", "VIEWS.STD")
_DATA_SETS = {  # values of these keys for a named data set unless they are set; others have the defaults
    "cifar10": ("cifar", 32, [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    "cifar100": ("cifar", 32, [0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
    "fashion_mnist": ("cifar", 28, [0.2860, 0.2860, 0.2860], [0.3530, 0.3530, 0.3530]),
    "stl10": ("cifar", 96, _MEAN, _STD),
    "tiny_imagenet": ("cifar", 64, _MEAN, _STD),
}

_BUILT_IN = {*METHODS, *RECIPES}  # before any module of the user's registers its own

_COUNT = Range(high=1 << 30)
_AT_LEAST_1 = Range(1, 1 << 30)
_WIDTHS = Range(1, 1 << 30, whole=True)
_ARCHS = Choice(("resnet18", "resnet34", "resnet50", "resnet101"))
_STEMS = Choice(("imagenet", "cifar"))
_SCHEDULES = Choice(("cosine", "step"))
_ENCODERS = Choice(("query", "key"))
_SCHEDULE_MEANING = "cosine: falls to 0; step: falls at STEPS"


def _keys() -> dict[str, tuple[Any, Range | Choice | None, str]]:
    """Return key -> default, limits (of each value in a list) and meaning, including those of registered methods.

    The defaults are MoCo v2's where there is no neutral one. Methods declare the other METHOD keys that they read.
    """
    extensions.load()
    remedy = ", or --import the module that registers another"
    methods = Choice(tuple(METHODS), remedy)
    recipes = Choice(tuple(RECIPES), remedy)
    hyperparameters = [h for method in METHODS.values() for h in method.hyperparameters()]
    return {
        "METHOD.NAME": ("mocov2", methods, "training objective (see pretrain/methods)"),
        **{h.key: (h.default, h.allowed, h.meaning) for h in hyperparameters},
        "METHOD.DENSE_WEIGHT": (0.0, SHARE, "weight w of the dense loss (DenseCL: 0.5); 0 means no dense head"),
        "METHOD.DENSE_WARMUP_STEPS": (0, _COUNT, "optimizer steps before the dense loss is used"),
        "MODEL.ARCH": ("resnet50", _ARCHS, "the backbone"),
        "MODEL.STEM": ("imagenet", _STEMS, "imagenet: 7x7 stride 2, max pool; cifar: 3x3 stride 1, no pool"),
        "MODEL.WEIGHTS": ("", None, "checkpoint that initializes the backbone of both encoders (default: random)"),
        "MODEL.HEAD_HIDDEN_DIMS": ([2048], _WIDTHS, "hidden layers of the projection head; []: a linear one (MoCo v1)"),
        "MODEL.HEAD_BN": (False, None, "batch norm after each hidden layer of the head (SCE, SimCLR)"),
        "MODEL.EMBEDDING_DIM": (128, Range(1, 1 << 20), "embedding dimension D"),
        "MODEL.QUEUE_SIZE": (65536, _AT_LEAST_1, "K, negatives in the queue"),
        "MODEL.EMA_MOMENTUM": (0.999, SHARE, "momentum m of the key encoder"),
        "MODEL.EMA_SCHEDULE": ("constant", Choice(("constant", "cosine")), "cosine: m rises to 1"),
        "MODEL.EMA_UPDATE": (
            "before_keys",
            Choice(("before_keys", "after_step")),
            "before_keys: MoCo, JCL; after_step: SCE's pseudo-code",
        ),
        "MODEL.BN_GROUPS": (
            0,
            Range(high=1 << 20),
            "parts of the global batch with their own BN statistics; 1 is SyncBN over all; 0 means one per process and "
            "micro-batch, or up to 8 for a single process with keys",
        ),
        "VIEWS.QUERY": ("moco_v2", recipes, "augmentation of the query's view (pretrain/data/recipes.py)"),
        "VIEWS.KEY": ("moco_v2", recipes, "augmentation of the keys' views"),
        "VIEWS.IMAGE_SIZE": (224, Range(8, 4096), "pixels per side"),
        "VIEWS.MEAN": (_MEAN, SHARE, "mean of the RGB channels, from 0 to 1"),
        "VIEWS.STD": (_STD, Range(0.001, 1), "standard deviation of the RGB channels"),
        "DATA.ROOT": ("datasets", None, "folder of the named data sets"),
        "DATA.TRAIN": (
            "imagenet",
            None,
            "a named data set (its train split), or folder:/path; MODEL.STEM, VIEWS.IMAGE_SIZE, MEAN and STD follow "
            "from a named data set unless they are set",
        ),
        "DATA.VAL": ("", None, "labeled images that probes are scored on (default: val split of the training data)"),
        "DATA.PROBE_TRAIN": ("", None, "labeled images that probes learn from (default: DATA.TRAIN)"),
        "DATA.DOWNLOAD": (False, None, "fetch a named data set that is missing and may be fetched"),
        "DATALOADER.NUM_WORKERS": (4, Range(high=1024), "worker processes per rank"),
        "DATALOADER.ON_CORRUPT": (
            "error",
            Choice(("error", "skip")),
            "skip: replace an unreadable image, and fail above 1 in 1,000",
        ),
        "SOLVER.OPTIMIZER": ("sgd", Choice(("sgd", "adamw", "lars")), "adamw and lars do not decay biases and norms"),
        "SOLVER.BASE_LR": (0.03, AT_LEAST_0, "learning rate, for a batch of REFERENCE_BATCH images if that is set"),
        "SOLVER.REFERENCE_BATCH": (0, _COUNT, "learning rate = BASE_LR x IMS_PER_BATCH / this; 0 means BASE_LR"),
        "SOLVER.MOMENTUM": (0.9, SHARE, "momentum of sgd and lars"),
        "SOLVER.WEIGHT_DECAY": (1e-4, AT_LEAST_0, "weight decay"),
        "SOLVER.LARS_TRUST": (0.001, ABOVE_0, "lars: trust coefficient eta; a layer's rate is lr x eta |w| / |g|"),
        "SOLVER.LARS_CLIP": (False, None, "lars: a layer's rate is min(eta |w| / |g|, lr), as in LARC and solo-learn"),
        "SOLVER.IMS_PER_BATCH": (256, _AT_LEAST_1, "global batch size N, a multiple of processes x ACCUMULATE"),
        "SOLVER.ACCUMULATE": (
            1,
            _AT_LEAST_1,
            "micro-batches of each process's batch: less memory; loss and gradients are the same up to rounding with "
            "the same BN groups",
        ),
        "SOLVER.EPOCHS": (200, _AT_LEAST_1, "passes over the training images; the learning rate's schedule spans them"),
        "SOLVER.LR_SCHEDULE": ("cosine", _SCHEDULES, _SCHEDULE_MEANING),
        "SOLVER.STEPS": ([120, 160], AT_LEAST_0, "step: epochs at which the learning rate falls"),
        "SOLVER.GAMMA": (0.1, AT_LEAST_0, "factor of step decay"),
        "SOLVER.WARMUP_EPOCHS": (0.0, AT_LEAST_0, "epochs of linear warm-up from 0"),
        "SOLVER.PER_STEP_LR": (True, None, "False: the learning rate changes between epochs only (MoCo's scripts)"),
        "SOLVER.AMP": ("none", Choice(("none", "bf16", "fp16")), "half precision; fp16: with a gradient scaler"),
        "SOLVER.CHANGE_RECIPE": (
            False,
            None,
            "let a resumed run change AMP, BASE_LR, WARMUP_EPOCHS or imported modules (recorded in results.json)",
        ),
        "SOLVER.CHANNELS_LAST": (False, None, "memory format of images and weights; faster on recent GPUs"),
        "SOLVER.COMPILE": (False, None, "torch.compile the encoders"),
        "SOLVER.CHECKPOINT_PERIOD": (0, _COUNT, "optimizer steps between checkpoints; 0 means every epoch"),
        "SOLVER.CHECKPOINT_KEEP": (2, _AT_LEAST_1, "number of newest checkpoints to keep, without the final one"),
        "SOLVER.LOG_PERIOD": (20, _AT_LEAST_1, "optimizer steps between lines of metrics.json"),
        "SOLVER.MAX_STEPS": (0, _COUNT, "end the run after this many optimizer steps; 0 means after EPOCHS"),
        "PROBE.KNN_PERIOD": (0, _COUNT, "epochs between kNN evaluations during pretraining; 0 means only at the end"),
        "PROBE.KNN_K": (200, _AT_LEAST_1, "neighbors that vote"),
        "PROBE.KNN_TEMPERATURE": (0.07, ABOVE_0, "temperature T of the vote weights exp(similarity / T)"),
        "PROBE.KNN_MAX_IMAGES": (0, _COUNT, "use at most this many training images, evenly spaced; 0 means all"),
        "PROBE.IMAGE_SIZE": (0, Range(high=4096), "pixels per side for evaluation; 0 means VIEWS.IMAGE_SIZE"),
        "PROBE.CROP": (
            "auto",
            Choice(("auto", "center", "none")),
            "none: the image is resized to a square; auto: center for the imagenet stem, none for cifar",
        ),
        "PROBE.RESIZE": (0, Range(high=1 << 20), "shorter side before the center crop; 0 means image size x 256/224"),
        "LINEAR.ENCODER": ("query", _ENCODERS, "which encoder of a momentum pair is probed"),
        "LINEAR.BASE_LR": (30.0, AT_LEAST_0, "learning rate of the linear classifier"),
        "LINEAR.IMS_PER_BATCH": (256, _AT_LEAST_1, "global batch size"),
        "LINEAR.EPOCHS": (100, _AT_LEAST_1, "passes over the labeled training images"),
        "LINEAR.LR_SCHEDULE": ("step", _SCHEDULES, _SCHEDULE_MEANING),
        "LINEAR.STEPS": ([60, 80], AT_LEAST_0, "step: epochs at which the learning rate falls"),
        "LINEAR.GAMMA": (0.1, AT_LEAST_0, "factor of step decay"),
        "LINEAR.MOMENTUM": (0.9, SHARE, "momentum of SGD"),
        "LINEAR.WEIGHT_DECAY": (0.0, AT_LEAST_0, "weight decay of the classifier"),
        "LINEAR.AUGMENT": ("crop_flip", recipes, "augmentation; none: as in evaluation, features are computed once"),
        "LINEAR.LRS": (
            [],
            AT_LEAST_0,
            "one classifier per learning rate, trained in parallel; the best is selected on a held-out tenth of the "
            "training images; [] means [BASE_LR]",
        ),
        "OUTPUT_DIR": ("", None, "the run folder"),
        "IMPORTED": ("", None, "digest of your own modules, if METHOD.NAME or VIEWS are from there; set by each run"),
        # seed * 1_000_003 + step must fit in 64 bits
        "SEED": (0, Range(high=(1 << 32) - 1), "seed of weights, order and augmentation"),
        "DEVICE": ("auto", Choice(("auto", "cpu", "cuda")), "auto: cuda where there is a GPU"),
    }


def default_config() -> CfgNode:
    """Return a config with the defaults of all keys."""
    cfg = CfgNode()
    for key, (default, *_) in _keys().items():
        *sections, leaf = key.split(".")
        node = cfg
        for section in sections:
            node = node.setdefault(section, CfgNode())
        node[leaf] = list(default) if isinstance(default, list) else default
    return cfg


def default_config_for(config_file: str | Path | None, overrides: Sequence[Any]) -> CfgNode:
    """Return the defaults, with the values that follow from the data set that the file or the overrides name."""
    cfg = default_config()
    _merge(cfg, config_file, overrides)
    values = _DATA_SETS.get(cfg.DATA.TRAIN, ())
    cfg = default_config()
    for key, value in zip(_DATA_SET_KEYS, values, strict=False):
        merge_overrides(cfg, [key, value])
    return cfg


def describe_keys() -> list[Key]:
    """List every key for --help-keys; a key that not all methods read names those that do."""
    keys = []
    for key, (default, limits, meaning) in _keys().items():
        chooser, names = _readers().get(key, ("", []))
        if chooser == "METHOD.NAME" and len(names) < len(METHODS):
            meaning += f" ({', '.join(names)})"
        prefix = "a list, each " if isinstance(default, list) else ""
        keys.append(Key(key, default, f"{prefix}{limits or expected_type(default)}", meaning))
    return keys


def load_config(config_file: str | Path | None = None, overrides: Sequence[Any] = ()) -> CfgNode:
    """Load the defaults, then a YAML file, then ``KEY VALUE`` overrides; check and freeze the config.

    Raises:
        UserError: unknown key (the nearest known one is named), wrong type, value out of range.
    """
    cfg = default_config_for(config_file, overrides)
    _merge(cfg, config_file, overrides)
    check_config(cfg)
    record_modules(cfg)
    cfg.freeze()
    return cfg


def _merge(cfg: CfgNode, config_file: str | Path | None, overrides: Sequence[Any]) -> None:
    if config_file:
        merge_file(cfg, config_file)
    merge_overrides(cfg, overrides)


def record_modules(cfg: CfgNode) -> None:
    """Record a digest of the user's modules in IMPORTED, so that no run resumes with other versions of them."""
    is_imported = {cfg.METHOD.NAME, cfg.VIEWS.QUERY, cfg.VIEWS.KEY} - _BUILT_IN
    cfg.IMPORTED = extensions.digest() if is_imported else ""


def from_yaml_text(text: str, description: str = "a saved config") -> CfgNode:
    """Parse the config that a checkpoint or a run folder's config.yaml contains as text.

    Args:
        description: names the text in messages.

    Raises:
        UserError: it is not a config, or has a key that this version does not know.
    """
    cfg = default_config()
    try:
        merge_overrides(cfg, [word for pair in flatten(parse_yaml(text)) for word in pair])
    except ValueError as error:
        raise UserError(
            f"{description} cannot be read ({error}); use the version of this project that wrote it"
        ) from error
    cfg.freeze()
    return cfg


def output_dir(cfg: CfgNode) -> Path:
    """Return the run folder of a pretraining."""
    return Path(cfg.OUTPUT_DIR or f"runs/{cfg.METHOD.NAME}_{cfg.MODEL.ARCH}")


def check_config(cfg: CfgNode) -> None:
    """Raise UserError for the first invalid value: one line with the value, the limit and the remedy."""
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
            raise UserError(
                f"OUTPUT_DIR {output} lies in {name}, so its figures would become images; choose another folder"
            )
    _check_unread_keys(cfg)
    _check_combinations(cfg)


def _check_combinations(cfg: CfgNode) -> None:
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
    probe = cfg.PROBE
    crop = probe.IMAGE_SIZE or cfg.VIEWS.IMAGE_SIZE
    if probe.RESIZE and (probe.CROP == "none" or crop > probe.RESIZE):
        raise UserError(
            f"PROBE.RESIZE is {probe.RESIZE} with PROBE.CROP {probe.CROP} of {crop} pixels; set RESIZE to at least the "
            "crop, or to 0, which CROP none needs"
        )


def _check_unread_keys(cfg: CfgNode) -> None:
    """Reject keys that the chosen method, optimizer or schedule ignores."""
    keys = _keys()
    for key, (chooser, names) in _readers().items():
        value = get(cfg, key)
        default = keys[key][0]
        if get(cfg, chooser) not in names and value != default:
            raise UserError(
                f"{key} is {value}, which {chooser} {get(cfg, chooser)} does not read; set it to its default "
                f"{default}, or choose {' or '.join(names)}"
            )


def _readers() -> dict[str, tuple[str, list[str]]]:
    """Return key -> (controlling key, its values for which the key is used)."""
    readers = {
        "SOLVER.LARS_TRUST": ("SOLVER.OPTIMIZER", ["lars"]),
        "SOLVER.LARS_CLIP": ("SOLVER.OPTIMIZER", ["lars"]),
        "SOLVER.MOMENTUM": ("SOLVER.OPTIMIZER", ["sgd", "lars"]),
        "SOLVER.STEPS": ("SOLVER.LR_SCHEDULE", ["step"]),
        "SOLVER.GAMMA": ("SOLVER.LR_SCHEDULE", ["step"]),
    }
    queue_keys = [key for key in _keys() if key.startswith(("MODEL.QUEUE_", "MODEL.EMA_", "METHOD.DENSE_"))]
    for name, method in METHODS.items():
        keys = [h.key for h in method.hyperparameters()] + (queue_keys if method.kind == "queue" else [])
        for key in keys:
            readers.setdefault(key, ("METHOD.NAME", []))[1].append(name)
    return readers
