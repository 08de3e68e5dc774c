"""Loads, overrides, checks and dumps the configs of fine-tuning; `keys` lists the keys."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from pretrain.common.config import yaml_io
from pretrain.common.config.keys import SAME_RESULT, Effect, build_config, compare
from pretrain.common.config.limits import Choice
from pretrain.common.config.yaml_io import flatten, get, parse_yaml
from pretrain.common.errors import UserError, count_noun

from .keys import KEYS

log = logging.getLogger(__name__)
# Effects of the keys that a resumed training may change: also its length and its evaluations.
SAME_STEPS = SAME_RESULT | {Effect.PROBE, Effect.LENGTH}
_FIXED_LENGTH = ("PIXEL_MEAN", "PIXEL_STD", "BBOX_REG_WEIGHTS")  # last words of keys: one number per channel or delta
_SAMPLERS = Choice(("TrainingSampler", "RepeatFactorTrainingSampler"))


def default_config() -> CfgNode:
    """Return the tree of Detectron2's keys and this project's own, with their defaults."""
    return build_config(KEYS)


def load_config(config_file: str | Path | None, opts: Sequence[Any] = ()) -> CfgNode:
    """Load a Detectron2 config: defaults, then the file (and its `_BASE_`), then ``KEY VALUE`` overrides.

    Raises:
        UserError: missing file, unknown key (the nearest known one is named), wrong type.
    """
    cfg = default_config()
    yaml_io.merge(cfg, KEYS, config_file, opts)
    _nest_anchors(cfg)
    return cfg


def from_yaml_text(text: str, opts: Sequence[Any] = ()) -> CfgNode:
    """Return the config that `dump` returned as text, with ``KEY VALUE`` overrides.

    Raises:
        ValueError: the text is not YAML.
        UserError: unknown key or wrong type.
    """
    cfg = default_config()
    leaves = flatten(parse_yaml(text))
    yaml_io.merge(cfg, KEYS, None, [*(word for pair in leaves for word in pair), *opts])
    _nest_anchors(cfg)
    return cfg


def _nest_anchors(cfg: CfgNode) -> None:
    """Make the sizes and ratios of anchors lists of lists: one flat list is for all feature maps, as in Detectron2."""
    for key in ("SIZES", "ASPECT_RATIOS"):
        values = cfg.MODEL.ANCHOR_GENERATOR[key]
        if values and not any(isinstance(value, (list, tuple)) for value in values):
            cfg.MODEL.ANCHOR_GENERATOR[key] = [list(values)]


def check_same_training(cfg: CfgNode, recorded: Path) -> None:
    """Check that ``cfg`` resumes the run that ``recorded``, its config.yaml if it has one yet, describes.

    Raises:
        UserError: names each key that has another value.
    """
    if not recorded.is_file():
        return
    try:
        earlier = from_yaml_text(recorded.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{recorded} cannot be read ({error}); use the version that wrote it") from error
    changes = compare(KEYS, dict(flatten(earlier)), dict(flatten(cfg)), SAME_STEPS, is_resumed=True)
    if changes:
        text = "; ".join(map(str, changes))
        raise UserError(f"{recorded.parent} contains a run with a different config ({text}); choose another OUTPUT_DIR")


def dump(cfg: CfgNode) -> str:
    """Return ``cfg`` as YAML. Detectron2 can read it unless this project's own keys are set."""
    cfg = cfg.clone()
    for row in KEYS.values():
        section, _, name = row.name.rpartition(".")
        if row.is_own and cfg[section].get(name) == row.default:
            del cfg[section][name]
    return yaml_io.dump(cfg)


def classes_key(cfg: CfgNode) -> str:
    """Return the key of the detector's number of classes."""
    return f"MODEL.{'RETINANET' if cfg.MODEL.META_ARCHITECTURE == 'RetinaNet' else 'ROI_HEADS'}.NUM_CLASSES"


def list_tasks(cfg: CfgNode) -> list[str]:
    """Return COCO's tasks that the detector is evaluated on."""
    is_on = {"bbox": True, "segm": cfg.MODEL.MASK_ON, "keypoints": cfg.MODEL.KEYPOINT_ON}
    return [task for task in is_on if is_on[task]]


def list_unsupported(cfg: CfgNode) -> dict[str, str]:
    """Describe each key that the torchvision engine cannot honor: its value, and what the engine supports."""
    places = yaml_io.list_places(cfg)
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in flatten(cfg)}
    supported = {row.name: row.torchvision for row in KEYS.values() if row.torchvision}
    supported["MODEL.RESNETS.RES2_OUT_CHANNELS"] = (64 if cfg.MODEL.RESNETS.DEPTH in (18, 34) else 256,)
    return {
        key: f"{key}{places.get(key, '')} is {values[key]!r} (supported: {', '.join(map(repr, choices))})"
        for key, choices in supported.items()
        if values[key] not in choices
    }


def check_multiple(batch: int, divisor: int, reason: str) -> None:
    """Raise UserError, which names the nearest sizes, for a batch that is not a multiple of ``divisor``."""
    if batch % divisor:
        below = batch // divisor * divisor
        sizes = f"{below} or {below + divisor}" if below else str(divisor)
        form = f"a multiple of {divisor} ({reason}), such as {sizes}"
        raise UserError(f"SOLVER.IMS_PER_BATCH is {batch}; it must be {form}")


def scale_to_world(cfg: CfgNode, world_size: int) -> CfgNode:
    """Return the config for ``world_size`` processes if it was written for SOLVER.REFERENCE_WORLD_SIZE of them.

    As in Detectron2, batch and learning rate grow with the number of processes, and iterations shrink, but to no less
    than one, and different SOLVER.STEPS stay different. A reference of 0 means that the config suits any number.

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
    lengths = [(solver, key) for key in ("MAX_ITER", "CHECKPOINT_PERIOD", "WARMUP_ITERS")]
    for section, key in (*lengths, (cfg.TEST, "EVAL_PERIOD")):
        if section[key] > 0:  # 0 switches it off
            section[key] = max(1, round(section[key] / scale))
    steps: list[int] = []
    for step in solver.STEPS:  # two decays that fall into one iteration are still two
        steps.append(max(round(step / scale), steps[-1] + 1 if steps else 1))
    solver.STEPS = tuple(steps)
    solver.REFERENCE_WORLD_SIZE = world_size
    return cfg


def select_steps(cfg: CfgNode) -> list[int]:
    """Return the SOLVER.STEPS before the last iteration, since fvcore refuses others; log that those are ignored."""
    end = cfg.SOLVER.MAX_ITER
    steps = [step for step in cfg.SOLVER.STEPS if step < end]
    if len(steps) < len(cfg.SOLVER.STEPS):
        log.warning(f"SOLVER.STEPS at or after MAX_ITER {end} are ignored")
    return steps


def check_ranges(cfg: CfgNode) -> None:
    """Check the numbers and the precision that training and evaluation read.

    Raises:
        UserError: a key is out of its range or has a list of another form, or there is not one sigma per keypoint.
    """
    places = yaml_io.list_places(cfg)
    _check_lists(cfg)
    _check_expected_results(cfg)
    is_rotated = "Rotated" in cfg.MODEL.ANCHOR_GENERATOR.NAME
    # Others have another number of channels, or rotated boxes.
    has_standard_inputs = not cfg.INPUT.MAPPER and cfg.INPUT.FORMAT != "L" and not is_rotated
    for key, row in KEYS.items():
        if not row.limits:
            continue
        value = get(cfg, key)
        if has_standard_inputs and key.endswith(_FIXED_LENGTH) and len(value) != len(row.default):
            raise UserError(f"{key}{places.get(key, '')} is {list(value)}; it must be {len(row.default)} numbers")
        if cfg.INPUT.MAPPER and key.startswith("MODEL.PIXEL_"):  # its images may have other values
            continue
        for number in _list_numbers(value):
            row.limits.check(key + places.get(key, ""), number)
    box_head = cfg.MODEL.ROI_BOX_HEAD
    if box_head.NAME == "FastRCNNConvFCHead" and not (box_head.NUM_FC or box_head.NUM_CONV):
        raise UserError("MODEL.ROI_BOX_HEAD.NUM_FC and NUM_CONV are 0, which is no layer; set NUM_FC 2, or NUM_CONV 1")
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
            form = f"{count_noun(count, 'number')} in increasing order"
            raise UserError(f"MODEL.{section}.IOU_THRESHOLDS is {thresholds}; it must be {form}")
    head = cfg.MODEL.RETINANET if cfg.MODEL.META_ARCHITECTURE == "RetinaNet" else cfg.MODEL.RPN
    maps = len(head.IN_FEATURES)
    for key in ("MODEL.ANCHOR_GENERATOR.SIZES", "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS"):
        lists = get(cfg, key)
        if len(lists) not in (1, maps) or not all(isinstance(item, (list, tuple)) and item for item in lists):
            form = f"a list of lists, one for all or one for each of the {maps} feature maps"
            raise UserError(f"{key} is {lists}; it must be {form}, as in {KEYS[key].default}")
    for key in ("DATASETS.TRAIN", "DATASETS.TEST"):
        if not all(isinstance(name, str) for name in get(cfg, key)):
            raise UserError(f"{key} is {get(cfg, key)}; it must be a list of names, in quotes")


def _list_numbers(value: Any) -> list[Any]:
    """Return the numbers in nested lists, or the value itself if it is no list."""
    return [number for item in value for number in _list_numbers(item)] if isinstance(value, (list, tuple)) else [value]


def check_training(cfg: CfgNode) -> None:
    """Check what only training reads, in a config that has passed `check_ranges`.

    Raises:
        UserError: DATASETS.TRAIN is empty, learning rates or their steps are out of order, FROZEN_BN_ITER is set
            although no norm is frozen, or another key does not suit the detector.
    """
    solver = cfg.SOLVER
    steps = list(solver.STEPS)
    if any(type(step) is not int for step in steps) or steps != sorted(set(steps)) or (steps and steps[0] < 1):
        raise UserError(f"SOLVER.STEPS is {tuple(steps)}; they must be increasing iteration numbers, each at least 1")
    end_rate = solver.BASE_LR_END
    if solver.LR_SCHEDULER_NAME == "WarmupCosineLR" and not (solver.BASE_LR > 0 and end_rate <= solver.BASE_LR):
        problem = f"SOLVER.BASE_LR is {solver.BASE_LR:g}, and SOLVER.BASE_LR_END {end_rate:g}"
        raise UserError(f"{problem}; WarmupCosineLR needs a BASE_LR above 0 and a BASE_LR_END of at most BASE_LR")
    if solver.BF16 and not solver.AMP.ENABLED:
        raise UserError("SOLVER.BF16 is True, but SOLVER.AMP.ENABLED is False; set it True as well")
    _check_best(cfg)
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


def _check_best(cfg: CfgNode) -> None:
    """Raise UserError unless TEST.BEST is a metric of the detector, and evaluated where TEST.PATIENCE needs it."""
    task, _, metric = cfg.TEST.BEST.partition("/")
    tasks = list_tasks(cfg)
    if cfg.TEST.BEST and (task not in tasks or not re.fullmatch(r"AP(50|75|[smlrcf]|-.+)?", metric)):
        known = ", ".join(f"{task}/AP" for task in tasks)
        raise UserError(f"TEST.BEST is {cfg.TEST.BEST!r}; choose a metric of this detector ({known}, bbox/AP50, ...)")
    is_set = {"TEST.BEST": bool(metric), "TEST.EVAL_PERIOD": cfg.TEST.EVAL_PERIOD > 0}
    is_set["DATASETS.TEST"] = bool(cfg.DATASETS.TEST)
    missing = " and ".join(key for key in is_set if not is_set[key])
    if cfg.TEST.PATIENCE and missing:
        problem = f"TEST.PATIENCE is {cfg.TEST.PATIENCE} without {missing}, which it needs"
        raise UserError(f"{problem}; set TEST.BEST (bbox/AP), TEST.EVAL_PERIOD and DATASETS.TEST, or TEST.PATIENCE 0")


def _check_expected_results(cfg: CfgNode) -> None:
    """Raise UserError unless each item of TEST.EXPECTED_RESULTS is [task, metric, value, tolerance]."""
    tasks = list_tasks(cfg)
    for item in cfg.TEST.EXPECTED_RESULTS:
        is_list = isinstance(item, (list, tuple)) and len(item) == 4
        is_number = is_list and all(type(number) in (int, float) for number in item[2:]) and item[3] >= 0
        if not is_number or str(item[0]).removesuffix("_TTA") not in tasks or not isinstance(item[1], str):
            parts = f"a task ({', '.join(tasks)}), a metric, its value and a tolerance"
            form = f"a list of {parts}, such as ['bbox', 'AP', 38.5, 0.2]"
            raise UserError(f"TEST.EXPECTED_RESULTS contains {item!r}; it must be {form}")


def check_batch_division(cfg: CfgNode, world_size: int) -> None:
    """Raise UserError unless the batch divides evenly among the processes and their micro-batches."""
    accumulate = cfg.SOLVER.ACCUMULATE
    reason = f"{count_noun(world_size, 'process', 'processes')} x SOLVER.ACCUMULATE {accumulate}"
    check_multiple(cfg.SOLVER.IMS_PER_BATCH, world_size * accumulate, reason)
