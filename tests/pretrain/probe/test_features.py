"""Probes learn from labeled images only, even if a data set has others too."""

import numpy as np
import pytest
import torch

from pretrain.data.datasets import LOADERS, ImageData
from pretrain.data.sources import Array
from pretrain.model.encoder import pool_features
from pretrain.probe import features, linear
from tests.pretrain.probe.configs import probe_config

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
