"""Whole runs on tiny images: resumed runs are bitwise equal, and bad input is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import pretrain.__main__
from pretrain import train
from pretrain.common import interrupt
from pretrain.common.files import sha256
from pretrain.common.weights import checkpoint
from pretrain.config import load_config
from pretrain.optim import set_learning_rate
from tests.errors import refused
from tests.pretrain.runs import STEPS_PER_EPOCH, assert_same_end, lines, overrides, run, stop_after

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


@pytest.fixture(scope="module")
def whole(images, tmp_path_factory) -> Path:
    """Train without interruption, with kNN after each epoch; return the run folder."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    results = run(images, output, "PROBE.KNN_PERIOD", "1")
    assert results["steps"] == 2 * STEPS_PER_EPOCH
    return output


def test_a_run_folder_is_self_contained(whole):
    names = {p.name for p in whole.iterdir()}
    expected = "config.yaml metrics.json log.txt checkpoint_final.pth results.json environment.txt state.json"
    assert {*expected.split(), "views.png"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    logged = lines(whole, "loss")
    assert [line["iteration"] for line in logged] == list(range(2 * STEPS_PER_EPOCH))
    assert {"lr", "queue_accuracy", "positive_similarity", "feature_spread", "images_per_second"} <= logged[0].keys()
    results = json.loads((whole / "results.json").read_text())
    assert results["metrics"]["knn_val_images"] == 16
    assert results["checkpoint_sha256"] == sha256(whole / "checkpoint_final.pth")
    assert "] device cpu, 1 process\n" in (whole / "log.txt").read_text().splitlines(keepends=True)[0]
    assert "split BN with 2 groups" in (whole / "log.txt").read_text()


def test_another_config_in_the_same_folder_is_refused(images, whole):
    refused(lambda: run(images, whole, "SOLVER.BASE_LR", "0.06"), "SOLVER.BASE_LR 0.03 -> 0.06", "--change-recipe")
    refused(lambda: run(images, whole, "SEED", "1", "SOLVER.CHANGE_RECIPE", "True"), "SEED 0 -> 1", "OUTPUT_DIR")


def test_a_resumed_run_may_change_what_errors_advise_to_change(images, whole, tmp_path):
    """Steps, the images' path and precision may change; another learning rate needs consent and is recorded."""
    moved = shutil.copytree(images, tmp_path / "moved")
    out = tmp_path / "run"
    run(images, out, "SOLVER.MAX_STEPS", "3")
    words = ["DATALOADER.ON_CORRUPT", "skip", "SOLVER.CHECKPOINT_KEEP", "9"]
    words += ["PROBE.KNN_K", "3", "DATA.VAL", f"folder:{images}", "LINEAR.EPOCHS", "5"]  # keys that only probes read
    run(moved, out, "SOLVER.MAX_STEPS", "6", *words)
    results = run(moved, out, *words, "SOLVER.BASE_LR", "0.01", "SOLVER.AMP", "bf16", "SOLVER.CHANGE_RECIPE", "True")
    assert results["steps"] == 12 and not list(out.glob("checkpoint_0*"))
    changes = ["step 6: SOLVER.AMP 'none' -> 'bf16'", "step 6: SOLVER.BASE_LR 0.03 -> 0.01"]
    newest = checkpoint.load_newest(out)
    assert newest is not None
    assert sorted(results["recipe_changes"]) == changes == sorted(newest[1]["recipe_changes"])
    assert [line["iteration"] for line in lines(out, "loss")] == list(range(12))
    assert lines(out, "loss")[6]["lr"] < 0.01 and f"changed after {changes[1]}" in (out / "log.txt").read_text()
    assert "BASE_LR: 0.01" in (out / "config.yaml").read_text()


@pytest.mark.parametrize("name", ["class0/0000.png", "class1/000.png"])
def test_other_images_in_the_same_folder_are_refused(images, whole, tmp_path, name):
    """An image has another name, or another label."""
    data = shutil.copytree(images, tmp_path / "moved")
    (data / "train/class0/000.png").rename(data / "train" / name)
    shutil.copytree(whole, tmp_path / "run")
    refused(lambda: run(data, tmp_path / "run"), data, tmp_path / "run")


@pytest.mark.core
def test_a_stop_in_the_middle_of_an_epoch_resumes_to_the_same_bits(images, whole, tmp_path, monkeypatch):
    stop_after(monkeypatch, 5)
    with pytest.raises(interrupt.Stopped, match="SIGTERM"):
        run(images, tmp_path / "run", "DATALOADER.NUM_WORKERS", "2")
    monkeypatch.undo()
    saved = checkpoint.load_newest(tmp_path / "run")
    assert saved is not None and 0 < saved[1]["step"] < STEPS_PER_EPOCH
    run(images, tmp_path / "run", "DATALOADER.NUM_WORKERS", "2")
    assert f"resumed from {saved[0].name} at step {saved[1]['step']} of 12" in (tmp_path / "run/log.txt").read_text()
    assert_same_end(whole, tmp_path / "run")


@pytest.mark.parametrize("moment", ["before kNN", "before results.json"])
def test_a_kill_around_knn_neither_loses_nor_repeats_its_line(images, whole, tmp_path, monkeypatch, moment):
    def killed(*_args):
        raise KeyboardInterrupt

    every = ("PROBE.KNN_PERIOD", "1", "SOLVER.CHECKPOINT_PERIOD", "0")
    with monkeypatch.context() as patch:
        if moment == "before kNN":
            patch.setattr(train.knn, "evaluate", killed)
        else:
            patch.setattr(train, "write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            run(images, tmp_path / "run", *every)
    run(images, tmp_path / "run", *every)
    assert "resumed from checkpoint_" in (tmp_path / "run/log.txt").read_text()
    expected = [(line["iteration"], line["knn_top1"]) for line in lines(whole, "knn_top1")]
    resumed = [(line["iteration"], line["knn_top1"]) for line in lines(tmp_path / "run", "knn_top1")]
    assert resumed == expected and [iteration for iteration, _ in expected] == [5, 11]


def test_a_loss_that_is_not_finite_names_step_rate_and_images(images, tmp_path):
    refused(
        lambda: run(images, tmp_path / "run", "SOLVER.BASE_LR", "1e30"), "at step 1", "learning rate 9.83e+29", ".png"
    )
    assert not list((tmp_path / "run").glob("checkpoint_final.pth"))


def test_the_command_line(images, tmp_path):
    pretrain.__main__.main(overrides(images, tmp_path / "run", "SOLVER.MAX_STEPS", "1"))
    assert (tmp_path / "run" / checkpoint.FINAL).exists()


def test_the_learning_rate_follows_the_batch_where_a_recipe_says_so():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    for batch, reference, lr in (("64", "256", 0.0075), ("512", "256", 0.06), ("512", "0", 0.03)):
        cfg = load_config(None, ["SOLVER.IMS_PER_BATCH", batch, "SOLVER.REFERENCE_BATCH", reference])
        assert set_learning_rate(optimizer, cfg.SOLVER, 0, 10) == pytest.approx(lr)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(lr)
