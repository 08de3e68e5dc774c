"""What a recipe of pretraining costs: `estimate`."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

from pretrain.methods import METHODS

from .measured import find_rate
from .model import (
    Estimate,
    choose_precision,
    count_training_flops,
    find_largest_batch,
    fit_batch,
    measure_efficiency,
    measure_flops_per_second,
)
from .networks import Stage, Work, count_dense_head, count_linear, count_resnet, count_resnet_parameters
from .published import IMAGES, Gpu

# CPU seconds per image of our loader: decoding a JPEG of 500 x 375 pixels, and each view of 224 pixels. Measured: two
# views take 4.3 ms and six 7.9 ms (docs/benchmarks.md).
_DECODING_S = 0.0025
_VIEW_S = 0.0009
_VIEW_SIZE = 224
_MOST_PARTS = 64
# Seconds of the shortest step, however little it computes: launching kernels takes time, too. With lightly on CIFAR-10,
# a step of 128 images takes 11 ms (SimCLR) or 17 ms (MoCo) more than a quarter of a step of 512.
LEAST_STEP_S = 0.02
# Maps of the stem's size that exist at once without gradients: what the first norm reads and writes, or the branches of
# the first bottleneck.
_STEM_MAPS = 2.0
_BOTTLENECK_MAPS = 3.5


@dataclass(frozen=True)
class Step:
    """The parts of a training step that its cost follows from.

    Attributes:
        views: views per image.
        flops: of one image with all its views.
        trained_views: views with gradient; the others are keys.
        saved: numbers per trained view that wait for the backward pass.
        transient: numbers per key that exist at the same time.
        parameters: of one network.
    """

    views: int
    flops: float
    trained_views: int
    saved: float
    transient: float
    parameters: float


def estimate(cfg: Any, gpu: Gpu, count: int, images: int | None = None) -> Estimate | None:
    """Estimate the cost of pretraining on ``count`` GPUs; return None if it is unknown or refused.

    It is unknown if no rate is published for the precision, and refused if the batch does not divide among the GPUs.

    Args:
        images: training images (default: those of a data set whose size is known).
    """
    precision = choose_precision(gpu, cfg.SOLVER.AMP, cfg.FLOAT32_PRECISION)
    if precision is None or METHODS.get(cfg.METHOD.NAME) is None:
        return None
    step = describe_step(cfg)
    fixed_gib, gib_per_image = measure_memory(cfg, step, count, precision)
    batch = cfg.SOLVER.IMS_PER_BATCH
    per_gpu = batch // count
    parts = [n for n in range(cfg.SOLVER.ACCUMULATE, _MOST_PARTS + 1) if _may_accumulate(cfg, n, count)]
    if not parts or batch % count:
        return None
    accumulate = fit_batch(per_gpu, gpu, fixed_gib, gib_per_image, parts)

    flops = step.flops
    if step.trained_views == step.views and (accumulate or 1) > 1:  # views are embedded once more without gradient
        flops += count_forward(cfg) * step.views
    depth = int(cfg.MODEL.ARCH.removeprefix("resnet"))
    measured = find_rate(gpu, cfg, precision)
    peak = measured or measure_flops_per_second(gpu, precision, depth) / flops
    per_gpu_rate = peak * gpu.measure_scaling(count, precision)
    rate = per_gpu_rate * count
    if not measured:
        rate = min(rate * measure_efficiency(), batch / LEAST_STEP_S)
    views = count_views(cfg, images)
    return Estimate(
        gpu=gpu,
        count=count,
        images_per_second=rate,
        hours=views / rate / 3600 if views else None,
        gib=fixed_gib + gib_per_image * per_gpu / accumulate if accumulate else None,
        accumulate=accumulate,
        largest_batch=find_largest_batch(gpu, fixed_gib, gib_per_image),
        workers=count_workers(per_gpu_rate, step.views) if cfg.VIEWS.IMAGE_SIZE == _VIEW_SIZE else None,
        is_measured=bool(measured),
    )


def count_views(cfg: Any, images: int | None) -> int | None:
    """Return the images of all epochs, or None if their number is not known."""
    if cfg.SOLVER.MAX_STEPS:
        return cfg.SOLVER.MAX_STEPS * cfg.SOLVER.IMS_PER_BATCH
    images = images or IMAGES.get(cfg.DATA.TRAIN)
    return images * cfg.SOLVER.EPOCHS if images else None


def count_workers(images_per_second: float, views: int) -> int:
    """Return the loader workers that keep up with a GPU at its full speed."""
    return math.ceil(images_per_second * (_DECODING_S + _VIEW_S * views))


def count_forward(cfg: Any) -> float:
    """Return the FLOPs of one view's forward pass."""
    return sum((stage.work for stage in _count_stages(cfg)), _count_heads(cfg)).flops


def describe_step(cfg: Any) -> Step:
    """Return the parts of the step of a config."""
    stages = _count_stages(cfg)
    heads = _count_heads(cfg)
    has_keys = METHODS[cfg.METHOD.NAME].kind == "queue"
    trained = 1 if has_keys else 1 + cfg.METHOD.NUM_KEYS
    encoded = cfg.METHOD.NUM_KEYS if has_keys else 0
    flops = count_training_flops(stages, trained, encoded) + heads.flops * (3 * trained + encoded)
    first = stages[0].work
    size = cfg.VIEWS.IMAGE_SIZE
    depth = int(cfg.MODEL.ARCH.removeprefix("resnet"))
    sizes = [stages[-1].channels, *cfg.MODEL.HEAD_HIDDEN_DIMS, cfg.MODEL.EMBEDDING_DIM]
    parameters = count_resnet_parameters(depth) + sum(a * b + b for a, b in itertools.pairwise(sizes))
    if cfg.METHOD.DENSE_WEIGHT:
        parameters += stages[-1].channels * (stages[-1].channels + cfg.MODEL.EMBEDDING_DIM)
    return Step(
        views=trained + encoded,
        flops=flops,
        trained_views=trained,
        saved=sum((stage.work for stage in stages), heads).saved,
        transient=first.inputs_of_norms * (_BOTTLENECK_MAPS if depth >= 50 else _STEM_MAPS) + 3 * size**2,
        parameters=parameters,
    )


def measure_memory(cfg: Any, step: Step, count: int, precision: str) -> tuple[float, float]:
    """Return GiB that do not depend on the batch, and GiB per image of a GPU's micro-batch."""
    number = 2 if precision == "half" else 4
    model = cfg.MODEL
    has_keys = step.views > step.trained_views
    copies = {"sgd": 3, "lars": 3, "adamw": 4}[cfg.SOLVER.OPTIMIZER] + (count > 1)  # weights, gradients, momentum
    fixed = step.parameters * 4 * (copies + has_keys) + (step.parameters * 2 if precision == "half" else 0)
    queue = model.EMBEDDING_DIM * model.QUEUE_SIZE * 4 if has_keys else 0
    queues = 2 if cfg.METHOD.DENSE_WEIGHT else 1
    trained = step.saved * number * step.trained_views
    if has_keys:
        trained += model.QUEUE_SIZE * 4 * 2  # logits and their gradient
    keys = step.transient * number * (step.views - step.trained_views)
    pixels = 3 * cfg.VIEWS.IMAGE_SIZE**2 * step.views
    return (fixed + queue * queues) / 2**30, (max(trained, keys) + pixels) / 2**30


def _may_accumulate(cfg: Any, parts: int, count: int) -> bool:
    """Return whether so many micro-batches on so many GPUs have whole groups of batch norm."""
    groups = cfg.MODEL.BN_GROUPS
    if groups == 1:
        return parts == 1
    return groups % (parts * count) == 0 if groups else True


def _count_stages(cfg: Any) -> list[Stage]:
    size = cfg.VIEWS.IMAGE_SIZE
    return count_resnet(int(cfg.MODEL.ARCH.removeprefix("resnet")), size, size, cfg.MODEL.STEM)


def _count_heads(cfg: Any) -> Work:
    last = _count_stages(cfg)[-1]
    heads = count_linear([last.channels, *cfg.MODEL.HEAD_HIDDEN_DIMS, cfg.MODEL.EMBEDDING_DIM])
    return heads + count_dense_head(last, cfg.MODEL.EMBEDDING_DIM) if cfg.METHOD.DENSE_WEIGHT else heads
