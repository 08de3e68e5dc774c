"""Detectron2's config keys, readable without Detectron2, and what the torchvision engine does with each.

Every key of Detectron2 0.6 is in one of two tables: keys that the torchvision engine honors, and keys that it rejects
unless they have their default. A third table contains this project's own keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from fvcore.common.config import CfgNode

from pretrain.common.config.yaml_io import changed_values, flatten, merge_file, merge_overrides
from pretrain.common.errors import UserError

HONORED = """
MODEL: {MASK_ON: false, KEYPOINT_ON: false, DEVICE: cuda, WEIGHTS: "",
  PIXEL_MEAN: [103.530, 116.280, 123.675], PIXEL_STD: [1.0, 1.0, 1.0]}
MODEL.BACKBONE: {NAME: build_resnet_backbone, FREEZE_AT: 2}
MODEL.RESNETS: {DEPTH: 50, OUT_FEATURES: [res4], NORM: FrozenBN, STRIDE_IN_1X1: true, RES2_OUT_CHANNELS: 256}
MODEL.FPN: {IN_FEATURES: [], OUT_CHANNELS: 256, NORM: ""}
MODEL.PROPOSAL_GENERATOR: {MIN_SIZE: 0}
MODEL.ANCHOR_GENERATOR: {SIZES: [[32, 64, 128, 256, 512]], ASPECT_RATIOS: [[0.5, 1.0, 2.0]]}
MODEL.RPN: {IN_FEATURES: [res4], IOU_THRESHOLDS: [0.3, 0.7], BATCH_SIZE_PER_IMAGE: 256, POSITIVE_FRACTION: 0.5,
  BBOX_REG_WEIGHTS: [1.0, 1.0, 1.0, 1.0], SMOOTH_L1_BETA: 0.0, PRE_NMS_TOPK_TRAIN: 12000,
  PRE_NMS_TOPK_TEST: 6000, POST_NMS_TOPK_TRAIN: 2000, POST_NMS_TOPK_TEST: 1000, NMS_THRESH: 0.7}
MODEL.ROI_HEADS: {NAME: Res5ROIHeads, NUM_CLASSES: 80, IN_FEATURES: [res4], IOU_THRESHOLDS: [0.5],
  BATCH_SIZE_PER_IMAGE: 512, POSITIVE_FRACTION: 0.25, SCORE_THRESH_TEST: 0.05, NMS_THRESH_TEST: 0.5}
MODEL.ROI_BOX_HEAD: {NAME: "", BBOX_REG_WEIGHTS: [10.0, 10.0, 5.0, 5.0], SMOOTH_L1_BETA: 0.0,
  POOLER_RESOLUTION: 14, POOLER_SAMPLING_RATIO: 0, NUM_FC: 0, FC_DIM: 1024, NUM_CONV: 0, CONV_DIM: 256, NORM: ""}
MODEL.ROI_MASK_HEAD: {POOLER_RESOLUTION: 14, POOLER_SAMPLING_RATIO: 0, NUM_CONV: 0, CONV_DIM: 256, NORM: ""}
MODEL.ROI_KEYPOINT_HEAD: {POOLER_RESOLUTION: 14, POOLER_SAMPLING_RATIO: 0, NUM_KEYPOINTS: 17,
  CONV_DIMS: [512, 512, 512, 512, 512, 512, 512, 512], MIN_KEYPOINTS_PER_IMAGE: 1}
INPUT: {MIN_SIZE_TRAIN: [800], MIN_SIZE_TRAIN_SAMPLING: choice, MAX_SIZE_TRAIN: 1333, MIN_SIZE_TEST: 800,
  MAX_SIZE_TEST: 1333, RANDOM_FLIP: horizontal, FORMAT: BGR, MASK_FORMAT: polygon}
DATASETS: {TRAIN: [], TEST: []}
DATALOADER: {NUM_WORKERS: 4, ASPECT_RATIO_GROUPING: true, FILTER_EMPTY_ANNOTATIONS: true}
SOLVER: {LR_SCHEDULER_NAME: WarmupMultiStepLR, MAX_ITER: 40000, BASE_LR: 0.001, BASE_LR_END: 0.0, MOMENTUM: 0.9,
  NESTEROV: false, WEIGHT_DECAY: 0.0001, WEIGHT_DECAY_NORM: 0.0, GAMMA: 0.1, STEPS: [30000],
  WARMUP_FACTOR: 0.001, WARMUP_ITERS: 1000, CHECKPOINT_PERIOD: 5000, IMS_PER_BATCH: 16, REFERENCE_WORLD_SIZE: 0}
SOLVER.CLIP_GRADIENTS: {ENABLED: false, CLIP_TYPE: value, CLIP_VALUE: 1.0, NORM_TYPE: 2.0}
SOLVER.AMP: {ENABLED: false}
TEST: {EVAL_PERIOD: 0, DETECTIONS_PER_IMAGE: 100, KEYPOINT_OKS_SIGMAS: []}
TEST.PRECISE_BN: {ENABLED: false, NUM_ITER: 200}
OUTPUT_DIR: ./output
SEED: -1
CUDNN_BENCHMARK: false
FLOAT32_PRECISION: ""
"""

REJECTED = """
VERSION: 2
MODEL: {META_ARCHITECTURE: GeneralizedRCNN, LOAD_PROPOSALS: false}
MODEL.PROPOSAL_GENERATOR: {NAME: RPN}
MODEL.FPN: {FUSE_TYPE: sum}
MODEL.ANCHOR_GENERATOR: {NAME: DefaultAnchorGenerator, ANGLES: [[-90, 0, 90]], OFFSET: 0.0}
MODEL.RESNETS: {RES5_DILATION: 1, STEM_OUT_CHANNELS: 64, DEFORM_ON_PER_STAGE: [false, false, false, false],
  DEFORM_MODULATED: false, DEFORM_NUM_GROUPS: 1, NUM_GROUPS: 1, WIDTH_PER_GROUP: 64}
MODEL.RPN: {HEAD_NAME: StandardRPNHead, BOUNDARY_THRESH: -1, IOU_LABELS: [0, -1, 1], BBOX_REG_LOSS_TYPE: smooth_l1,
  CONV_DIMS: [-1], LOSS_WEIGHT: 1.0, BBOX_REG_LOSS_WEIGHT: 1.0}
MODEL.ROI_HEADS: {IOU_LABELS: [0, 1], PROPOSAL_APPEND_GT: true}
MODEL.ROI_BOX_HEAD: {BBOX_REG_LOSS_TYPE: smooth_l1, CLS_AGNOSTIC_BBOX_REG: false, TRAIN_ON_PRED_BOXES: false,
  POOLER_TYPE: ROIAlignV2, USE_FED_LOSS: false, USE_SIGMOID_CE: false, FED_LOSS_FREQ_WEIGHT_POWER: 0.5,
  FED_LOSS_NUM_CLASSES: 50, BBOX_REG_LOSS_WEIGHT: 1.0}
MODEL.ROI_BOX_CASCADE_HEAD: {IOUS: [0.5, 0.6, 0.7],
  BBOX_REG_WEIGHTS: [[10.0, 10.0, 5.0, 5.0], [20.0, 20.0, 10.0, 10.0], [30.0, 30.0, 15.0, 15.0]]}
MODEL.ROI_MASK_HEAD: {NAME: MaskRCNNConvUpsampleHead, POOLER_TYPE: ROIAlignV2, CLS_AGNOSTIC_MASK: false}
MODEL.ROI_KEYPOINT_HEAD: {NAME: KRCNNConvDeconvUpsampleHead, POOLER_TYPE: ROIAlignV2,
  NORMALIZE_LOSS_BY_VISIBLE_KEYPOINTS: true, LOSS_WEIGHT: 1.0}
MODEL.SEM_SEG_HEAD: {NAME: SemSegFPNHead, IN_FEATURES: [p2, p3, p4, p5], IGNORE_VALUE: 255, NUM_CLASSES: 54,
  CONVS_DIM: 128, COMMON_STRIDE: 4, NORM: GN, LOSS_WEIGHT: 1.0}
MODEL.PANOPTIC_FPN: {INSTANCE_LOSS_WEIGHT: 1.0}
MODEL.PANOPTIC_FPN.COMBINE: {ENABLED: true, OVERLAP_THRESH: 0.5, STUFF_AREA_LIMIT: 4096,
  INSTANCES_CONFIDENCE_THRESH: 0.5}
MODEL.RETINANET: {NUM_CLASSES: 80, IN_FEATURES: [p3, p4, p5, p6, p7], NUM_CONVS: 4, IOU_THRESHOLDS: [0.4, 0.5],
  IOU_LABELS: [0, -1, 1], PRIOR_PROB: 0.01, SCORE_THRESH_TEST: 0.05, TOPK_CANDIDATES_TEST: 1000, NMS_THRESH_TEST: 0.5,
  BBOX_REG_WEIGHTS: [1.0, 1.0, 1.0, 1.0], FOCAL_LOSS_GAMMA: 2.0, FOCAL_LOSS_ALPHA: 0.25, SMOOTH_L1_LOSS_BETA: 0.1,
  BBOX_REG_LOSS_TYPE: smooth_l1, NORM: ""}
INPUT.CROP: {ENABLED: false, TYPE: relative_range, SIZE: [0.9, 0.9]}
DATASETS: {PROPOSAL_FILES_TRAIN: [], PROPOSAL_FILES_TEST: [], PRECOMPUTED_PROPOSAL_TOPK_TRAIN: 2000,
  PRECOMPUTED_PROPOSAL_TOPK_TEST: 1000}
DATALOADER: {SAMPLER_TRAIN: TrainingSampler, REPEAT_THRESHOLD: 0.0, REPEAT_SQRT: true}
SOLVER: {NUM_DECAYS: 3, WARMUP_METHOD: linear, RESCALE_INTERVAL: false, BIAS_LR_FACTOR: 1.0, WEIGHT_DECAY_BIAS: null}
TEST: {EXPECTED_RESULTS: []}
TEST.AUG: {ENABLED: false, MIN_SIZES: [400, 500, 600, 700, 800, 900, 1000, 1100, 1200], MAX_SIZE: 4000, FLIP: true}
VIS_PERIOD: 0
GLOBAL: {HACK: 1.0}
"""

# A dumped config contains these only if they are set, so that all others are plain Detectron2 configs; see `dump`.
OWN = """
INPUT: {MAPPER: ""}
SOLVER: {HOOKS: [], FROZEN_BN_ITER: 0, CHECKPOINT_KEEP: 0, ACCUMULATE: 1, BF16: false}
TEST: {BEST: ""}
"""

_NORMS = ("", "BN", "SyncBN", "FrozenBN", "GN")
ALLOWED: dict[str, tuple[Any, ...]] = {  # honored keys of which the engine supports only some values
    "MODEL.BACKBONE.NAME": ("build_resnet_fpn_backbone",),
    "MODEL.BACKBONE.FREEZE_AT": (0, 1, 2, 3, 4, 5),
    "MODEL.RESNETS.DEPTH": (18, 34, 50, 101),
    "MODEL.RESNETS.OUT_FEATURES": (["res2", "res3", "res4", "res5"],),
    "MODEL.RESNETS.NORM": _NORMS[1:],
    "MODEL.FPN.IN_FEATURES": (["res2", "res3", "res4", "res5"],),
    "MODEL.FPN.NORM": _NORMS,
    "MODEL.RPN.IN_FEATURES": (["p2", "p3", "p4", "p5", "p6"],),
    "MODEL.ROI_HEADS.NAME": ("StandardROIHeads",),
    "MODEL.ROI_HEADS.IN_FEATURES": (["p2", "p3", "p4", "p5"],),
    "MODEL.ROI_BOX_HEAD.NAME": ("FastRCNNConvFCHead",),
    "MODEL.ROI_BOX_HEAD.NORM": _NORMS,
    "MODEL.ROI_MASK_HEAD.NORM": _NORMS,
    "INPUT.RANDOM_FLIP": ("horizontal", "none"),
    "INPUT.FORMAT": ("BGR", "RGB"),
    "INPUT.MASK_FORMAT": ("polygon", "bitmask"),
    "INPUT.MIN_SIZE_TRAIN_SAMPLING": ("choice", "range"),
    "SOLVER.LR_SCHEDULER_NAME": ("WarmupMultiStepLR", "WarmupCosineLR"),
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": ("value", "norm"),
}


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
    current = flatten_table(cfg.dump())
    earlier = current | flatten_table(OWN) | flatten_table(recorded.read_text())
    changed = changed_values(earlier, current, FREE_ON_RESUME)
    if changed:
        raise UserError(
            f"{recorded.parent} contains a training run with a different config ({'; '.join(changed)}); choose another "
            "OUTPUT_DIR"
        )


def default_config() -> CfgNode:
    """Return the tree of Detectron2's keys and this project's own, with their defaults."""
    cfg = CfgNode()
    for table in (HONORED, REJECTED, OWN):
        for section, value in yaml.safe_load(table).items():
            if not isinstance(value, dict):
                cfg[section] = value
                continue
            node = cfg
            for name in section.split("."):
                node = node.setdefault(name, CfgNode())
            node.update(value)
    return cfg


def flatten_table(table: str) -> dict[str, Any]:
    """Return the keys of YAML text, such as one of this module's tables, as ``{"MODEL.RPN.NMS_THRESH": 0.7, ...}``."""
    return dict(flatten(yaml.safe_load(table)))


def load_config(config_file: str | Path | None, opts: Sequence[Any] = ()) -> CfgNode:
    """Load a Detectron2 config: defaults, then the file (and its `_BASE_`), then ``KEY VALUE`` overrides.

    Raises:
        UserError: missing file, unknown key (the nearest known one is named), wrong type.
    """
    cfg = default_config()
    if config_file:
        merge_file(cfg, config_file)
    merge_overrides(cfg, opts)
    return cfg


def dump(cfg: CfgNode) -> str:
    """Return ``cfg`` as YAML. Detectron2 can read it unless this project's own keys are set."""
    cfg = cfg.clone()
    for key, default in flatten_table(OWN).items():
        section, name = key.split(".")
        if cfg[section].get(name) == default:
            del cfg[section][name]
    return cfg.dump()


def classes_key(cfg: CfgNode) -> str:
    """Return the key of the detector's number of classes."""
    return f"MODEL.{'RETINANET' if cfg.MODEL.META_ARCHITECTURE == 'RetinaNet' else 'ROI_HEADS'}.NUM_CLASSES"


def list_tasks(cfg: CfgNode) -> list[str]:
    """Return COCO's tasks that the detector is evaluated on."""
    return ["bbox", *(["segm"] if cfg.MODEL.MASK_ON else []), *(["keypoints"] if cfg.MODEL.KEYPOINT_ON else [])]


def check_supported(cfg: CfgNode) -> None:
    """Check that the torchvision engine can honor a config.

    Raises:
        UserError: names every key that it cannot honor, its value and what the engine supports.
    """
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in flatten(cfg)}
    wrong = [
        f"{key} is {values[key]!r} (only {default!r} is supported)"
        for key, default in {**flatten_table(REJECTED), "INPUT.MAPPER": ""}.items()
        if values[key] != default
    ]
    wrong += [
        f"{key} is {values[key]!r} (supported: {', '.join(map(repr, allowed))})"
        for key, allowed in ALLOWED.items()
        if values[key] not in allowed
    ]
    depth = cfg.MODEL.RESNETS.DEPTH
    channels = cfg.MODEL.RESNETS.RES2_OUT_CHANNELS
    expected = 64 if depth in (18, 34) else 256
    if channels != expected:
        wrong.append(f"MODEL.RESNETS.RES2_OUT_CHANNELS is {channels} (a ResNet-{depth} has {expected})")
    thresholds = cfg.MODEL.ROI_HEADS.IOU_THRESHOLDS
    if len(thresholds) != 1:
        wrong.append(f"MODEL.ROI_HEADS.IOU_THRESHOLDS is {thresholds} (only one threshold is supported)")
    if wrong:
        raise UserError(
            f"the torchvision engine cannot honor {'; '.join(wrong)}; set supported values, or use Detectron2 (`make "
            "detectron2`, --engine detectron2)"
        )


def scale_to_world(cfg: CfgNode, world: int) -> CfgNode:
    """Return the config for ``world`` processes if it was written for SOLVER.REFERENCE_WORLD_SIZE of them.

    As in Detectron2, batch and learning rate grow with the number of processes, and iterations shrink. A reference of
    0 means that the config suits any number.

    Raises:
        UserError: the batch is not a multiple of the reference.
    """
    cfg = cfg.clone()
    reference = cfg.SOLVER.REFERENCE_WORLD_SIZE
    if reference in (0, world):
        return cfg
    cfg.defrost()
    solver = cfg.SOLVER
    if solver.IMS_PER_BATCH % reference:
        raise UserError(
            f"SOLVER.IMS_PER_BATCH {solver.IMS_PER_BATCH} is not a multiple of REFERENCE_WORLD_SIZE {reference}"
        )
    scale = world / reference
    solver.IMS_PER_BATCH = round(solver.IMS_PER_BATCH * scale)
    solver.BASE_LR *= scale
    solver.WARMUP_ITERS = round(solver.WARMUP_ITERS / scale)
    for key in ("MAX_ITER", "CHECKPOINT_PERIOD"):
        solver[key] = max(1, round(solver[key] / scale))
    solver.STEPS = tuple(round(step / scale) for step in solver.STEPS)
    cfg.TEST.EVAL_PERIOD = round(cfg.TEST.EVAL_PERIOD / scale)
    solver.REFERENCE_WORLD_SIZE = world
    return cfg
