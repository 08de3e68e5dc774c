"""Time and memory of several forms of the same computation, measured in one process."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler, which counts memory, prints to the terminal

import torch
from torch.profiler import ProfilerActivity, profile

_MIB = 2**20


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
