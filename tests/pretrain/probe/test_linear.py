"""The linear probe as a stage: learns, resumes, refuses what it must."""

import json

import pytest

from pretrain import distributed
from pretrain.common import interrupt
from pretrain.common.errors import UserError
from pretrain.config import load_config
from pretrain.probe import knn, linear
from tests.pretrain.ranks import run_ranks


def _config(images, output, *more):
    return load_config(None, [
        "MODEL.ARCH", "resnet18", "MODEL.STEM", "cifar", "DATA.TRAIN", f"folder:{images}", "VIEWS.IMAGE_SIZE", "16",
        "LINEAR.IMS_PER_BATCH", "16", "LINEAR.EPOCHS", "4", "LINEAR.BASE_LR", "1.0", "LINEAR.STEPS", "[2, 3]",
        "DATALOADER.NUM_WORKERS", "0", "DEVICE", "cpu", "OUTPUT_DIR", str(output), *more,
    ])  # fmt: skip


@pytest.mark.parametrize("augment", ["none", "crop_flip"])
def test_two_colours_are_told_apart(images, tmp_path, augment):
    results = linear.main(_config(images, tmp_path / "run", "LINEAR.AUGMENT", augment), "random")
    assert results["metrics"]["top1"] > 90
    assert json.loads((tmp_path / "run/results.json").read_text())["stage"] == "linear"


def test_several_learning_rates_in_one_pass_equal_each_alone(images, tmp_path):
    def run(name, *more):
        return linear.main(_config(images, tmp_path / name, "LINEAR.AUGMENT", "none", *more), "random")

    both = run("both", "LINEAR.LRS", "[0.1, 1.0]")["per_learning_rate"]
    first = run("first", "LINEAR.LRS", "[0.1]")["per_learning_rate"]
    assert both.keys() == {"0.1", "1"} and both["0.1"] == first["0.1"]


def test_a_killed_probe_goes_on_to_the_same_end(images, tmp_path, monkeypatch):
    whole = linear.main(_config(images, tmp_path / "whole", "LINEAR.AUGMENT", "none"), "random")
    real = linear.Heads.set_rates

    def die(self, epoch):
        if epoch == 2:
            raise KeyboardInterrupt
        return real(self, epoch)

    monkeypatch.setattr(linear.Heads, "set_rates", die)
    with pytest.raises(KeyboardInterrupt):
        linear.main(_config(images, tmp_path / "killed", "LINEAR.AUGMENT", "none"), "random")
    monkeypatch.undo()
    again = linear.main(_config(images, tmp_path / "killed", "LINEAR.AUGMENT", "none"), "random")
    assert again["per_learning_rate"] == whole["per_learning_rate"]
    lines = [(tmp_path / n / "metrics.json").read_text() for n in ("whole", "killed")]
    assert lines[0] == lines[1]


def test_a_head_that_diverges_leaves_the_others_alone(images, tmp_path):
    def run(name, rates):
        cfg = _config(images, tmp_path / name, "LINEAR.AUGMENT", "none", "LINEAR.LRS", rates)
        return linear.main(cfg, "random")

    results = run("both", "[1.0, 1e38]")
    assert results["per_learning_rate"]["1e+38"] == {"top1": 0.0, "top5": 0.0, "diverged": True}
    assert results["per_learning_rate"]["1"] == run("alone", "[1.0]")["per_learning_rate"]["1"]
    assert results["metrics"]["learning_rate"] == 1.0
    assert "head of learning rate 1e+38 diverged" in (tmp_path / "both/log.txt").read_text()
    with pytest.raises(UserError, match=r"not finite in epoch 0; lower LINEAR.BASE_LR"):
        run("none", "[1e38]")


def test_a_folder_of_another_protocol_or_backbone_is_refused(images, tmp_path):
    output = tmp_path / "run"
    first = linear.main(_config(images, output, "LINEAR.AUGMENT", "none"), "random")
    assert linear.main(_config(images, output, "LINEAR.AUGMENT", "none"), "random") == first
    with pytest.raises(UserError, match=r"another protocol \(LINEAR.EPOCHS 4; now; LINEAR.EPOCHS 5\)"):
        linear.main(_config(images, output, "LINEAR.AUGMENT", "none", "LINEAR.EPOCHS", "5"), "random")
    with pytest.raises(UserError, match="another backbone"):
        linear.main(_config(images, output, "LINEAR.AUGMENT", "none", "SEED", "3"), "random")


def _one_rank_is_told(images, output) -> None:
    interrupt.clear()
    if distributed.rank() == 1:
        interrupt.request_stop("told")
    with pytest.raises(interrupt.Stopped, match="told" if distributed.rank() == 1 else "another rank"):
        linear.main(_config(images, output, "LINEAR.AUGMENT", "none"), "random")


def test_every_rank_stops_when_one_is_told(images, tmp_path):
    run_ranks(_one_rank_is_told, 2, images, tmp_path / "run")
    assert linear.main(_config(images, tmp_path / "run", "LINEAR.AUGMENT", "none"), "random")["metrics"]["top1"] > 90


def test_unlabelled_data_are_refused_by_name(images, tmp_path):
    flat = images / "train" / "class0"
    with pytest.raises(UserError, match="labels"):
        linear.main(_config(images, tmp_path / "run", "DATA.TRAIN", f"folder:{flat}"), "random")


def test_knn_of_the_random_encoder(images, tmp_path):
    results = knn.main(_config(images, tmp_path / "run", "PROBE.KNN_K", "5"), "random")
    assert results["metrics"]["top1"] > 90 and results["source"]["source"] == "random"
