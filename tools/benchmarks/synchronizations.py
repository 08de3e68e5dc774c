"""Host-device synchronizations of a step, counted by torch's profiler."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

_CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")  # those that wait for the device
_SPAN = "counted steps"


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
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    calls = collections.Counter(name for name, start, _ in events if name in _CALLS and first <= start <= last)
    return {name: calls[name] for name in _CALLS}
