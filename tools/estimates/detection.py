"""What fine-tuning a detector costs: `estimate`.

Images per second are those of the same kind of detector in Detectron2's model zoo, on V100, times the speed of the GPU
for Mask R-CNN as a multiple of a V100's, times the FLOPs of the zoo's model per those of the recipe's.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass
from typing import Any

from .model import Estimate, choose_precision, find_largest_batch, fit_batch
from .networks import (
    Stage,
    Work,
    count_convolution,
    count_linear,
    count_resnet,
    count_resnet_parameters,
    count_stage,
)
from .published import V100, ZOO_GB, ZOO_SECONDS, Gpu

_ASPECT = 4 / 3  # width / height of most of COCO's images
_FROZEN = {"FrozenBN"}
_FPN_CHANNELS = 256  # of the zoo's detectors
_ZOO_IMAGES = 16
_ZOO_GPUS = 8
_ZOO_SIDE = 720  # mean of the zoo's MIN_SIZE_TRAIN
_LEAST_WORK = 0.2  # of an iteration, relative to the zoo's; launching kernels, not FLOPs, limits a smaller one
_MOST_PARTS = 16


@dataclass(frozen=True)
class Detector:
    """What the work of a detector follows from.

    Attributes:
        height, width: size of its images.
        frozen: stages of the ResNet that are not trained, the stem first (MODEL.BACKBONE.FREEZE_AT).
        keeps_inputs_of_norms: the norms are trained, and need their inputs for that.
        channels: of the FPN, or 0 for a C4 backbone.
        anchors: per location.
        regions: per image, for the box head.
        classes: without background.
        heads: ``mask`` and ``keypoint`` heads that it has.
    """

    depth: int
    height: float
    width: float
    frozen: int
    keeps_inputs_of_norms: bool
    channels: int
    anchors: int
    regions: int
    positive_fraction: float
    classes: int
    heads: frozenset[str]

    @property
    def kind(self) -> str:
        """Return the kind of detector as `ZOO_SECONDS` names it."""
        head = next((name for name in ("keypoint", "mask") if name in self.heads), "faster")
        return f"{head} {'FPN' if self.channels else 'C4'}"


def estimate(cfg: Any, gpu: Gpu, count: int) -> Estimate | None:
    """Estimate the cost of fine-tuning on ``count`` GPUs, or return None if nothing comparable is published."""
    precision = choose_precision(gpu, "half" if cfg.SOLVER.AMP.ENABLED else "none")
    detector = describe(cfg)
    if precision is None or precision not in gpu.detection or detector.kind not in ZOO_SECONDS:
        return None
    zoo = describe_zoo(detector.kind)
    batch = cfg.SOLVER.IMS_PER_BATCH
    per_gpu = max(1, batch // count)
    work = count_training_flops(detector) / count_training_flops(zoo)
    if work * per_gpu < _LEAST_WORK * _ZOO_IMAGES / _ZOO_GPUS:
        return None
    number = 2 if precision == "half" else 4
    gib_per_image = measure_saved(describe(cfg, at_most=True)) * number * measure_overhead() / 2**30
    fixed_gib = count_parameters(detector) * 4 * (3 + (count > 1)) / 2**30
    accumulate = fit_batch(per_gpu, gpu, fixed_gib, gib_per_image, range(cfg.SOLVER.ACCUMULATE, _MOST_PARTS + 1))
    rate = predict_zoo_rate(detector.kind, gpu, count, precision) / work
    return Estimate(
        gpu=gpu,
        count=count,
        images_per_second=rate,
        hours=batch * cfg.SOLVER.MAX_ITER / rate / 3600,
        gib=fixed_gib + gib_per_image * per_gpu / accumulate if accumulate else None,
        accumulate=accumulate,
        largest_batch=find_largest_batch(gpu, fixed_gib, gib_per_image),
        workers=None,
    )


def predict_zoo_rate(kind: str, gpu: Gpu, count: int, precision: str) -> float:
    """Return the images/s of a detector of the zoo on ``count`` GPUs."""
    rate = _ZOO_IMAGES / ZOO_SECONDS[kind] * gpu.detection[precision] / V100.detection["float32"]
    scaling = gpu.measure_scaling(count, precision) / V100.measure_scaling(_ZOO_GPUS, "float32")
    return rate * count / _ZOO_GPUS * scaling


def predict_zoo_gb(kind: str) -> float:
    """Return the GB of one of the zoo's V100."""
    zoo = describe_zoo(kind, at_most=True)
    saved = measure_saved(zoo) * measure_overhead() * _ZOO_IMAGES / _ZOO_GPUS
    return (saved + count_parameters(zoo) * 3) * 4 / 1e9


def describe(cfg: Any, at_most: bool = False) -> Detector:
    """Return the detector of a config, for images of the mean size of training or, ``at_most``, for the largest."""
    model = cfg.MODEL
    sides = cfg.INPUT.MIN_SIZE_TRAIN
    side = max(sides) if at_most else sum(sides) / len(sides)
    longest = cfg.INPUT.MAX_SIZE_TRAIN
    width = longest if at_most else min(side * _ASPECT, longest)
    has_fpn = "fpn" in model.BACKBONE.NAME
    sizes = model.ANCHOR_GENERATOR.SIZES
    heads = {"mask": model.MASK_ON, "keypoint": model.KEYPOINT_ON}
    return Detector(
        depth=model.RESNETS.DEPTH,
        height=side,
        width=width,
        frozen=model.BACKBONE.FREEZE_AT,
        keeps_inputs_of_norms=model.RESNETS.NORM not in _FROZEN,
        channels=model.FPN.OUT_CHANNELS if has_fpn else 0,
        anchors=len(model.ANCHOR_GENERATOR.ASPECT_RATIOS[0]) * (1 if has_fpn else len(sizes[0])),
        regions=model.ROI_HEADS.BATCH_SIZE_PER_IMAGE,
        positive_fraction=model.ROI_HEADS.POSITIVE_FRACTION,
        classes=model.ROI_HEADS.NUM_CLASSES,
        heads=frozenset(name for name, is_on in heads.items() if is_on),
    )


def describe_zoo(kind: str, at_most: bool = False) -> Detector:
    """Return the detector of the zoo of a kind in `ZOO_SECONDS`, for images of mean or of the largest size."""
    head, backbone = kind.split()
    has_fpn = backbone == "FPN"
    return Detector(
        depth=50,
        height=800 if at_most else _ZOO_SIDE,
        width=1333 if at_most else _ZOO_SIDE * _ASPECT,
        frozen=2,
        keeps_inputs_of_norms=False,
        channels=_FPN_CHANNELS if has_fpn else 0,
        anchors=3 if has_fpn else 15,
        regions=512,
        positive_fraction=0.25,
        classes=1 if head == "keypoint" else 80,
        heads=frozenset({head} - {"faster"}),
    )


def count_training_flops(detector: Detector) -> float:
    """Return the FLOPs of an image: forward, and twice that for the gradients of all but frozen stages."""
    stages, rest = _count_parts(detector)
    backbone = sum(stage.work.flops * (1 if index < detector.frozen else 3) for index, stage in enumerate(stages))
    return backbone + 3 * rest.flops


def measure_saved(detector: Detector) -> float:
    """Return the numbers per image that wait for the backward pass."""
    stages, rest = _count_parts(detector)
    trained = [stage.work for stage in stages[detector.frozen :]]
    return rest.saved + sum(work.saved if detector.keeps_inputs_of_norms else work.outputs for work in trained)


@functools.cache
def measure_overhead() -> float:
    """Return how much more memory the zoo's detectors take than is counted here: anchors, matching, losses."""
    ratios = []
    for kind, gigabytes in ZOO_GB.items():
        zoo = describe_zoo(kind, at_most=True)
        counted = measure_saved(zoo) * 4 * _ZOO_IMAGES / _ZOO_GPUS
        ratios.append((gigabytes * 1e9 - count_parameters(zoo) * 12) / counted)
    return statistics.geometric_mean(ratios)


def count_parameters(detector: Detector) -> float:
    """Return the weights of the ResNet, and about those of the FPN and the heads."""
    head = (detector.channels * 49 + 1024) * 1024 if detector.channels else 0
    pyramid = detector.channels**2 * 9 * 5
    return count_resnet_parameters(detector.depth) + head + pyramid


def _count_parts(detector: Detector) -> tuple[list[Stage], Work]:
    """Return the backbone's stages, and the work of everything behind them."""
    height = -(-int(detector.height) // 32) * 32
    width = -(-int(detector.width) // 32) * 32
    stages = count_resnet(detector.depth, height, width)
    if not detector.channels:
        return stages[:4], _count_c4_heads(detector, stages[3])
    channels = detector.channels
    heads = Work()
    positions = 0.0
    for stage in stages[1:]:
        cells = stage.height * stage.width
        positions += cells
        heads += count_convolution(stage.channels, channels, 1, cells) + count_convolution(channels, channels, 3, cells)
    positions += stages[-1].height * stages[-1].width / 4  # p6
    heads += _count_proposals(channels, detector.anchors, positions)
    box = count_linear([channels * 49, 1024, 1024, 5 * detector.classes + 1])
    heads += box * detector.regions + Work(outputs=channels * 49.0 * detector.regions)
    positives = detector.regions * detector.positive_fraction
    if "mask" in detector.heads:
        heads += _count_mask_head(channels, 4, 256, detector.classes) * positives
    if "keypoint" in detector.heads:
        heads += _count_mask_head(channels, 8, 512, 17) * positives
    return stages, heads


def _count_proposals(channels: int, anchors: int, positions: float) -> Work:
    hidden = count_convolution(channels, channels, 3, positions)
    return hidden + count_convolution(channels, 5 * anchors, 1, positions)


def _count_mask_head(channels: int, layers: int, width: int, classes: int) -> Work:
    """Return the work of a mask or keypoint head for one region: convolutions on 14 x 14, and an upsampling one."""
    work = Work(outputs=channels * 196.0) + count_convolution(channels, width, 3, 196)
    work += count_convolution(width, width, 3, 196) * (layers - 1)
    return work + count_convolution(width, width, 1, 784) + count_convolution(width, classes, 1, 784)


def _count_c4_heads(detector: Detector, res4: Stage) -> Work:
    """Return the work of the RPN and of res5 on every region."""
    proposals = _count_proposals(res4.channels, detector.anchors, res4.height * res4.width)
    region = count_stage(detector.depth, 3, Stage(Work(), res4.channels, 14, 14))
    work = region.work if detector.keeps_inputs_of_norms else Work(region.work.flops, region.work.outputs)
    heads = (work + Work(outputs=res4.channels * 196.0)) * detector.regions
    box = count_linear([region.channels, 5 * detector.classes + 1]) * detector.regions
    if "mask" not in detector.heads:
        return proposals + heads + box
    positives = detector.regions * detector.positive_fraction
    mask = count_convolution(region.channels, 256, 2, 49) + count_convolution(256, detector.classes, 1, 196)
    return proposals + heads + box + mask * positives
