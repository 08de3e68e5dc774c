"""The speed of training on a GPU, and what an estimate consists of.

Images per second are the published rate of supervised training on that GPU, times the FLOPs of its step per those of
the recipe's step. Complete runs reach less than that: loaders, small batches and everything between steps take time.
`measure_efficiency` says how much less the published complete runs reached.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pretrain.common.errors import count_noun

from .networks import Stage, Work, count_dense_head, count_resnet
from .published import RESNET18_PER_RESNET50, RUNS, Gpu, PublishedRun

# CUDA, cuDNN's workspaces, NCCL, and what the allocator cannot reuse: a tenth of a GPU's memory, and at least this.
RESERVE_GIB = 2.0
COMPUTED = "computed, not measured; docs/costs.md says how, and how far it may be off"


@dataclass(frozen=True)
class Estimate:
    """What a recipe costs on ``count`` GPUs of a type; numbers that are not known are None.

    Attributes:
        is_measured: a step of this recipe was timed on this GPU; otherwise everything is computed.
        gib: memory of one GPU that tensors take, with ``accumulate`` micro-batches.
        accumulate: the smallest SOLVER.ACCUMULATE with which a step fits, or None if none does.
        largest_batch: the largest power of two of images per GPU that fits at once.
        workers: DATALOADER.NUM_WORKERS that keep up with the GPU.
    """

    gpu: Gpu
    count: int
    images_per_second: float
    hours: float | None
    gib: float | None
    accumulate: int | None
    largest_batch: int
    workers: int | None
    is_measured: bool = False

    def describe(self) -> str:
        """Describe it in one line, ``8 H100: about 12 hours, ...``."""
        hours = format_hours(self.hours) if self.hours else f"{self.images_per_second:,.0f} images/s"
        memory = "the batch does not fit" if self.gib is None else f"{self.gib:.2g} GiB per GPU"
        if self.accumulate and self.accumulate > 1:
            memory += f" with SOLVER.ACCUMULATE {self.accumulate}"
        how = ", from a measured step" if self.is_measured else ""
        return f"{format_count(self.count, self.gpu)}: about {hours}, {memory}{how}"


def format_count(count: int, gpu: Gpu) -> str:
    """Return ``A100`` or ``8 A100``."""
    return f"{count} {gpu.name}" if count > 1 else gpu.name


def format_hours(hours: float) -> str:
    """Return a time in the unit in which it has two digits or so."""
    if hours < 1:
        return count_noun(max(1, round(60 * hours)), "minute")
    return f"{hours:.2g} hours" if hours < 10 else f"{hours:,.0f} hours"


def choose_precision(gpu: Gpu, amp: str, float32_precision: str = "") -> str | None:
    """Return the precision of a config on a GPU, or None if no rate is published for it."""
    precision = "float32" if float32_precision == "highest" or "tf32" not in gpu.supervised else "tf32"
    precision = precision if amp == "none" else "half"
    return precision if precision in gpu.supervised else None


def count_training_flops(stages: Sequence[Stage], trained: float, encoded: float) -> float:
    """Return the FLOPs per image of a backbone that is passed ``trained`` times with gradients and ``encoded`` without.

    The first convolution needs no gradient of the image.
    """
    forward = sum((stage.work for stage in stages), Work()).flops
    first = stages[0].work.flops
    return trained * (3 * forward - first) + encoded * forward


def measure_flops_per_second(gpu: Gpu, precision: str, depth: int) -> float:
    """Return the FLOP/s of supervised training of a ResNet at 224 pixels.

    A ResNet-34 is taken to be as efficient as a ResNet-18, and a ResNet-101 as a ResNet-50.
    """
    reference = 50 if depth >= 50 else 18
    rate = gpu.supervised[precision] * (1.0 if reference == 50 else RESNET18_PER_RESNET50)
    return rate * count_training_flops(count_resnet(reference, 224, 224), 1, 0)


def compute_hours(run: PublishedRun) -> float:
    """Return the hours of a published run at the full speed of its GPUs."""
    stages = count_resnet(run.depth, run.size, run.size, run.stem)
    flops = count_training_flops(stages, run.trained, run.encoded)
    if run.dense:
        flops += count_dense_head(stages[-1], 128).flops * (3 * run.trained + run.encoded)
    speed = measure_flops_per_second(run.gpu, run.precision, run.depth)
    speed *= run.count * run.gpu.measure_scaling(run.count, run.precision)
    return flops * run.images / speed / 3600


@functools.cache
def measure_efficiency(without: PublishedRun | None = None) -> float:
    """Return the fraction of full speed that published runs reached: the geometric mean of all but one of them."""
    ratios = [compute_hours(run) / run.hours for run in RUNS if run != without]
    return statistics.geometric_mean(ratios)


def predict_hours(run: PublishedRun) -> float:
    """Predict the hours of a published run from the efficiency of the others."""
    return compute_hours(run) / measure_efficiency(run)


@functools.cache
def measure_error() -> float:
    """Return the factor by which predictions of published runs miss, in the geometric mean."""
    return math.exp(statistics.fmean(abs(math.log(predict_hours(run) / run.hours)) for run in RUNS))


def fit_batch(images: int, gpu: Gpu, fixed_gib: float, gib_per_image: float, multiples: Iterable[int]) -> int | None:
    """Return the first number of micro-batches with which ``images`` per GPU fit, or None."""
    for parts in multiples:
        if images % parts == 0 and fixed_gib + gib_per_image * images / parts <= count_usable_gib(gpu):
            return parts
    return None


def count_usable_gib(gpu: Gpu) -> float:
    """Return the memory that tensors can take."""
    return gpu.gib - max(RESERVE_GIB, gpu.gib / 10)


def find_largest_batch(gpu: Gpu, fixed_gib: float, gib_per_image: float) -> int:
    """Return the largest power of two of images that fits into a GPU, or 0."""
    images = (count_usable_gib(gpu) - fixed_gib) / gib_per_image
    return 2 ** math.floor(math.log2(images)) if images >= 1 else 0
