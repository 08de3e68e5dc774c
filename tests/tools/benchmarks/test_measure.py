"""Time and memory of a form."""

from __future__ import annotations

import torch

from tools.benchmarks.measure import peak_mib, timed_rounds


def test_peak_memory_sees_a_large_tensor():
    peak = peak_mib(lambda: torch.ones(8 * 2**20).sum(), torch.device("cpu"))
    assert 32 <= peak < 32.1


def test_each_round_runs_every_form_and_they_take_turns_at_going_first():
    calls: list[str] = []
    seconds = timed_rounds({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=3)
    assert "".join(calls) == "baabba"
    assert all(len(times) == 3 and min(min(pair) for pair in times) >= 0 for times in seconds.values())
