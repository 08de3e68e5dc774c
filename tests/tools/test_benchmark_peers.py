"""Each side measures what it claims, the rounds are paired, and the table and the file say the same."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from pretrain.common import checkpoint
from pretrain.common.backbone_file import read_backbone
from pretrain.common.errors import UserError
from pretrain.common.run_folder import read_json, write_json
from pretrain.config import load_config
from pretrain.model.encoder import build_backbone
from tools import benchmark
from tools.benchmarks import peers
from tools.benchmarks.peers import run
from tools.data.digits import write_digits

needs_lightly = pytest.mark.skipif(importlib.util.find_spec("lightly") is None, reason="lightly is not installed")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peers") / "photos"
    peers._make_photos(folder, 130)
    return folder


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peers") / "digits"
    write_digits(folder, {"train": 130, "val": 40}, 32, {"train": 1, "val": 1}, seed=0, clutter=False)
    return folder


def config(folder: Path, *overrides: str) -> Any:
    common = ["DATA.TRAIN", f"folder:{folder}", "SOLVER.IMS_PER_BATCH", "64", "DATALOADER.NUM_WORKERS", "0"]
    return load_config(None, [*common, *overrides])


def test_lightly_missing_is_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"lightly is not installed; `pip install '\.\[peers\]'` installs it"):
        benchmark.main(["peers"])


def test_the_table_pairs_the_rounds():
    runs = {
        "ours": [{"images_per_second": 20.0, "knn_top1": 61.0}, {"images_per_second": 30.0, "knn_top1": 60.0}],
        "lightly": [{"images_per_second": 10.0, "knn_top1": 60.0}, {"images_per_second": 10.0, "knn_top1": 60.0}],
    }
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in peers.table(runs).splitlines()]
    assert lines[2] == ["ours", "25.0 (20.0 to 30.0)", "60.50 (60.00 to 61.00)"]
    assert lines[4] == ["ours to lightly", "2.50 ± 6.35", "+0.50 ± 6.35"]  # t 12.706, standard error 0.5


def test_our_loading_is_measured(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with Image.open(photos / "00129.jpg") as photo:
        assert photo.size == (500, 375)
    monkeypatch.chdir(tmp_path)
    pinned: list[set[int]] = []
    monkeypatch.setattr(run.os, "sched_setaffinity", lambda pid, cores: pinned.append(cores))
    write_json("request.json", {"setting": "loading", "side": "ours", "data": str(photos), "seed": 1})
    run.main()
    measured = read_json("result.json")
    assert list(measured) == ["images_per_cpu_second", "images_per_second", "peak_mib"]
    # One worker takes more than a millisecond per image; this process and the worker hold more than 100 MiB each.
    assert 0 < measured["images_per_second"] < 1000 and 0 < measured["images_per_cpu_second"] < 1000
    assert measured["peak_mib"] > 200 and [len(cores) for cores in pinned] == [1]


def test_every_side_is_scored_by_the_same_knn_outside_its_time(digits: Path, tmp_path: Path):
    def train(cfg: Any) -> Path:
        assert (cfg.METHOD.NAME, cfg.SOLVER.EPOCHS, cfg.SEED) == ("mocov2", 2, 3)
        time.sleep(0.2)
        torch.manual_seed(0)
        checkpoint.save(tmp_path / "random.pth", {"state_dict": build_backbone("resnet18").state_dict()})
        return tmp_path / "random.pth"

    measured = run.training(SimpleNamespace(train=train), {"data": str(digits), "seed": 3, "epochs": 2})
    assert 64 < measured["images_per_second"] < 4 * 64 / 0.2  # two epochs of two whole batches
    assert measured["knn_top1"] > 20  # chance is 10


@needs_lightly
def test_lightly_makes_the_views_of_the_recipe(photos: Path, digits: Path):
    from tools.benchmarks.peers import lightly

    assert list(lightly.load(config(photos, "VIEWS.IMAGE_SIZE", "32"))) == [64, 64]

    def views(name: str) -> Any:
        return lightly.transform(config(photos, "VIEWS.QUERY", name, "VIEWS.KEY", name))

    torch.manual_seed(0)
    image = Image.new("RGB", (64, 64), (200, 100, 50))
    colors = {name: {tuple(view[:, 0, 0].tolist()) for _ in range(50) for view in views(name)(image)}
              for name in ("sce_weak", "digits")}  # fmt: skip
    assert len(colors["sce_weak"]) == 1  # no color operation
    # digits jitter brightness and contrast of 8 in 10 views
    assert 40 < len(colors["digits"]) < 95
    with pytest.raises(ValueError, match="autoaugment"):
        views("autoaugment")


@needs_lightly
def test_lightly_trains_and_writes_a_backbone_that_the_probe_reads(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from tools.benchmarks.peers import lightly

    monkeypatch.chdir(tmp_path)
    recipe = load_config(run._RECIPE, ["DATA.TRAIN", f"folder:{digits / 'images' / 'train'}", "SOLVER.EPOCHS", "1"])
    path = lightly.train(recipe)
    written = checkpoint.read(path)
    assert read_backbone(path).arch == "resnet18"
    steps = {int(state["step"]) for state in written["optimizer"]["state"].values()}
    assert steps == {2} and written["bank"].shape == (256, 128)
    # 128 keys of two steps have replaced the first half of the bank
    assert torch.allclose(written["bank"].norm(dim=1), torch.ones(256), atol=1e-4)
    key = {name.removeprefix("0."): value for name, value in written["key"].items() if name.startswith("0.conv1")}
    assert not torch.equal(written["state_dict"]["conv1.weight"], key["conv1.weight"])
