"""Each benchmark runs at a small size, checks that the compared implementations agree, and writes what it prints."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import objectives, reading, views
from benchmarks.measure import measure_peak_mib, time_rounds
from tests.errors import refused
from tests.transfer import tiny_coco
from tools import benchmark, make_data


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
    assert list(written["objectives"]) == names == [*objectives.NAIVE]
    assert written["cpu"] and all(row["ms"] > 0 and row["naive_ms"] > 0 for row in written["objectives"].values())


def test_memory_grows_with_the_keys_in_the_naive_form_only():
    sizes = ["--queries", "32", "--dims", "8", "--negatives", "20000", "--anchors", "6"]
    one_key = numbers("objectives", "--keys", "1", *sizes)["objectives"]["multikey"]
    six_keys = numbers("objectives", "--keys", "6", *sizes)["objectives"]["multikey"]
    assert six_keys["naive_mib"] > 2 * one_key["naive_mib"] and six_keys["mib"] < 1.2 * one_key["mib"]
    assert six_keys["times_smaller"] > 5


def test_views(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Both implementations compute the requested views; their times are compared with ours."""
    results: dict[str, Any] = {}
    for name in ("make_views", "_make_pil_views"):
        form = getattr(views, name)
        monkeypatch.setattr(views, name, lambda *args, name=name, form=form: results.setdefault(name, form(*args)))
    milliseconds = numbers("views", "--views", "2", "--size", "32")["milliseconds"]
    assert [np.shape(images) for images in results.values()] == 2 * [(2, 32, 32, 3)]
    assert list(milliseconds) == ["ours", "ours, decoding alone", views._PIL]
    ratio = milliseconds[views._PIL] / milliseconds["ours"]
    assert float(capsys.readouterr().out.split()[-1]) == pytest.approx(ratio, abs=0.005)


def test_both_loops_step():
    refused(lambda: benchmark.main(["all"]), "no image folder at datasets/digits/images")
    make_data.main(["digits", "--output", "datasets/digits", "--scenes", "1"])
    assert benchmark.main(["step", "--rounds", "1", "--output", "numbers.json"]) == 0
    written = json.loads(Path("numbers.json").read_text())
    assert written["ratio"] == written["milliseconds"]["ours"] / written["milliseconds"]["plain loop"]


@pytest.mark.detectron2
def test_detection(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Every engine trains; the reported ratio is the median of the rounds' ratios."""
    from benchmarks import detection

    cfg = tiny_coco.config(folder, "unused", MODEL__MASK_ON=True)
    for engine in detection.ENGINES:
        model, step = detection.build_step(engine, cfg, [detection.draw_batch(1, 64, 48, cfg)])
        before = [parameter.detach().clone() for parameter in model.parameters()]
        step()
        assert any(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    times = {"torchvision": [2.0, 4.0], "detectron2": [4.0, 4.0]}
    monkeypatch.setattr(detection, "time_rounds", lambda forms, rounds: times)
    (folder / "tiny.yaml").write_text(cfg.dump())
    written = numbers("detection", "--config-file", "tiny.yaml", "--images", "1", "--side", "64")
    ours, theirs, ratio = (written[name] for name in ("torchvision", "detectron2", "ratio"))
    assert (ours["ms"], ratio["ms"]) == (3.0, 0.75) and ratio["peak_mib"] == ours["peak_mib"] / theirs["peak_mib"]


def test_peak_memory_sees_a_large_tensor():
    assert 32 <= measure_peak_mib(lambda: torch.ones(8 * 2**20).sum(), torch.device("cpu")) < 32.1


def test_compared_implementations_take_turns_at_running_first():
    calls: list[str] = []
    time_rounds({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=3)
    assert "".join(calls) == "baabba"


def test_reading(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Each round empties the page cache, then reads the images of each format cold and warm; ratios are per round."""
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
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["tiny", "pictures", "warm", "6", "12", "2.00"] in lines
    assert written["reduced_decoding"]["4000 x 3000"]["reduced_to_full"] < 0.8
    assert lines[-1][:3] == ["4000", "x", "3000"]
    assert not list(Path("here").iterdir())


def test_dropped_pages_leave_the_files_unchanged(folder: Path):
    files = reading.write_images(folder, b"x" * 5000, 2)
    assert [len(paths) for paths in files.values()] == [2, 1]
    reading.drop_pages(files["folder"])
    assert files["folder"][0].read_bytes() == b"x" * 5000
