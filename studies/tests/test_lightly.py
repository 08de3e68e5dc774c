"""Each side measures what it claims, the rounds are paired, and the table says what was measured."""

import importlib.util
import json
from pathlib import Path

import pytest
from PIL import Image

from pretrain.config import load_config
from studies.lightly import compare, measure


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lightly") / "photos"
    compare.make_photos(folder, 130)
    return folder


def test_the_table_pairs_the_rounds():
    runs = {
        "ours": [{"images_per_second": 20.0, "peak_mib": 61.0}, {"images_per_second": 30.0, "peak_mib": 60.0}],
        "lightly": [{"images_per_second": 10.0, "peak_mib": 61.0}, {"images_per_second": 10.0, "peak_mib": 60.0}],
    }
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in compare.format_table(runs).splitlines()]
    assert lines[2] == ["ours", "25.0 (20.0 to 30.0)", "60 (60 to 61)"]
    assert lines[4] == ["ours to lightly", "2.50 ± 6.35", "1.00 ± 0.00"]  # t 12.706, standard error 0.5


def test_our_loading_is_measured(photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with Image.open(photos / "00129.jpg") as photo:
        assert photo.size == (500, 375)
    pinned: list[set[int]] = []
    monkeypatch.setattr(measure.os, "sched_setaffinity", lambda pid, cores: pinned.append(cores))
    measure.main("ours", str(photos), "1")
    numbers = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert numbers["images_per_second"] > 0 and numbers["images_per_cpu_second"] > 0
    # This process and its worker hold more than 100 MiB each.
    assert numbers["peak_mib"] > 200 and [len(cores) for cores in pinned] == [1]


@pytest.mark.skipif(importlib.util.find_spec("lightly") is None, reason="lightly is not installed")
def test_lightly_loads_whole_batches(photos: Path):
    words = ["DATA.TRAIN", f"folder:{photos}", "SOLVER.IMS_PER_BATCH", "64", "DATALOADER.NUM_WORKERS", "0"]
    assert list(measure.load_with_lightly(load_config(None, words))) == [64, 64]
