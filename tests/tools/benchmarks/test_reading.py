"""Images per second of a folder and packed: every row is printed, and nothing is left on the disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import benchmark
from tools.benchmarks import reading


@pytest.mark.parametrize("root", [True, False])
def test_every_row_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, root: bool):
    dropped = []
    monkeypatch.setattr(reading, "_drop_caches", lambda: dropped.append(1) or root)
    words = ["--images", "80", "--side", "16", "--rounds", "2", "--json", str(tmp_path / "a.json")]
    (tmp_path / "disk").mkdir()
    assert benchmark.main(["reading", "--folder", str(tmp_path / "disk"), *words]) == 0
    rates = json.loads((tmp_path / "a.json").read_text())["rates"]
    assert len(rates) == (4 if root else 2) and len(dropped) == (1 + 2 * 2 * 2 if root else 1)
    assert all(rate > 0 for row in rates.values() for rate in row.values())
    assert "80 JPEGs of 16 pixels" in capsys.readouterr().out
    assert not list((tmp_path / "disk").iterdir())
