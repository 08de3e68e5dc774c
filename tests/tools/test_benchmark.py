"""Each benchmark runs on little, asserts that the compared forms are equal, and writes what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.common.errors import UserError
from tests.transfer import tiny_coco
from tools import benchmark, make_data
from tools.benchmarks import objectives
from tools.benchmarks.measure import measure_peak_mib, time_rounds


def numbers(*words: str) -> Any:
    assert benchmark.main([*words, "--rounds", "2", "--json", "numbers.json"]) == 0
    return json.loads(Path("numbers.json").read_text())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_objectives(capsys: pytest.CaptureFixture[str]):
    sizes = ["--queries", "3", "--keys", "2", "--dims", "4", "--negatives", "9", "--anchors", "6"]
    written = numbers("objectives", *sizes)
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:1].islower()][1:]
    assert list(written["objectives"]) == names == [*objectives.NAIVE, "simclr", "tcl"]
    assert written["cpu"] and all(row["ms"] > 0 and row["naive_ms"] > 0 for row in written["objectives"].values())


def test_memory_grows_with_the_keys_in_the_naive_form_only():
    sizes = ["--queries", "32", "--dims", "8", "--negatives", "20000", "--anchors", "6"]
    one, six = (numbers("objectives", "--keys", keys, *sizes)["objectives"]["multikey"] for keys in ("1", "6"))
    assert six["naive_mib"] > 2 * one["naive_mib"] and six["mib"] < 1.2 * one["mib"]
    assert six["times_smaller"] > 5


def test_views(capsys: pytest.CaptureFixture[str]):
    written = numbers("views", "--views", "2", "--size", "32")["milliseconds"]
    assert min(written.values()) > 0 and f"{written['ours']:.2f}" in capsys.readouterr().out


def test_both_loops_step(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(UserError, match="no image folder at datasets/digits/images"):
        benchmark.main(["all"])
    make_data.main(["digits", "datasets/digits", "--scenes", "1"])
    written = numbers("step")
    ours, plain = written["milliseconds"].values()
    assert 0 < ours[1] < ours[0] and 0 < plain[1] < plain[0] and written["ratio"] == ours[0] / plain[0]
    assert f"{written['ratio']:.2f}" in capsys.readouterr().out


@pytest.mark.detectron2
def test_detection(folder: Path):
    (folder / "tiny.yaml").write_text(tiny_coco.config(folder, "unused", MODEL__MASK_ON=True).dump())
    written = numbers("detection", "--config-file", "tiny.yaml", "--images", "1", "--side", "64")
    assert all(written[name]["wall_seconds"] > 0 for name in ("torchvision", "detectron2", "ratio"))


def test_peak_memory_sees_a_large_tensor():
    assert 32 <= measure_peak_mib(lambda: torch.ones(8 * 2**20).sum(), torch.device("cpu")) < 32.1


def test_forms_take_turns_at_going_first():
    calls: list[str] = []
    time_rounds({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=3)
    assert "".join(calls) == "baabba"
