"""Time and memory of several forms of the same computation, measured in one process."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler, which counts memory, prints otherwise

import torch
from torch.profiler import ProfilerActivity, profile

_MIB = 2**20


def timed_rounds(forms: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(wall, processor) seconds of each form in each round.

    Each round runs every form, so that a slow moment of the machine affects all of them, in alternating order.
    """
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    for number in range(rounds):
        for name in list(forms) if number % 2 else list(forms)[::-1]:
            wall, cpu = time.perf_counter(), time.process_time()
            forms[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return seconds


def median_milliseconds(forms: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median wall milliseconds of each form."""
    times = timed_rounds(forms, rounds)
    return {name: 1e3 * statistics.median(wall for wall, _ in seconds) for name, seconds in times.items()}


def peak_mib(form: Callable[[], object], device: torch.device) -> float:
    """Peak MiB of tensors that a form allocates, by torch's own count, which has no noise."""
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
