"""Loads, overrides and checks the configs of pretraining and probing; `config_keys` lists the keys.

The language is Detectron2's (YAML, `_BASE_`, `KEY VALUE` overrides), with Detectron2's key names where it has them.
The values of recipes are in configs/pretrain/*.yaml, never here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from .common.config import extensions
from .common.config.yaml_io import flatten, get, merge_file, merge_overrides, parse_yaml
from .common.errors import UserError
from .common.files import expand
from .config_keys import IMAGENET_MEAN, IMAGENET_STD, find_readers, list_keys
from .data.augmentations import AUGMENTATIONS
from .methods import METHODS

# Prefixes of keys that never change the result of any stage: where it runs, where data is, how often it writes.
_PLACES = ("OUTPUT_DIR", "DEVICE", "DATA.ROOT", "DATA.DOWNLOAD", "DATALOADER.NUM_WORKERS")
FREE_ANYWHERE = (*_PLACES, "SOLVER.CHECKPOINT_", "SOLVER.LOG_PERIOD", "SOLVER.COMPILE")

# Prefixes of keys that do not change what pretraining learns: also those that only probes read (they do change the
# result of a probe), and the micro-batches, which change the number of BN groups where that is 0: a resumed run then
# warns.
FREE_ON_RESUME = (*FREE_ANYWHERE, "SOLVER.ACCUMULATE", "DATA.VAL", "DATA.PROBE_", "PROBE.", "LINEAR.")

# Keys that a resumed run may change although they distinguish runs: the digest of the images, not their path, decides
# whether the data are the same; MAX_STEPS ends the same schedule early.
_SAME_STEPS = ("DATA.TRAIN", "DATALOADER.ON_CORRUPT", "SOLVER.MAX_STEPS")
MAY_CHANGE = (*FREE_ON_RESUME, *_SAME_STEPS, "SOLVER.CHANGE_RECIPE")

_DATA_SET_KEYS = ("MODEL.STEM", "VIEWS.IMAGE_SIZE", "VIEWS.MEAN", "VIEWS.STD")
_DATA_SETS = {  # values of these keys for a named data set unless they are set; others have the defaults
    "cifar10": ("cifar", 32, [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    "cifar100": ("cifar", 32, [0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
    "fashion_mnist": ("cifar", 28, [0.2860, 0.2860, 0.2860], [0.3530, 0.3530, 0.3530]),
    "stl10": ("cifar", 96, IMAGENET_MEAN, IMAGENET_STD),
    "tiny_imagenet": ("cifar", 64, IMAGENET_MEAN, IMAGENET_STD),
}

_BUILT_IN = {*METHODS, *AUGMENTATIONS}  # before any module of the user's registers its own


def default_config() -> CfgNode:
    """Return a config with the defaults of all keys."""
    cfg = CfgNode()
    for key, (default, *_) in list_keys().items():
        *sections, leaf = key.split(".")
        node = cfg
        for section in sections:
            node = node.setdefault(section, CfgNode())
        node[leaf] = list(default) if isinstance(default, list) else default
    return cfg


def default_config_for(config_file: str | Path | None, overrides: Sequence[Any]) -> CfgNode:
    """Return the defaults, with the values that follow from the data set that the file or the overrides name."""
    preliminary = default_config()
    _merge(preliminary, config_file, overrides)
    cfg = default_config()
    if preliminary.DATA.TRAIN in _DATA_SETS:
        for key, value in zip(_DATA_SET_KEYS, _DATA_SETS[preliminary.DATA.TRAIN], strict=True):
            merge_overrides(cfg, [key, value])
    return cfg


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
        raise UserError(f"{description} cannot be read ({error}); use the version that wrote it") from error
    cfg.freeze()
    return cfg


def output_dir(cfg: CfgNode) -> Path:
    """Return the run folder of a pretraining run."""
    return Path(cfg.OUTPUT_DIR or f"runs/{cfg.METHOD.NAME}_{cfg.MODEL.ARCH}")


def check_config(cfg: CfgNode) -> None:
    """Raise UserError for the first invalid value: one line with the value, the limit and the remedy."""
    for key, (default, limits, _) in list_keys().items():
        for value in get(cfg, key) if isinstance(default, list) else [get(cfg, key)]:
            if limits:
                limits.check(key, value)
    for key in ("VIEWS.MEAN", "VIEWS.STD"):
        if len(get(cfg, key)) != 3:
            raise UserError(f"{key} is {get(cfg, key)}; it must be 3 numbers, one per RGB channel")
    output = Path(cfg.OUTPUT_DIR or "runs").resolve()
    for name in (cfg.DATA.TRAIN, cfg.DATA.PROBE_TRAIN, cfg.DATA.VAL):
        folder = Path(expand(name.removeprefix("folder:").strip())).resolve()
        if name.startswith("folder:") and output.is_relative_to(folder):
            problem = f"OUTPUT_DIR {output} is inside {name}, which would then contain its figures as images"
            raise UserError(f"{problem}; choose another OUTPUT_DIR")
    _check_unread_keys(cfg)
    _check_combinations(cfg)


def _check_combinations(cfg: CfgNode) -> None:
    solver = cfg.SOLVER
    if solver.LR_SCHEDULE == "step" and any(epoch >= solver.EPOCHS for epoch in solver.STEPS):
        raise UserError(f"SOLVER.STEPS is {solver.STEPS}; each must be below SOLVER.EPOCHS {solver.EPOCHS}; set both")
    if solver.WARMUP_EPOCHS > solver.EPOCHS:
        raise UserError(f"SOLVER.WARMUP_EPOCHS is {solver.WARMUP_EPOCHS}; set at most SOLVER.EPOCHS {solver.EPOCHS}")
    if METHODS[cfg.METHOD.NAME].kind == "batch" and solver.IMS_PER_BATCH == 1:
        raise UserError(f"SOLVER.IMS_PER_BATCH is 1, but METHOD.NAME {cfg.METHOD.NAME} needs negatives; set 2 or more")
    if cfg.METHOD.DENSE_WARMUP_STEPS and not cfg.METHOD.DENSE_WEIGHT:
        problem = f"METHOD.DENSE_WARMUP_STEPS is {cfg.METHOD.DENSE_WARMUP_STEPS}, but METHOD.DENSE_WEIGHT is 0"
        raise UserError(f"{problem}; set both or neither")
    probe = cfg.PROBE
    crop = probe.IMAGE_SIZE or cfg.VIEWS.IMAGE_SIZE
    if probe.RESIZE and (probe.CROP == "none" or crop > probe.RESIZE):
        problem = f"PROBE.RESIZE is {probe.RESIZE} with PROBE.CROP {probe.CROP} of {crop} pixels"
        raise UserError(f"{problem}; set RESIZE to at least the crop, or to 0, which CROP none needs")


def _check_unread_keys(cfg: CfgNode) -> None:
    """Reject keys that the chosen method, optimizer or schedule ignores."""
    keys = list_keys()
    for key, (chooser, names) in find_readers().items():
        value = get(cfg, key)
        default = keys[key][0]
        if get(cfg, chooser) not in names and value != default:
            remedy = f"omit it (default: {default}), or set {chooser} {' or '.join(names)}"
            raise UserError(f"{key} is {value}, which {chooser} {get(cfg, chooser)} does not read; {remedy}")
