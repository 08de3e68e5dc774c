"""Each side measures what it claims, the rounds are paired, and the table and the file say the same."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from pretrain.common import checkpoint
from pretrain.common.backbone_file import load_backbone
from pretrain.common.errors import UserError
from pretrain.common.run_folder import read_json, write_json
from pretrain.config import load_config
from pretrain.model.encoder import build_backbone
from tools import benchmark
from tools.benchmarks import peers
from tools.benchmarks.peers import ours, run
from tools.data.digits import write_digits

needs_lightly = pytest.mark.skipif(importlib.util.find_spec("lightly") is None, reason="lightly is not installed")
Installed = Callable[..., None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Sets which peers appear to be installed, in version 1.6.0."""

    def install(*names: str) -> None:
        monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name in names or None)
        monkeypatch.setattr(peers.metadata, "version", lambda name: "1.6.0")

    return install


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


def test_a_missing_peer_is_one_line_with_the_remedy(installed: Installed):
    installed()
    with pytest.raises(UserError, match=r"lightly is not installed; `pip install '\.\[peers\]'` installs it"):
        benchmark.main(["peers"])


def test_a_single_batch_has_no_rate(installed: Installed):
    installed("lightly")
    with pytest.raises(UserError, match="--images is 127; it must be at least 128"):
        benchmark.main(["peers", "--images", "127"])


def test_rounds_are_in_turn_and_the_file_holds_what_the_table_shows(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    installed("lightly")
    for maker in ("_make_photos", "_make_digits"):
        monkeypatch.setattr(peers, maker, lambda *arguments: None)
    asked: list[tuple[str, str, int]] = []

    def measured(request: dict[str, Any], threads: int) -> dict[str, float]:
        assert (request["epochs"], threads) == (3, 2)
        asked.append((request["setting"], request["side"], request["seed"]))
        is_ours, number = request["side"] == peers.OURS, request["seed"]
        numbers = {"images_per_second": 100.0 * (1 + number) if is_ours else 100.0, "cpu_seconds": 4.0, "peak_mib": 8.0}
        return numbers if request["setting"] == "loading" else {**numbers, "knn_top1": 70.0 - number if is_ours else 70}

    monkeypatch.setattr(peers, "_measured", measured)
    path = tmp_path / "peers.json"
    words = ["--rounds", "2", "--images", "128", "--epochs", "3", "--threads", "2", "--json", str(path)]
    assert benchmark.main(["peers", *words]) == 0
    turns = [(peers.OURS, 1), ("lightly", 1), ("lightly", 2), (peers.OURS, 2)]
    assert asked == [(setting, *turn) for setting in ("loading", "training") for turn in turns]
    tables = capsys.readouterr().out.split("\n\n")
    assert tables[0] == (
        "loading: two MoCo v2 views of 224 pixels from 128 JPEGs of 500 x 375 pixels, one worker; "
        "rounds: 2, threads per process: 2"
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables[3].splitlines()]
    assert rows[0] == ["", "images/s", "CPU s", "peak MiB", "kNN top-1"]
    assert rows[2] == [peers.OURS, "250.0 (200.0 to 300.0)", "4.0 (4.0 to 4.0)", "8 (8 to 8)", "68.50 (68.00 to 69.00)"]
    assert rows[3][0] == "lightly 1.6.0"
    # ratios 2 and 3, differences -1 and -2: half of 1 times Student's 12.706 for one degree of freedom
    assert rows[4] == ["ours to lightly", "2.50 ± 6.35", "1.00 ± 0.00", "1.00 ± 0.00", "-1.50 ± 6.35"]
    training = json.loads(path.read_text())["training"]
    assert [one["knn_top1"] for one in training["runs"][peers.OURS]] == [69.0, 68.0]
    assert training["ours_to_peer"]["lightly"]["images_per_second"]["mean"] == 2.5


def test_one_round_has_no_interval(installed: Installed):
    installed("lightly")
    runs = {peers.OURS: [{"cpu_seconds": 3.0}], "lightly": [{"cpu_seconds": 6.0}]}
    ratios = {"lightly": peers.ours_to_peer(*runs.values())}
    assert [line.split("|")[2].strip() for line in peers.table(runs, ratios).splitlines()[2:]] == ["3.0", "6.0", "0.50"]


def test_our_loading_is_measured(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with Image.open(photos / "00129.jpg") as photo:
        assert photo.size == (500, 375)
    monkeypatch.chdir(tmp_path)
    write_json("request.json", {"setting": "loading", "side": peers.OURS, "data": str(photos), "seed": 1})
    run.main()
    measured = read_json("result.json")
    assert list(measured) == ["images_per_second", "cpu_seconds", "peak_mib"]
    # One worker takes more than a millisecond per image; this process and the worker hold more than 100 MiB each.
    assert 0 < measured["images_per_second"] < 1000 and measured["cpu_seconds"] > 0.128 and measured["peak_mib"] > 200


def test_a_process_that_fails_shows_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers.sys, "executable", "false")
    with pytest.raises(RuntimeError, match="loading by this project ended with exit status 1"):
        peers._measured({"setting": "loading", "side": peers.OURS}, threads=1)


def test_the_first_batch_is_not_in_the_rate(tmp_path: Path):
    def load(cfg: Any) -> Iterator[int]:
        assert (cfg.VIEWS.IMAGE_SIZE, cfg.DATALOADER.NUM_WORKERS, cfg.SEED) == (224, 1, 4)
        for seconds in (0.5, 0.05, 0.05):
            time.sleep(seconds)
            yield 64

    rate = run.loading(SimpleNamespace(load=load), {"data": str(tmp_path), "seed": 4})["images_per_second"]
    assert 192 / 0.6 < rate <= 128 / 0.1


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


def test_our_side_yields_every_whole_batch(photos: Path):
    assert list(ours.load(config(photos, "VIEWS.IMAGE_SIZE", "32"))) == [64, 64]


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
@pytest.mark.slow
def test_both_sides_run_in_processes_of_their_own(capsys: pytest.CaptureFixture[str]):
    assert benchmark.main(["peers", "--rounds", "1", "--images", "128", "--epochs", "1"]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [row[0].split()[0] for row in rows[2:5] + rows[7:]] == ["this", "lightly", "ours"] * 2
    assert all(float(cell) > 0 for row in rows[2:4] + rows[7:9] for cell in row[1:])


@needs_lightly
def test_lightly_trains_and_writes_a_backbone_that_the_probe_reads(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from tools.benchmarks.peers import lightly

    monkeypatch.chdir(tmp_path)
    recipe = load_config(run._RECIPE, ["DATA.TRAIN", f"folder:{digits / 'images' / 'train'}", "SOLVER.EPOCHS", "1"])
    path = lightly.train(recipe)
    written = checkpoint.read(path)
    assert load_backbone(path).arch == "resnet18"
    steps = {int(state["step"]) for state in written["optimizer"]["state"].values()}
    assert steps == {2} and written["bank"].shape == (256, 128)
    # 128 keys of two steps have replaced the first half of the bank
    assert torch.allclose(written["bank"].norm(dim=1), torch.ones(256), atol=1e-4)
    key = {name.removeprefix("0."): value for name, value in written["key"].items() if name.startswith("0.conv1")}
    assert not torch.equal(written["state_dict"]["conv1.weight"], key["conv1.weight"])
