"""Loads, overrides and checks the configs of pretraining and probing; `keys` lists the keys.

The language is Detectron2's (YAML, `_BASE_`, `KEY VALUE` overrides), with Detectron2's key names where it has them.
The values of recipes are in configs/pretrain/*.yaml, never here.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from .common.config import extensions, yaml_io
from .common.config.keys import SAME_RESULT, Effect, Keys, build_config, compare, copy_value
from .common.config.overrides import format_value
from .common.config.yaml_io import flatten, parse_yaml
from .common.errors import UserError
from .common.run import file_names
from .common.run.folder import find_checkpoints
from .data import names
from .data.augmentations import AUGMENTATIONS
from .data.names import list_names
from .keys import IMAGENET_MEAN, IMAGENET_STD, list_keys
from .methods import METHODS

# Effects of keys that do not change what pretraining learns; a resumed run may also change how long it continues.
SAME_TRAINING = SAME_RESULT | {Effect.MEMORY, Effect.PROBE}
SAME_STEPS = SAME_TRAINING | {Effect.LENGTH}

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
    return build_config(list_keys())


def load_config(config_file: str | Path | None = None, overrides: Sequence[Any] = (), base: str = "") -> CfgNode:
    """Load the defaults, then a YAML file, then ``KEY VALUE`` overrides; check and freeze the config.

    Args:
        base: the config of the run that a probe is of, as YAML text, which replaces the defaults.

    Raises:
        UserError: unknown key (the nearest known one is named), wrong type, value out of range.
    """
    keys = list_keys()
    cfg = build_config(keys)
    if base:
        _merge_text(cfg, keys, base)
        cfg.OUTPUT_DIR = ""  # that of the run
    places = yaml_io.merge(cfg, keys, config_file, overrides)
    if not base:
        _set_data_set_defaults(cfg, places)
    check_config(cfg, keys, places)
    if not base:
        # A digest of the user's modules, so that no run resumes with other versions of them.
        is_imported = {cfg.METHOD.NAME, cfg.VIEWS.QUERY, cfg.VIEWS.KEY} - _BUILT_IN
        cfg.IMPORTED = extensions.digest() if is_imported else ""
    cfg.freeze()
    return cfg


def load_recipe(recipe: str | Path | None = None, overrides: Sequence[Any] = ()) -> CfgNode:
    """Load the config of a pretraining, whose OUTPUT_DIR is runs/<recipe> unless a file or an override names it.

    Without a recipe it is runs/<method>_<architecture>, as it was with one in earlier versions of `python -m pretrain`.

    Raises:
        UserError: see `load_config`; or such a version has started this run, which would start again in another folder.
    """
    cfg = load_config(recipe, overrides)
    if cfg.OUTPUT_DIR:
        return cfg
    without_recipe = Path("runs", f"{cfg.METHOD.NAME}_{cfg.MODEL.ARCH}")
    folder = Path("runs", Path(recipe).stem) if recipe else without_recipe
    if not find_checkpoints(folder) and _contains_run_of(cfg, without_recipe):
        problem = f"{without_recipe} contains this run, whose default folder is now {folder}"
        raise UserError(
            f"{problem}; to continue it, add OUTPUT_DIR {without_recipe}; to start again, OUTPUT_DIR {folder}"
        )
    cfg.defrost()
    cfg.OUTPUT_DIR = str(folder)
    cfg.freeze()
    return cfg


def _contains_run_of(cfg: CfgNode, folder: Path) -> bool:
    """Return whether ``folder`` contains a checkpoint of the same training."""
    if not find_checkpoints(folder):
        return False
    try:
        earlier = from_yaml_text((folder / file_names.CONFIG).read_text())
    except (OSError, ValueError):  # another program's folder
        return False
    return not compare(list_keys(), dict(flatten(earlier)), dict(flatten(cfg)), SAME_STEPS, is_resumed=True)


def from_yaml_text(text: str, description: str = "a saved config") -> CfgNode:
    """Parse the config that a checkpoint or a run folder's config.yaml contains as text.

    Args:
        description: names the text in messages.

    Raises:
        UserError: it is not a config, or has a key that this version does not know.
    """
    keys = list_keys()
    cfg = build_config(keys)
    _merge_text(cfg, keys, text, description)
    cfg.freeze()
    return cfg


def _merge_text(cfg: CfgNode, keys: Keys, text: str, description: str = "a saved config") -> None:
    values: dict[str, Any] = {}
    try:
        values = dict(flatten(parse_yaml(text)))
        yaml_io.merge(cfg, keys, None, [word for pair in values.items() for word in pair])
    except ValueError as error:
        imported = str(values.get("IMPORTED") or "")
        remedy = "use the version and the --import with which it was written"
        if imported not in ("", extensions.digest()):
            remedy = f"add --import with the path of {imported.rpartition('@')[0]}, with which it was written"
        raise UserError(f"{description} cannot be read ({error}); {remedy}") from error


def _set_data_set_defaults(cfg: CfgNode, named: Collection[str]) -> None:
    """Set the keys that follow from a named data set, except those that a file or an override has ``named``."""
    defaults = [_DATA_SETS.get(name) for name in list_names(cfg.DATA.TRAIN)]
    if defaults[0] and defaults.count(defaults[0]) == len(defaults):
        for key, value in zip(_DATA_SET_KEYS, defaults[0], strict=True):
            if key not in named:
                section, leaf = key.split(".")
                cfg[section][leaf] = copy_value(value)


def resolve_paths(text: str, folder: str | Path) -> str:
    """Return a config as YAML text whose data are found from anywhere; its relative names are those of ``folder``."""
    cfg = from_yaml_text(text).clone()
    cfg.defrost()
    for key in ("TRAIN", "PROBE_TRAIN", "VAL"):
        cfg.DATA[key] = names.resolve(cfg.DATA[key], folder)
    if cfg.DATA.ROOT[:1] not in ("$", "~"):
        cfg.DATA.ROOT = os.path.join(folder, cfg.DATA.ROOT)
    return yaml_io.dump(cfg)


def check_config(cfg: CfgNode, keys: Keys, places: Mapping[str, str]) -> None:
    """Raise UserError for the first invalid value: one line with the value, the limit and the remedy.

    Args:
        places: what follows a key in an error: `" in a.yaml"` if a file sets it (`yaml_io.merge`).
    """
    values = dict(flatten(cfg))
    for key, row in keys.items():
        for value in values[key] if isinstance(row.default, list) else [values[key]]:
            if row.limits:
                row.limits.check(key + places.get(key, ""), value)
    for key in ("VIEWS.MEAN", "VIEWS.STD"):
        if len(values[key]) != 3:
            raise UserError(f"{key} is {values[key]}; it must be 3 numbers, one per RGB channel")
    for name in (cfg.DATA.TRAIN, cfg.DATA.PROBE_TRAIN, cfg.DATA.VAL):
        names.check_outside(cfg.OUTPUT_DIR or "runs", name, "OUTPUT_DIR")
    _check_unread_keys(values, keys, places)
    _check_combinations(cfg)


def _check_combinations(cfg: CfgNode) -> None:
    """Raise UserError for values that contradict each other, such as a learning rate that changes after the end."""
    for section in ("SOLVER", "LINEAR"):
        schedule = cfg[section]
        limit = f"{section}.EPOCHS {schedule.EPOCHS}"
        if schedule.LR_SCHEDULE == "step" and any(epoch >= schedule.EPOCHS for epoch in schedule.STEPS):
            raise UserError(f"{section}.STEPS is {schedule.STEPS}; each must be below {limit}; set both")
        if schedule.get("WARMUP_EPOCHS", 0) > schedule.EPOCHS:  # a linear probe has no warm-up
            raise UserError(f"{section}.WARMUP_EPOCHS is {schedule.WARMUP_EPOCHS}; set at most {limit}")
    if METHODS[cfg.METHOD.NAME].kind == "batch" and cfg.SOLVER.IMS_PER_BATCH == 1:
        raise UserError(f"SOLVER.IMS_PER_BATCH is 1, but METHOD.NAME {cfg.METHOD.NAME} needs negatives; set 2 or more")
    if cfg.METHOD.DENSE_WARMUP_STEPS and not cfg.METHOD.DENSE_WEIGHT:
        problem = f"METHOD.DENSE_WARMUP_STEPS is {cfg.METHOD.DENSE_WARMUP_STEPS}, but METHOD.DENSE_WEIGHT is 0"
        raise UserError(f"{problem}; set both or neither")
    probe = cfg.PROBE
    crop = probe.IMAGE_SIZE or cfg.VIEWS.IMAGE_SIZE
    if probe.RESIZE and (probe.CROP == "none" or crop > probe.RESIZE):
        problem = f"PROBE.RESIZE is {probe.RESIZE} with PROBE.CROP {probe.CROP} of {crop} pixels"
        raise UserError(f"{problem}; set RESIZE to at least the crop, or to 0, which CROP none needs")


def _check_unread_keys(values: Mapping[str, Any], keys: Keys, places: Mapping[str, str]) -> None:
    """Reject keys that the chosen method, optimizer or schedule ignores: overrides first, then those of files."""
    unread = [row for key, row in keys.items() if values[key] != row.default and not row.is_read(values)]
    if not unread:
        return
    chooser = unread[0].chooser
    unread = [row for row in unread if row.chooser == chooser]
    rows = [row for row in unread if not places.get(row.name)] or unread
    settings: dict[str, list[str]] = {}
    for row in rows:
        words = f"{row.name} {format_value(values[row.name])}"
        settings.setdefault(places.get(row.name, ""), []).append(words)
    problem = ", ".join(" and ".join(words) + place for place, words in settings.items())
    remedy = "omit it" if len(rows) == 1 else "omit them"
    if places.get(rows[0].name):  # perhaps a recipe that is not the user's to edit
        defaults = " ".join(f"{row.name} {format_value(row.default)}" for row in rows)
        remedy = f"choose another recipe, or add {defaults} (default)"
    readers = [name for name in rows[0].readers if all(name in row.readers for row in rows)]
    if readers:
        remedy += f", or set {chooser} {' or '.join(readers)}"
    raise UserError(f"{chooser} {values[chooser]} does not read {problem}; {remedy}")
