"""The rows of `benchmark.py gpu`, in two sizes: for a GPU, and tiny ones that try the command without one."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import detection
from benchmarks import gpu_measurements as measurements
from benchmarks.gpu_measurements import Form
from pretrain.common.ranks.environment import count_usable_cores

CEILINGS = "ceilings"
_RECIPES = {"JCL": "jcl_R50_IN1k_200ep", "MoCo v2": "mocov2_R50_IN1k_200ep"}
_BF16 = Form("bf16, channels_last", "bf16", ("SOLVER.AMP", "bf16"))
_COMPILED = Form("bf16, channels_last, compiled", "bf16", ("SOLVER.AMP", "bf16", "SOLVER.COMPILE", "True"))
_TF32 = Form("TF32", "tf32")
_FLOAT32 = Form("float32", "float32")
_FP16 = Form("fp16 with its scaler, channels_last", "fp16", ("SOLVER.AMP", "fp16"))
_CONTIGUOUS = Form("bf16, contiguous", "bf16", ("SOLVER.AMP", "bf16"), torch.contiguous_format)
_TF32_CHANNELS_LAST = Form("TF32, channels_last", "tf32", (), torch.channels_last)


@dataclass(frozen=True)
class Sizes:
    """Sizes of all rows.

    Attributes:
        images: images per step of each method, those of one of the recipe's 8 GPUs.
        large_images: images per step of a larger batch, with the recipe's 8 BN groups.
        memory_images: images per step of the rows about memory, with 8 BN groups.
        overrides: config overrides of pretraining.
        detector: config overrides of the detector.
        image_sizes: height and width of the detector's images, one batch after the other.
        detector_images: images per iteration.
        losses: sizes of the losses, as `benchmark.py objectives` takes them.
        dense_queries: queries of the losses with a query per location.
        workers: numbers of loader workers; one core is left for the process that trains.
        files: JPEGs that the loader reads.
        product_side: rows and columns of the matrices of the ceilings.
        copy_mib: size of their copies.
        seconds: time of the measured steps of a row.
    """

    images: dict[str, int]
    large_images: int
    memory_images: tuple[int, ...]
    overrides: tuple[str, ...]
    detector: tuple[str, ...]
    image_sizes: tuple[tuple[int, int], ...]
    detector_images: int
    losses: dict[str, int]
    dense_queries: int
    workers: tuple[int, ...]
    files: int
    product_side: int
    copy_mib: int
    seconds: float


@dataclass(frozen=True)
class Measurement:
    """A measurement, and the seconds it takes on an H100 as far as they can be foreseen."""

    name: str
    seconds: float
    measure: Callable[[], dict[str, Any]]


FULL = Sizes(
    images={"JCL": 64, "MoCo v2": 32},
    large_images=256,
    memory_images=(32, 64, 128, 256, 512),
    overrides=(),
    detector=(),
    image_sizes=((800, 1067), (896, 672)),
    detector_images=4,
    losses={"queries": 64, "keys": 5, "dims": 128, "negatives": 65536, "anchors": 1024, "rounds": 15},
    dense_queries=1568,  # 49 locations of 32 images
    workers=(4, 8, 15),
    files=1024,
    product_side=8192,
    copy_mib=512,
    seconds=5.0,
)
SMALL = Sizes(
    images={"JCL": 2, "MoCo v2": 2},
    large_images=16,
    memory_images=(16,),
    overrides=("MODEL.ARCH", "resnet18", "VIEWS.IMAGE_SIZE", "32", "MODEL.QUEUE_SIZE", "64"),
    detector=(
        *("MODEL.RESNETS.DEPTH", "18", "MODEL.RESNETS.RES2_OUT_CHANNELS", "64", "MODEL.FPN.OUT_CHANNELS", "32"),
        *("MODEL.ROI_BOX_HEAD.FC_DIM", "64", "MODEL.ROI_MASK_HEAD.CONV_DIM", "32"),
    ),
    image_sizes=((64, 64), (64, 96)),
    detector_images=1,
    losses={"queries": 3, "keys": 2, "dims": 4, "negatives": 9, "anchors": 6, "rounds": 1},
    dense_queries=6,
    workers=(1,),
    files=16,
    product_side=32,
    copy_mib=1,
    seconds=0.0,
)


def list_rows(sizes: Sizes) -> list[Measurement]:
    """List all rows, the most wanted first."""
    jcl, moco = _RECIPES
    dense = {**sizes.losses, "queries": sizes.dense_queries}
    ceilings = functools.partial(measurements.measure_ceilings, sizes.product_side, sizes.copy_mib)
    workers = [count for count in sizes.workers if count < max(2, count_usable_cores())]
    return [
        *(_plan_pretraining(method, _BF16, sizes, 25) for method in (jcl, moco)),
        Measurement(CEILINGS, 10, ceilings),
        *(_plan_detection(engine, "bf16", sizes) for engine in detection.ENGINES),
        _plan_pretraining(moco, _COMPILED, sizes, 110),
        *(_plan_loading(views, count, sizes) for views in (2, 6) for count in reversed(workers)),
        *(_plan_pretraining(method, _TF32, sizes, 25) for method in (jcl, moco)),
        *(_plan_detection(engine, "TF32", sizes) for engine in detection.ENGINES),
        Measurement("losses", 20, functools.partial(measurements.measure_losses, sizes.losses)),
        _plan_pretraining(jcl, _COMPILED, sizes, 110),
        *(_plan_pretraining(method, _BF16, sizes, 30, is_large=True) for method in (jcl, moco)),
        *(_plan_pretraining(moco, form, sizes, 25) for form in (_FP16, _CONTIGUOUS, _TF32_CHANNELS_LAST)),
        *(_plan_memory(method, sizes) for method in (jcl, moco)),
        *(_plan_pretraining(method, _FLOAT32, sizes, 25) for method in (jcl, moco)),
        Measurement("losses, a query per location", 20, functools.partial(measurements.measure_losses, dense)),
    ]


def _plan_pretraining(method: str, form: Form, sizes: Sizes, seconds: float, is_large: bool = False) -> Measurement:
    images = sizes.large_images if is_large else sizes.images[method]
    groups = "8" if is_large else "1"
    words = ("SOLVER.IMS_PER_BATCH", str(images), "MODEL.BN_GROUPS", groups, *sizes.overrides)
    measure = functools.partial(measurements.measure_pretraining, _RECIPES[method], form, words, sizes.seconds)
    return Measurement(f"{method}, {images} images, {form.name}", seconds, measure)


def _plan_memory(method: str, sizes: Sizes) -> Measurement:
    words = ("MODEL.BN_GROUPS", "8", *sizes.overrides)
    measure = functools.partial(
        measurements.measure_memory, _RECIPES[method], _BF16, words, batch_sizes=sizes.memory_images
    )
    return Measurement(f"{method}, memory over images, {_BF16.name}", 30, measure)


def _plan_detection(engine: str, precision: str, sizes: Sizes) -> Measurement:
    name = f"Mask R-CNN FPN, {engine}, {sizes.detector_images} images, {precision}"
    arguments = (sizes.detector, sizes.detector_images, sizes.image_sizes, sizes.seconds)
    return Measurement(
        name, 25, functools.partial(measurements.measure_detection, engine, precision.lower(), *arguments)
    )


def _plan_loading(views: int, workers: int, sizes: Sizes) -> Measurement:
    name = f"{views} views from the loader, {workers} {'workers' if workers > 1 else 'worker'}"
    return Measurement(name, 10, functools.partial(measurements.measure_loading, views, workers, sizes.files))
