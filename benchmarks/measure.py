"""Time, memory, FLOPs and host-device synchronizations of computations, measured in one process."""

import collections
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler, which counts memory, prints to the terminal

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

_MIB = 2**20
_CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")  # those that wait for the device
_SPAN = "counted steps"
# Dense TFLOP/s by name of the device (float32 without tensor cores, TF32, bfloat16, float16), from NVIDIA's sheets.
# fmt: off
PEAKS = {
    "V100-SXM2": (15.7, None, None, 125.0),
    "A100": (19.5, 156.0, 312.0, 312.0),
    "L4": (30.3, 60.0, 121.0, 121.0),
    "L40S": (91.6, 183.0, 362.0, 362.0),
    "H100 PCIe": (51.0, 378.0, 756.0, 756.0),
    "H100 80GB HBM3": (67.0, 494.7, 989.4, 989.4),
    "H200": (67.0, 494.7, 989.4, 989.4),
}
# fmt: on
PRECISIONS = ("float32", "tf32", "bf16", "fp16")


def time_rounds(forms: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each form in each round.

    Each round runs every form, so that a slow moment of the machine affects all of them; the order alternates.
    """
    milliseconds: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(rounds):
        for name in list(forms) if number % 2 else list(forms)[::-1]:
            start = time.perf_counter()
            forms[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            milliseconds[name].append(1e3 * (time.perf_counter() - start))
    return milliseconds


def measure_milliseconds(forms: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each form."""
    return {name: statistics.median(times) for name, times in time_rounds(forms, rounds).items()}


def measure_peak_mib(form: Callable[[], object], device: torch.device) -> float:
    """Return peak MiB of the tensors that a form allocates, counted by torch and therefore without noise."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        form()
        return (torch.cuda.max_memory_allocated(device) - before) / _MIB
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        form()
    events = cast(Any, record.profiler).kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate((size for _, size in changes), initial=0)) / _MIB


def find_peak(device_name: str, precision: str) -> float | None:
    """Return dense FLOP/s of a device, or None where its name, or the precision there, is not in the table."""
    words = f" {device_name.replace('-', ' ')} "
    matches = [name for name in PEAKS if f" {name.replace('-', ' ')} " in words]
    if not matches:
        return None
    peak = PEAKS[max(matches, key=len)][PRECISIONS.index(precision)]
    return peak and 1e12 * peak


class _MovedBytes(TorchDispatchMode):
    """Counts the bytes of the inputs and outputs of all operations while active."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.name():
            tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
            self.total += sum(x.numel() * x.element_size() for x in tensors)
        return result


def count_work(step: Callable[[], object]) -> tuple[int, int]:
    """Count the work of a step, forward and backward.

    Returns:
        Floating-point operations of all convolutions, 2 per multiply-add, and the bytes that all operations move.
    """
    with FlopCounterMode(display=False) as counter, _MovedBytes() as moved:
        step()
    counts = counter.get_flop_counts().get("Global", {})
    return sum(count for operation, count in counts.items() if "convolution" in str(operation)), moved.total


def count_synchronizations(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Return how often the host waits for the device per step, by the CUDA function that waits."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record, record_function(_SPAN):
        for _ in range(steps):
            step()
    on_host = [event for event in record.events() or () if event.device_type == DeviceType.CPU]
    events = [(event.name, event.time_range.start, event.time_range.end) for event in on_host]
    return {name: count / steps for name, count in count_calls(events).items()}


def count_calls(events: Iterable[tuple[str, Any, Any]]) -> dict[str, int]:
    """Count the waiting calls in the span of the steps: the profiler itself synchronizes when it starts and stops.

    Args:
        events: (name, start, end) of each event on the host.
    """
    events = list(events)
    spans = [(start, end) for name, start, end in events if name == _SPAN]
    first = min(start for start, _ in spans)
    last = max(end for _, end in spans)
    calls = collections.Counter(name for name, start, _ in events if name in _CALLS and first <= start <= last)
    return {name: calls[name] for name in _CALLS}
