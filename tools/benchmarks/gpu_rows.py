"""Measurements of `benchmark.py gpu`: pretraining steps, losses, detection iterations, and views from the loader."""

import argparse
import functools
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import transfer.config
from pretrain.common import distributed
from pretrain.common.device import autocast, set_float32_precision
from pretrain.common.run.folder import count_usable_cores
from pretrain.config import load_config
from pretrain.data import datasets
from pretrain.data.augmentations import AUGMENTATIONS
from pretrain.data.loader import Batch, Loader
from pretrain.state import TrainState, build_train_state
from pretrain.steps import training_step
from tools import ROOT
from tools.benchmarks import detection, objectives
from tools.benchmarks.measure import count_convolution_flops, count_synchronizations, find_peak
from tools.benchmarks.reading import write_images
from tools.benchmarks.views import encode_photo

_WARM_UP = 3  # steps: cuDNN selects its kernels, the optimizer allocates its momentum
_COUNTED = 2  # steps under the profiler
_VIEWS = 6  # JCL's: a query and M' = 5 keys
_RECIPES = {"JCL": "jcl_R50_IN1k_200ep", "MoCo v2": "mocov2_R50_IN1k_200ep"}
_FORMS = {  # name -> (precision, which decides about TF32 and about the peak; overrides)
    "float32": ("float32", ()),
    "TF32": ("tf32", ()),
    "bf16, channels_last": ("bf16", ("SOLVER.AMP", "bf16")),
    "bf16, channels_last, compiled": ("bf16", ("SOLVER.AMP", "bf16", "SOLVER.COMPILE", "True")),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of all rows.

    Attributes:
        images: images per step of each method, those of one of the recipe's 8 GPUs.
        large_images: images per step of a larger batch, with the recipe's 8 BN groups.
        overrides: config overrides of pretraining.
        detector: config overrides of the detector.
        side: pixels per side of the detector's images.
        detector_images: images per iteration.
        losses: sizes of the losses, as `benchmark.py objectives` takes them.
        dense_queries: queries of the losses with a query per location.
        files: JPEGs that the loader reads.
        seconds: time of the measured steps of a row.
    """

    images: dict[str, int]
    large_images: int
    overrides: tuple[str, ...]
    detector: tuple[str, ...]
    side: int
    detector_images: int
    losses: dict[str, int]
    dense_queries: int
    files: int
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
    overrides=(),
    detector=(),
    side=928,  # as many pixels as 800 x 1,067
    detector_images=4,
    losses={"queries": 64, "keys": 5, "dims": 128, "negatives": 65536, "anchors": 1024, "rounds": 15},
    dense_queries=1568,  # 49 locations of 32 images
    files=2048,
    seconds=5.0,
)
SMALL = Sizes(
    images={"JCL": 2, "MoCo v2": 2},
    large_images=16,
    overrides=("MODEL.ARCH", "resnet18", "VIEWS.IMAGE_SIZE", "32", "MODEL.QUEUE_SIZE", "64"),
    detector=(
        *("MODEL.RESNETS.DEPTH", "18", "MODEL.RESNETS.RES2_OUT_CHANNELS", "64", "MODEL.FPN.OUT_CHANNELS", "32"),
        *("MODEL.ROI_BOX_HEAD.FC_DIM", "64", "MODEL.ROI_MASK_HEAD.CONV_DIM", "32"),
    ),
    side=64,
    detector_images=1,
    losses={"queries": 3, "keys": 2, "dims": 4, "negatives": 9, "anchors": 6, "rounds": 1},
    dense_queries=6,
    files=16,
    seconds=0.0,
)


def list_rows(sizes: Sizes) -> list[Measurement]:
    """List all rows, the most valuable first."""
    bf16, compiled = list(_FORMS)[2:]
    jcl, moco = _RECIPES
    dense = {**sizes.losses, "queries": sizes.dense_queries}
    return [
        *(_plan_pretraining(method, form, sizes, 25) for form in (bf16, "TF32") for method in (jcl, moco)),
        Measurement("losses", 20, functools.partial(_measure_losses, sizes.losses)),
        *(_plan_detection(engine, "TF32", sizes) for engine in detection.ENGINES),
        *(_plan_pretraining(method, "float32", sizes, 25) for method in (jcl, moco)),
        Measurement("six views from the loader", 20, functools.partial(_measure_loading, sizes)),
        *(_plan_pretraining(method, bf16, sizes, 30, is_large=True) for method in (jcl, moco)),
        *(_plan_detection(engine, "bf16", sizes) for engine in detection.ENGINES),
        *(_plan_pretraining(method, compiled, sizes, 110) for method in (jcl, moco)),
        Measurement("losses, a query per location", 20, functools.partial(_measure_losses, dense)),
    ]


def _plan_pretraining(method: str, form: str, sizes: Sizes, seconds: float, is_large: bool = False) -> Measurement:
    images = sizes.large_images if is_large else sizes.images[method]
    groups = "8" if is_large else "1"
    precision, overrides = _FORMS[form]
    words = ("SOLVER.IMS_PER_BATCH", str(images), "MODEL.BN_GROUPS", groups, *sizes.overrides)
    measure = functools.partial(_measure_pretraining, _RECIPES[method], precision, words, overrides, sizes.seconds)
    return Measurement(f"{method}, {images} images, {form}", seconds, measure)


def _plan_detection(engine: str, precision: str, sizes: Sizes) -> Measurement:
    name = f"Mask R-CNN FPN, {engine}, {sizes.detector_images} images, {precision}"
    return Measurement(name, 25, functools.partial(_measure_detection, engine, precision.lower(), sizes))


def _measure_pretraining(
    recipe: str, precision: str, words: tuple[str, ...], overrides: tuple[str, ...], seconds: float
) -> dict[str, Any]:
    set_float32_precision("highest" if precision == "float32" else "high")
    flops = _count_flops(recipe, words)
    step, images = _build_pretraining_step(recipe, (*words, *overrides))
    result = _measure_steps(step, images, seconds)
    peak = find_peak(torch.cuda.get_device_name(), precision) if torch.cuda.is_available() else None
    fraction = flops / (result["milliseconds"] / 1e3) / peak if peak else None
    return {**result, "convolution_tflop": flops / 1e12, "convolution_share": fraction}


@functools.cache
def _count_flops(recipe: str, words: tuple[str, ...]) -> int:
    """Return the floating-point operations of a step's convolutions, counted in plain float32 and never compiled."""
    return count_convolution_flops(_build_pretraining_step(recipe, words)[0])


def _build_pretraining_step(recipe: str, words: tuple[str, ...]) -> tuple[Callable[[], object], int]:
    """Return a step that trains on views in the host's memory, and the number of its images."""
    cfg = load_config(ROOT / f"configs/pretrain/{recipe}.yaml", list(words))
    device = distributed.init_process_group()
    size = cfg.VIEWS.IMAGE_SIZE
    images = cfg.SOLVER.IMS_PER_BATCH
    shape = (1 + cfg.METHOD.NUM_KEYS, images, size, size, 3)  # as the loader makes them: channels side by side
    views_VnCHW = torch.randint(0, 256, shape, dtype=torch.uint8).permute(0, 1, 4, 2, 3)
    if device.type == "cuda":
        views_VnCHW = views_VnCHW.pin_memory()
    index_n = torch.arange(images)
    batch = Batch(views_VnCHW, index_n, index_n, {})
    state = build_train_state(cfg, device, 1000)
    return functools.partial(_train_step, state, batch, device), images


def _train_step(state: TrainState, batch: Batch, device: torch.device) -> Tensor:
    """Copy the views and train on them, as pretrain/train.py does."""
    views_VnCHW = batch.views_VnCHW.to(device, non_blocking=True).contiguous()
    return training_step(state, batch._replace(views_VnCHW=views_VnCHW), 0)[0]


def _measure_detection(engine: str, precision: str, sizes: Sizes) -> dict[str, Any]:
    set_float32_precision("high")
    device = distributed.init_process_group().type
    words = ["MODEL.DEVICE", device, *sizes.detector]
    cfg = transfer.config.load_config(ROOT / "configs/coco_mask_R50_FPN_1x.yaml", words)
    _, step = detection.build_step(engine, cfg, detection.draw_batch(sizes.detector_images, sizes.side, cfg))
    with autocast("bf16" if precision == "bf16" else "none", device):
        return _measure_steps(step, sizes.detector_images, sizes.seconds)


def _measure_losses(losses: dict[str, int]) -> dict[str, Any]:
    set_float32_precision("highest")  # the forms must agree
    return objectives.run(argparse.Namespace(**losses))


def _measure_loading(sizes: Sizes) -> dict[str, Any]:
    """Measure JCL's views of photographs of 500 x 375 pixels, from files to the device, with up to 16 workers."""
    device = distributed.init_process_group()
    workers = min(16, count_usable_cores())
    batch_size = min(64, sizes.files // 4)
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), encode_photo(), sizes.files)
        data = datasets.load(f"folder:{folder}/images", "train")
        options = {"batch_size": batch_size, "num_workers": workers, "pin_memory": device.type == "cuda"}
        loader = Loader(data, [AUGMENTATIONS["moco_v2"]] * _VIEWS, 224, seed=0, **options)
        batches = loader.batches(0, len(loader))
        next(batches)  # the workers have started
        start = time.perf_counter()
        for _, batch in batches:
            batch.views_VnCHW.to(device, non_blocking=True)
            _synchronize()
        duration = (time.perf_counter() - start) / (len(loader) - 1)
    rate = batch_size / duration
    return {"images_per_second": rate, "milliseconds": 1e3 * duration, "workers": workers}


def _measure_steps(step: Callable[[], object], images: int, seconds: float) -> dict[str, Any]:
    """Return images/s, peak MiB of the whole process and synchronizations of a step that trains on ``images``."""
    for _ in range(_WARM_UP):
        step()
    _synchronize()
    is_cuda = torch.cuda.is_available()
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    steps = 0
    while steps < _COUNTED or time.perf_counter() - start < seconds:
        for _ in range(_COUNTED):  # without a synchronization between them, as in training
            step()
        _synchronize()
        steps += _COUNTED
    duration = (time.perf_counter() - start) / steps
    return {
        "images_per_second": images / duration,
        "milliseconds": 1e3 * duration,
        "steps": steps,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if is_cuda else None,
        "reserved_mib": torch.cuda.max_memory_reserved() / 2**20 if is_cuda else None,
        "synchronizations": count_synchronizations(step, _COUNTED) if is_cuda else None,
    }


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
