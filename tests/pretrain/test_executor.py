"""VIEWS.EXECUTOR auto: the faster of two measured ways, the same on every rank, kept by the run."""

from pathlib import Path

import pytest
import torch

from pretrain import datasets, distributed, executor
from pretrain.common import checkpoint, interrupt
from pretrain.config import from_yaml_text, load_config
from pretrain.recipes import RECIPES
from tests.pretrain.ranks import run_ranks
from tests.pretrain.runs import assert_same_end, overrides, run

AUTO = ("VIEWS.EXECUTOR", "auto")


def test_a_resumed_run_keeps_its_choice(images, tmp_path, monkeypatch):
    run(images, tmp_path / "device", "VIEWS.EXECUTOR", "device")
    monkeypatch.setattr(executor, "_seconds", lambda *_: {"cpu": 2.0, "device": 1.0})
    calls = iter([""] * 2 + ["preempted"] * 99)
    with monkeypatch.context() as patch, pytest.raises(interrupt.Stopped):
        patch.setattr(interrupt, "stop_requested", lambda: next(calls))
        run(images, tmp_path / "auto", *AUTO)
    monkeypatch.setattr(executor, "_seconds", lambda *_: {"cpu": 1.0, "device": 2.0})
    run(images, tmp_path / "auto", *AUTO)
    assert_same_end(tmp_path / "auto", tmp_path / "device")
    for text in ((tmp_path / "auto/config.yaml").read_text(),
                 checkpoint.read(tmp_path / "auto" / checkpoint.FINAL)["config"]):  # fmt: skip
        assert from_yaml_text(text).VIEWS.EXECUTOR == "device"
    assert (
        "VIEWS.EXECUTOR auto: device (seconds per step: cpu 2.000, device 1.000)"
        in (tmp_path / "auto/log.txt").read_text()
    )


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_real_measurement(images, tmp_path, workers, monkeypatch):
    """Views that the device finishes late are counted against it, and against it alone."""
    monkeypatch.setattr(executor, "_finishing", lambda *_: 1000.0)
    cfg = load_config(None, overrides(images, tmp_path, *AUTO, "DATALOADER.NUM_WORKERS", workers))
    data, recipes = datasets.load(cfg.DATA.TRAIN, "train"), [RECIPES["moco_v2"]] * 3
    seconds = executor._seconds(cfg, data, recipes, torch.device("cpu"))
    assert seconds["device"] > 1000 > seconds["cpu"] > 0


def _settle_on_ranks(folder: Path, images: Path) -> None:
    executor._seconds = lambda *_: {"cpu": 2.0, "device": [1.0, 3.0][distributed.rank()]}
    cfg = load_config(None, overrides(images, folder, *AUTO))
    chosen = executor.settle(cfg, "", [], [], torch.device("cpu"), lambda _: None)  # type: ignore[arg-type]
    (folder / f"{distributed.rank()}.txt").write_text(chosen.VIEWS.EXECUTOR)


def test_the_slowest_rank_decides(images, tmp_path):
    run_ranks(_settle_on_ranks, 2, tmp_path, images)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == ["cpu", "cpu"]
