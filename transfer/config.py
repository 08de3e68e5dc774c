"""Detectron2's config keys, readable without Detectron2, and what the torchvision engine does with each.

keys.yaml contains every key with its default, limits and meaning: those that the torchvision engine honors, those that
it rejects unless they have their default, and this project's own.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from fvcore.common.config import CfgNode

from pretrain.common.config.limits import FLOAT32_PRECISION, Choice, Range
from pretrain.common.config.yaml_io import flatten, list_changes, merge_file, merge_overrides
from pretrain.common.errors import UserError

_TABLES = yaml.safe_load(Path(__file__).with_name("keys.yaml").read_text())
HONORED: dict[str, Any] = dict(flatten(_TABLES["honored"]))  # key -> default
REJECTED: dict[str, Any] = dict(flatten(_TABLES["rejected"]))
OWN: dict[str, Any] = dict(flatten(_TABLES["own"]))
MEANINGS: dict[str, str] = _TABLES["meanings"]
ALLOWED: dict[str, list[Any]] = _TABLES["allowed"]  # honored keys of which the engine supports only some values
KNOWN_TO_DETECTRON2 = {key: Choice(tuple(names)) for key, names in _TABLES["known_to_detectron2"].items()}
LIMITS = {"FLOAT32_PRECISION": FLOAT32_PRECISION, **{key: Range(*limits) for key, limits in _TABLES["limits"].items()}}

# Prefixes of keys that never change a detector's result: where and how fast it runs, how often it saves and evaluates.
FREE_ANYWHERE = ("OUTPUT_DIR", "VERSION", "VIS_PERIOD", "CUDNN_BENCHMARK", "MODEL.DEVICE", "DATALOADER.NUM_WORKERS")
FREE_ANYWHERE += ("SOLVER.CHECKPOINT_", "TEST.EVAL_PERIOD", "TEST.BEST")

# A resumed training may also change these: its length, its evaluations, and what is read only when it starts.
FREE_ON_RESUME = (*FREE_ANYWHERE, "SEED", "MODEL.WEIGHTS", "DATASETS.TEST", "SOLVER.MAX_ITER", "SOLVER.STEPS", "TEST.")


def check_same_training(cfg: CfgNode, recorded: Path) -> None:
    """Check that ``cfg`` resumes the run that ``recorded``, its config.yaml if it has one yet, describes.

    Raises:
        UserError: names each key that has another value.
    """
    if not recorded.is_file():
        return
    current = dict(flatten(yaml.safe_load(cfg.dump())))
    earlier = current | OWN | dict(flatten(yaml.safe_load(recorded.read_text())))
    changed = list_changes(earlier, current, FREE_ON_RESUME)
    if changed:
        text = "; ".join(changed)
        raise UserError(f"{recorded.parent} contains a run with a different config ({text}); choose another OUTPUT_DIR")


def default_config() -> CfgNode:
    """Return the tree of Detectron2's keys and this project's own, with their defaults."""
    cfg = CfgNode()
    for key, default in copy.deepcopy(HONORED | REJECTED | OWN).items():
        *sections, name = key.split(".")
        node = cfg
        for section in sections:
            node = node.setdefault(section, CfgNode())
        node[name] = default
    return cfg


def load_config(config_file: str | Path | None, opts: Sequence[Any] = ()) -> CfgNode:
    """Load a Detectron2 config: defaults, then the file (and its `_BASE_`), then ``KEY VALUE`` overrides.

    Raises:
        UserError: missing file, unknown key (the nearest known one is named), wrong type.
    """
    cfg = default_config()
    if config_file:
        merge_file(cfg, config_file)
    merge_overrides(cfg, opts)
    for key in ("SIZES", "ASPECT_RATIOS"):  # one flat list is for all feature maps, as Detectron2 reads it
        values = cfg.MODEL.ANCHOR_GENERATOR[key]
        if values and not any(isinstance(value, (list, tuple)) for value in values):
            cfg.MODEL.ANCHOR_GENERATOR[key] = [list(values)]
    return cfg


def dump(cfg: CfgNode) -> str:
    """Return ``cfg`` as YAML. Detectron2 can read it unless this project's own keys are set."""
    cfg = cfg.clone()
    for key, default in OWN.items():
        section, name = key.split(".")
        if cfg[section].get(name) == default:
            del cfg[section][name]
    return cfg.dump()


def classes_key(cfg: CfgNode) -> str:
    """Return the key of the detector's number of classes."""
    return f"MODEL.{'RETINANET' if cfg.MODEL.META_ARCHITECTURE == 'RetinaNet' else 'ROI_HEADS'}.NUM_CLASSES"


def list_tasks(cfg: CfgNode) -> list[str]:
    """Return COCO's tasks that the detector is evaluated on."""
    is_on = {"bbox": True, "segm": cfg.MODEL.MASK_ON, "keypoints": cfg.MODEL.KEYPOINT_ON}
    return [task for task in is_on if is_on[task]]


def check_supported(cfg: CfgNode) -> None:
    """Check that the torchvision engine can honor a config.

    Raises:
        UserError: names every key that it cannot honor, its value and what the engine supports.
    """
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in flatten(cfg)}
    supported = {key: [default] for key, default in REJECTED.items()} | ALLOWED
    supported["INPUT.MAPPER"] = [""]
    supported["MODEL.RESNETS.RES2_OUT_CHANNELS"] = [64 if cfg.MODEL.RESNETS.DEPTH in (18, 34) else 256]
    wrong = [
        f"{key} is {values[key]!r} (supported: {', '.join(map(repr, choices))})"
        for key, choices in supported.items()
        if values[key] not in choices
    ]
    if wrong:
        remedy = "set supported values, or use Detectron2 (`make detectron2`, --engine detectron2)"
        raise UserError(f"the torchvision engine does not support this config: {'; '.join(wrong)}; {remedy}")


def check_multiple(batch: int, divisor: int, reason: str) -> None:
    """Raise UserError, which names the nearest sizes, for a batch that is not a multiple of ``divisor``."""
    if batch % divisor:
        below = batch // divisor * divisor
        sizes = f"{below} or {below + divisor}" if below else str(divisor)
        form = f"a multiple of {divisor} ({reason}), such as {sizes}"
        raise UserError(f"SOLVER.IMS_PER_BATCH is {batch}; it must be {form}")


def scale_to_world(cfg: CfgNode, world_size: int) -> CfgNode:
    """Return the config for ``world_size`` processes if it was written for SOLVER.REFERENCE_WORLD_SIZE of them.

    As in Detectron2, batch and learning rate grow with the number of processes, and iterations shrink. A reference of
    0 means that the config suits any number.

    Raises:
        UserError: the batch is not a multiple of the reference.
    """
    cfg = cfg.clone()
    reference = cfg.SOLVER.REFERENCE_WORLD_SIZE
    if reference in (0, world_size):
        return cfg
    cfg.defrost()
    solver = cfg.SOLVER
    check_multiple(solver.IMS_PER_BATCH, reference, f"SOLVER.REFERENCE_WORLD_SIZE {reference}")
    scale = world_size / reference
    solver.IMS_PER_BATCH = round(solver.IMS_PER_BATCH * scale)
    solver.BASE_LR *= scale
    solver.WARMUP_ITERS = round(solver.WARMUP_ITERS / scale)
    for key in ("MAX_ITER", "CHECKPOINT_PERIOD"):
        solver[key] = max(1, round(solver[key] / scale))
    solver.STEPS = tuple(round(step / scale) for step in solver.STEPS)
    cfg.TEST.EVAL_PERIOD = round(cfg.TEST.EVAL_PERIOD / scale)
    solver.REFERENCE_WORLD_SIZE = world_size
    return cfg
