"""The benchmark of views prints its ratios and writes its numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import benchmark


def test_ratios_are_printed_and_numbers_written(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = tmp_path / "views.json"
    assert benchmark.main(["views", "--views", "2", "--size", "32", "--rounds", "2", "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    numbers = json.loads(path.read_text())["milliseconds"]
    assert len(lines) == 3 + len(numbers) and lines[3].split() == ["ours", f"{numbers['ours']:.2f}", "1.00", "-"]
    pil = numbers["PIL (torchvision's transforms, Pillow's blur)"]
    assert lines[-1].split()[-2:] == [f"{pil / numbers['ours']:.2f}", "6.00"] and min(numbers.values()) > 0
