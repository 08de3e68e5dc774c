"""The growth of a step: real steps of one and of two processes, exponents, picture and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pretrain.common.errors import UserError
from tools import benchmark
from tools.benchmarks import growth

SMALL = {"MODEL.QUEUE_SIZE": 64, "VIEWS.IMAGE_SIZE": 16, "SOLVER.IMS_PER_BATCH": 8}


def test_real_steps_of_one_and_two_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(growth, "_BASE", {**growth._BASE, **SMALL})
    monkeypatch.setattr(
        growth, "_VARIED", {"N": ("SOLVER.IMS_PER_BATCH", (8, 16), "why"), "processes": ("", (2,), "why")}
    )
    with monkeypatch.context() as patched:  # a single point has no exponent
        patched.setattr(growth.np, "polyfit", lambda *_: [1.0])
        assert benchmark.main(["growth", "--rounds", "1", "--json", str(tmp_path / "a.json")]) == 0
    found = json.loads((tmp_path / "a.json").read_text())["growth"]
    assert found["N"]["values"] == [8, 16] and all(0 < value < 60_000 for value in found["N"]["milliseconds"])
    assert found["processes"]["mib"][0] > 10


def test_exponents_are_of_the_upper_half(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    """Time 1 + x^2 where x is large, memory x."""
    monkeypatch.setattr(growth, "_VARIED", {"K": ("MODEL.QUEUE_SIZE", (1, 2, 64, 128), "because")})
    monkeypatch.setattr(growth, "_measure", lambda _key, value, _steps: (1 + value**2, float(value)))
    plot = tmp_path / "growth.svg"
    assert benchmark.main(["growth", "--plot", str(plot)]) == 0
    assert "K: time ~ K^2.00, memory ~ K^1.00; because" in capsys.readouterr().out
    drawn = plot.read_text()
    assert drawn.startswith("<?xml") and "K (2.00)" in drawn and ">128<" in drawn and "mathdefault" not in drawn


def test_a_step_that_fails_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(growth, "_BASE", {**growth._BASE, **SMALL})
    with pytest.raises(
        UserError, match=r"a step with SOLVER.ACCUMULATE 3 failed: .*BN_GROUPS is 4; it must be a multiple"
    ):
        growth._measure("SOLVER.ACCUMULATE", 3, 1)
