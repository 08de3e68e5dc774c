"""The whole step beside the plain loop: both train on the demo's images, and the ratio is printed with its goal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pretrain.common.errors import UserError
from tools import benchmark, make_data


def test_both_loops_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no image folder at datasets/digits/images"):
        benchmark.main(["step"])
    make_data.main(["digits", "datasets/digits", "--scenes", "1"])
    assert benchmark.main(["step", "--rounds", "1", "--json", "step.json"]) == 0
    written = json.loads(Path("step.json").read_text())
    ours, plain = written["milliseconds"]["ours"], written["milliseconds"]["plain loop"]
    assert 0 < ours[1] < ours[0] and 0 < plain[1] < plain[0] and written["ratio"] == ours[0] / plain[0]
    assert f"{written['ratio']:.2f}" in capsys.readouterr().out
