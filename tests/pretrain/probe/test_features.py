"""Probes learn from labeled images only, prepared as in the pretraining, and score finite features only."""

import numpy as np
import pytest
import torch

from pretrain import train
from pretrain.config import load_recipe
from pretrain.data.datasets import LOADERS, ImageData
from pretrain.data.sources import Array
from pretrain.model.encoder import pool_features
from pretrain.probe import embedding, features, knn, linear
from tests.errors import refused
from tests.pretrain.probe.configs import probe_config
from tests.pretrain.runs import overrides

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


@pytest.fixture
def mixed(monkeypatch):
    """Write 24 labeled images in two colors, 8 without a label (-1), and 8 for validation."""
    rng = np.random.default_rng(0)

    def read(split, _root):
        labels = np.array([0, 1] * (12 if split == "train" else 4) + [-1] * (8 if split == "train" else 0))
        colors = np.array([(200, 60, 60), (60, 60, 200)])[labels]
        pixels = rng.normal(colors[:, None, None], 25, (len(labels), 20, 20, 3)).clip(0, 255).astype(np.uint8)
        return ImageData(Array({split: pixels}), labels, ["red", "blue"])

    monkeypatch.setitem(LOADERS, "mixed", read)


def _config(output, *more):
    words = ("DATA.TRAIN", "mixed", "LINEAR.IMS_PER_BATCH", "8", "LINEAR.BASE_LR", "0.1")
    return probe_config("", output, *words, *more)


@pytest.mark.parametrize("augment", ["none", "pad_flip"])
def test_the_linear_probe_leaves_out_images_without_a_label(mixed, tmp_path, augment):
    results = linear.main(_config(tmp_path, "LINEAR.AUGMENT", augment, "LINEAR.EPOCHS", "8"), "random")
    assert results["metrics"]["top1"] > 90
    lines = (tmp_path / "metrics.json").read_text().splitlines()
    assert len(lines) == 8 and '"iteration": 23' in lines[-1]  # 3 steps of 8 per epoch: 24 images, not 32


@pytest.mark.parametrize("amp, dtype", [("none", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_probes_run_in_the_precision_of_the_run(mixed, tmp_path, amp, dtype, monkeypatch):
    """fp16 is chosen where a GPU has no bf16."""
    seen = []
    monkeypatch.setattr(features, "pool_features", lambda *a: seen.append(pool_features(*a)) or seen[-1])
    linear.main(
        _config(tmp_path, "SOLVER.AMP", amp, "LINEAR.AUGMENT", "pad_flip", "LINEAR.EPOCHS", "1", "LINEAR.STEPS", "[]"),
        "random",
    )
    assert [len(x) for x in seen] == [8, 8, 8, 8] and {x.dtype for x in seen} == {dtype}


def test_a_checkpoint_is_probed_with_the_pixel_statistics_of_its_pretraining(images, tmp_path):
    """A file has no config next to it, so the defaults would normalize the images in another way."""
    run = tmp_path / "run"
    mean = [0.5, 0.4, 0.3]
    train.main(load_recipe(None, [*overrides(images, run), "VIEWS.MEAN", mean]))
    weights = str(run / "checkpoint_final.pth")
    keys = (f"VIEWS.MEAN '{mean}'", "VIEWS.STD '[0.229, 0.224, 0.225]'")
    refused(lambda: knn.main(probe_config(images, tmp_path / "knn"), weights), weights, *keys)
    knn.main(probe_config(images, tmp_path / "knn", "VIEWS.MEAN", str(mean)), weights)


def test_weights_of_other_pixel_statistics_are_named_when_pretraining_continues_from_them(images, tmp_path):
    words = [*overrides(images, tmp_path / "first"), "VIEWS.STD", "[0.5, 0.5, 0.5]"]
    train.main(load_recipe(None, words))
    weights = str(tmp_path / "first/checkpoint_final.pth")
    logs = []
    for name, std in (("other", [0.229, 0.224, 0.225]), ("equal", [0.5, 0.5, 0.5])):
        words = [*overrides(images, tmp_path / name), "MODEL.WEIGHTS", weights, "VIEWS.STD", std]
        train.main(load_recipe(None, words))
        logs.append((tmp_path / name / "log.txt").read_text())
    assert "VIEWS.STD is [0.229, 0.224, 0.225], not [0.5, 0.5, 0.5]" in logs[0]
    assert "pixel statistics" not in logs[1]


@pytest.mark.parametrize("probe", [knn, linear, embedding])
def test_features_that_are_not_finite_have_no_score(images, tmp_path, monkeypatch, probe):
    monkeypatch.setattr(features, "pool_features", lambda *a: pool_features(*a) / 0)
    refused(lambda: probe.main(probe_config(images, tmp_path), "random"), str(images), "not finite", "checkpoint")
    assert not (tmp_path / "results.json").exists()


def test_pretraining_continues_without_the_score_of_features_that_are_not_finite(images, tmp_path, monkeypatch):
    monkeypatch.setattr(features, "pool_features", lambda *a: pool_features(*a) / 0)
    results = train.main(load_recipe(None, overrides(images, tmp_path / "run")))
    assert "knn_top1" not in results["metrics"]
    assert "no kNN score" in (tmp_path / "run/log.txt").read_text()
