"""The benchmark's naive forms are the same losses, and its command line prints a row for each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pretrain.common.errors import UserError
from tools import benchmark

SMALL = ["objectives", "--queries", "3", "--keys", "2", "--dims", "4", "--negatives", "9", "--rounds", "1"]


def test_objectives_prints_a_row_for_each(capsys: pytest.CaptureFixture[str]):
    assert benchmark.main([*SMALL, "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("N 3, M' 2, D 4, K 9, cpu")
    assert [line.split()[0] for line in lines[2:]] == list(benchmark.NAIVE)
    assert all(float(line.split()[1]) > 0 and line.split()[3].endswith("x") for line in lines[2:])


def test_forms_that_differ_are_not_compared(monkeypatch: pytest.MonkeyPatch):
    doubled = benchmark.naive_moco
    monkeypatch.setitem(benchmark.NAIVE, "mocov2", lambda *a, **k: 2 * doubled(*a, **k))
    with pytest.raises(RuntimeError, match="mocov2: the fast and the naive form differ"):
        benchmark.main([*SMALL, "--device", "cpu"])


def test_a_size_of_0_is_refused():
    with pytest.raises(UserError, match="--negatives is 0; it must be at least 1"):
        benchmark.main([*SMALL, "--negatives", "0", "--device", "cpu"])


def test_peak_memory_sees_a_large_tensor():
    peak = benchmark.peak_mib(lambda: torch.ones(8 * 2**20).sum(), torch.device("cpu"))
    assert 32 <= peak < 32.1


def test_views_prints_ratios_and_writes_json(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = tmp_path / "views.json"
    assert benchmark.main(["views", "--views", "2", "--size", "32", "--rounds", "2", "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    numbers = json.loads(path.read_text())["milliseconds"]
    assert len(lines) == 1 + len(numbers) and lines[1].split() == ["ours", f"{numbers['ours']:.2f}", "1.00x"]
    pil = numbers["PIL (torchvision's transforms, Pillow's blur)"]
    assert lines[-1].endswith(f"{pil / numbers['ours']:.2f}x") and min(numbers.values()) > 0
    with pytest.raises(UserError, match="--views is 0; it must be at least 1"):
        benchmark.main(["views", "--views", "0"])
