"""Each benchmark runs on little, asserts that the compared forms are equal, and writes what it prints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pretrain.common.errors import UserError
from tests.transfer import tiny_coco
from tools import benchmark, make_data
from tools.benchmarks import objectives, reading, views
from tools.benchmarks.measure import measure_peak_mib, time_rounds


def numbers(*words: str) -> Any:
    assert benchmark.main([*words, "--rounds", "2", "--output", "numbers.json"]) == 0
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


def test_views(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Both ways make the views that are asked for; their times are compared with ours."""
    arrays: dict[str, Any] = {}

    def times(forms: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
        arrays.update({name: np.stack(form()) for name, form in forms.items()})
        return dict(zip(forms, (2.0, 1.0, 17.0), strict=True))

    monkeypatch.setattr(views, "measure_milliseconds", times)
    written = numbers("views", "--views", "2", "--size", "32")
    shapes = {"ours": (2, 32, 32, 3), "ours, decoding alone": (375, 500, 3), views._PIL: (2, 32, 32, 3)}
    assert {name: array.shape for name, array in arrays.items()} == shapes
    assert list(written["milliseconds"].values()) == [2.0, 1.0, 17.0]
    assert capsys.readouterr().out.splitlines()[-1].split()[-2:] == ["17.00", "8.50"]


def test_both_loops_step():
    with pytest.raises(UserError, match="no image folder at datasets/digits/images"):
        benchmark.main(["all"])
    make_data.main(["digits", "--output", "datasets/digits", "--scenes", "1"])
    assert benchmark.main(["step", "--rounds", "1", "--output", "numbers.json"]) == 0
    written = json.loads(Path("numbers.json").read_text())
    assert written["ratio"] == written["milliseconds"]["ours"] / written["milliseconds"]["plain loop"]


@pytest.mark.detectron2
def test_detection(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Every engine's iterations train it; ratios are those of rounds, then their median."""
    from tools.benchmarks import detection

    steps: dict[str, Callable[[], None]] = {}
    models: list[torch.nn.Module] = []

    def times(forms: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
        steps.update(forms)
        before = [[p.detach().clone() for p in model.parameters()] for model in models]
        for number, form in enumerate(forms.values()):
            form()
            trained = zip(before[number], models[number].parameters(), strict=True)
            assert any(not torch.equal(old, new) for old, new in trained)
        return {"torchvision": [2.0, 4.0], "detectron2": [4.0, 4.0]}

    real = detection._step
    monkeypatch.setattr(detection, "_step", lambda model, *args: models.append(model) or real(model, *args))
    monkeypatch.setattr(detection, "time_rounds", times)
    monkeypatch.setattr(
        detection, "measure_peak_mib", lambda form, device: 3.0 if form is steps["torchvision"] else 4.0
    )
    (folder / "tiny.yaml").write_text(tiny_coco.config(folder, "unused", MODEL__MASK_ON=True).dump())
    written = numbers("detection", "--config-file", "tiny.yaml", "--images", "1", "--side", "64")
    assert written["torchvision"] == {"ms": 3.0, "peak_mib": 3.0}
    assert written["ratio"] == {"ms": 0.75, "peak_mib": 0.75}


def test_peak_memory_sees_a_large_tensor():
    assert 32 <= measure_peak_mib(lambda: torch.ones(8 * 2**20).sum(), torch.device("cpu")) < 32.1


def test_forms_take_turns_at_going_first():
    calls: list[str] = []
    time_rounds({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=3)
    assert "".join(calls) == "baabba"


def test_reading(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Each round drops the pages of each form, reads its images cold, then warm; ratios are those of rounds."""
    calls: list[str] = []
    times = iter([1.0, 1.0, 2.0, 2.0, 4.0, 2.0, 1.0, 1.0] * 2)

    def time_reads(data: Any, order: list[int]) -> float:
        assert sorted(order) == list(range(12)) and data.read(3).shape[-1] == 3
        calls.append(Path(data.image_name(0)).parts[-3])
        return next(times)

    monkeypatch.setattr(reading, "_time_reads", time_reads)
    monkeypatch.setattr(reading, "drop_pages", lambda files: calls.append(f"drop {len(files)}"))
    written = numbers("reading", "--images", "12", "--folder", "here")
    one_round = {"tar": ["drop 1", "images.tar", "images.tar"], "folder": ["drop 12", "images", "images"]}
    assert calls == 2 * [*one_round["tar"], *one_round["folder"], *one_round["folder"], *one_round["tar"]]
    cold, warm = written["reading"]["photographs"].values()
    assert cold == {"folder": 4.0, "tar": 12.0, "tar_to_folder": 3.0}
    assert warm["tar_to_folder"] == 2.0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["tiny", "pictures", "warm", "6", "12", "2.00"]
    assert not list(Path("here").iterdir())


def test_pages_are_dropped(folder: Path):
    files = reading.write_images(folder, b"x" * 5000, 2)
    assert [len(paths) for paths in files.values()] == [2, 1]
    reading.drop_pages(files["folder"])
    assert files["folder"][0].read_bytes() == b"x" * 5000
