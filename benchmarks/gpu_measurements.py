"""What `benchmark.py gpu` measures: steps of both stages, losses, the loader, and the ceilings of the machine."""

import argparse
import contextlib
import functools
import gc
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import transfer.config
from benchmarks import detection, objectives
from benchmarks.measure import count_synchronizations, count_work, find_peak
from benchmarks.reading import write_images
from benchmarks.views import encode_photo
from pretrain.common.device import is_out_of_memory, set_float32_precision
from pretrain.common.ranks import process_group
from pretrain.config import load_config
from pretrain.data import datasets
from pretrain.data.augmentations import AUGMENTATIONS
from pretrain.data.loader import Batch, Loader
from pretrain.model import objectives as pretraining
from pretrain.state import TrainState, build_train_state
from pretrain.steps import training_step
from tools import ROOT

_WARM_UP = 3  # steps: cuDNN selects its kernels, the optimizer allocates its momentum
_COUNTED = 2  # steps under the profiler
_LOADER_BATCH = 16
_DISCARDED = (
    3  # batches per worker: workers start one after the other, and have read ahead when the first batch arrives
)
_TIMED = 12  # batches per worker
_IN_FLIGHT = 3  # batches per worker after the timed ones, so that all workers are busy until the end
_COPY_ROUNDS = 10


@dataclass(frozen=True)
class Form:
    """How a pretraining step computes.

    Attributes:
        name: for the table.
        precision: float32 | tf32 | bf16 | fp16, which decides about TF32 and about the peak.
        overrides: config overrides.
        memory_format: the layout in place of the one that training chooses.
    """

    name: str
    precision: str
    overrides: tuple[str, ...] = ()
    memory_format: torch.memory_format | None = None


def measure_pretraining(recipe: str, form: Form, words: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Measure a recipe's step and its work: FLOPs of the convolutions, bytes that its kernels read and write."""
    _prepare(form)
    eager = tuple(word for word in form.overrides if word not in ("SOLVER.COMPILE", "True"))
    flops, moved = count_work(build_pretraining_step(recipe, (*words, *eager))[0])
    _free_memory()
    step, images, view_bytes = build_pretraining_step(recipe, (*words, *form.overrides))
    result = _measure_steps(step, images, seconds)
    peak = find_peak(torch.cuda.get_device_name(), form.precision) if torch.cuda.is_available() else None
    fraction = flops / (result["milliseconds"] / 1e3) / peak if peak else None
    work = {"convolution_tflop": flops / 1e12, "view_mib": view_bytes / 2**20, "precision": form.precision}
    if eager == form.overrides:  # a compiled step fuses kernels
        work["moved_gib"] = moved / 2**30
    return {**result, **work, "convolution_share": fraction}


def measure_memory(recipe: str, form: Form, words: tuple[str, ...], batch_sizes: Iterable[int]) -> dict[str, Any]:
    """Return the peak MiB of a step over the images per step, up to the first size that does not fit."""
    _prepare(form)
    peaks: dict[str, float | None] = {}
    for images in batch_sizes:
        batch_size = ("SOLVER.IMS_PER_BATCH", str(images))
        try:
            result = _measure_steps(*build_pretraining_step(recipe, (*words, *batch_size, *form.overrides))[:2], 0.0)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            break
        peaks[str(images)] = result["peak_mib"]
        _free_memory()
    return {"peak_mib_by_images": peaks}


def _free_memory() -> None:
    """Give the memory of an earlier step back to the device, so that it is not counted with the next one's."""
    gc.collect()
    torch.cuda.empty_cache()


def _prepare(form: Form) -> None:
    set_float32_precision("highest" if form.precision == "float32" else "high")
    if form.memory_format is not None:  # each row has a process of its own
        pretraining.choose_memory_format = lambda *_: form.memory_format


def build_pretraining_step(recipe: str, words: tuple[str, ...]) -> tuple[Callable[[], object], int, int]:
    """Build what one step of a recipe on one device runs, on views of noise that lie in the host's memory.

    Args:
        recipe: the name of a file in configs/pretrain.
        words: overrides, as on the command line.

    Returns:
        A function that runs the step, the number of its images, and the bytes of its views.
    """
    cfg = load_config(ROOT / f"configs/pretrain/{recipe}.yaml", list(words))
    device = process_group.init_process_group()
    size = cfg.VIEWS.IMAGE_SIZE
    images = cfg.SOLVER.IMS_PER_BATCH
    shape = (1 + cfg.METHOD.NUM_KEYS, images, size, size, 3)  # as the loader makes them: channels side by side
    views_VnCHW = torch.randint(0, 256, shape, dtype=torch.uint8).permute(0, 1, 4, 2, 3)
    if device.type == "cuda":
        views_VnCHW = views_VnCHW.pin_memory()
    index_n = torch.arange(images)
    batch = Batch(views_VnCHW, index_n, index_n, {})
    state = build_train_state(cfg, device, 1000)
    return functools.partial(_train_step, state, batch, device), images, views_VnCHW.numel()


def _train_step(state: TrainState, batch: Batch, device: torch.device) -> Tensor:
    """Copy the views and train on them, as pretrain/train.py does."""
    views_VnCHW = batch.views_VnCHW.to(device, non_blocking=True).contiguous()
    return training_step(state, batch._replace(views_VnCHW=views_VnCHW), 0)[0]


def measure_detection(
    engine: str, precision: str, words: tuple[str, ...], images: int, sizes: Iterable[tuple[int, int]], seconds: float
) -> dict[str, Any]:
    """Measure iterations of fine-tuning on batches of two image sizes in turn, as training's images differ in size."""
    set_float32_precision("high")
    device = process_group.init_process_group().type
    amp = ("SOLVER.AMP.ENABLED", "True", "SOLVER.BF16", "True") if precision == "bf16" else ()
    cfg = transfer.config.load_config(
        ROOT / "configs/coco_mask_R50_FPN_1x.yaml", ["MODEL.DEVICE", device, *words, *amp]
    )
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK
    batches = [detection.draw_batch(images, height, width, cfg) for height, width in sizes]
    _, step = detection.build_step(engine, cfg, batches)
    return _measure_steps(step, images, seconds)


def measure_losses(losses: dict[str, int]) -> dict[str, Any]:
    set_float32_precision("highest")  # the forms must agree
    return objectives.run(argparse.Namespace(**losses))


def measure_loading(views: int, workers: int, files: int) -> dict[str, Any]:
    """Measure MoCo v2's views of photographs of 500 x 375 pixels, from files to the device."""
    device = process_group.init_process_group()
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), encode_photo(), files)
        data = datasets.load(f"folder:{folder}/images", "train")
        options = {"batch_size": _LOADER_BATCH, "num_workers": workers, "pin_memory": device.type == "cuda"}
        loader = Loader(data, [AUGMENTATIONS["moco_v2"]] * views, 224, seed=0, **options)
        batches: Any = loader.batches(0, (_DISCARDED + _TIMED + _IN_FLIGHT) * workers)
        with contextlib.closing(batches):  # before the files are deleted
            arrivals = (batch.views_VnCHW.to(device, non_blocking=True) for _, batch in batches)
            seconds = time_in_steady_state(arrivals, _DISCARDED * workers, _TIMED * workers)
    rate = _LOADER_BATCH * _TIMED * workers / seconds
    return {"images_per_second": rate, "milliseconds": 1e3 * _LOADER_BATCH / rate, "workers": workers}


def time_in_steady_state(arrivals: Iterable[object], discarded: int, timed: int) -> float:
    """Return the seconds from the arrival of the last discarded batch to that of the last timed one."""
    start = 0.0
    for number, _ in enumerate(arrivals, start=1):
        if number == discarded:
            start = time.perf_counter()
        if number == discarded + timed:
            break
    _synchronize()
    return time.perf_counter() - start


def measure_ceilings(side: int, mib: int) -> dict[str, Any]:
    """Return what this machine reaches at most: GB/s of copies, and TFLOP/s of square matrix products."""
    device = process_group.init_process_group()
    source = torch.empty(mib * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    host = torch.empty(mib * 2**20, dtype=torch.uint8, pin_memory=device.type == "cuda")
    gigabytes = mib * 2**20 / 1e9
    result: dict[str, Any] = {
        "device_gb_per_second": 2 * gigabytes / _time_rounds(lambda: target.copy_(source)),  # read and write
        "host_to_device_gb_per_second": gigabytes / _time_rounds(lambda: target.copy_(host, non_blocking=True)),
    }
    dtypes = {"float32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    products = {}
    for precision, dtype in dtypes.items():
        set_float32_precision("highest" if precision == "float32" else "high")
        a = torch.randn(side, side, dtype=dtype, device=device)  # a product of equal numbers takes less power and time
        products[precision] = 2e-12 * side**3 / _time_rounds(functools.partial(torch.mm, a, a))
    return {**result, "product_tflops": products}


def _time_rounds(function: Callable[[], object]) -> float:
    """Return the mean seconds of calls that are not waited for one by one, after one that is not timed."""
    function()
    _synchronize()
    start = time.perf_counter()
    for _ in range(_COPY_ROUNDS):
        function()
    _synchronize()
    return (time.perf_counter() - start) / _COPY_ROUNDS


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
