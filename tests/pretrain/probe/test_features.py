"""What probes learn from: labeled images only, where a data set has others too."""

import numpy as np
import pytest
import torch

from pretrain.model.encoder import pooled_features
from pretrain.probe import features, linear
from tests.pretrain.probe.configs import probe_config

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


@pytest.fixture
def stl10(tmp_path):
    """STL10's files: 24 labeled images in two colors, 8 without a label (-1), 8 to be scored on."""
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for part, count in (("train", 24), ("unlabeled", 8), ("test", 8)):
        labels = [0, 1] * (count // 2)
        colors = np.array([(200, 60, 60), (60, 60, 200)])[labels]
        pixels = rng.normal(colors[:, :, None, None], 25, (count, 3, 96, 96))
        (folder / f"{part}_X.bin").write_bytes(pixels.clip(0, 255).astype(np.uint8).tobytes())
        if part != "unlabeled":
            (folder / f"{part}_y.bin").write_bytes(bytes(label + 1 for label in labels))
    (folder / "class_names.txt").write_text("\n".join(f"class{i}" for i in range(10)))
    return tmp_path


def _config(root, *more):
    words = ("DATA.TRAIN", "stl10", "DATA.ROOT", str(root), "LINEAR.IMS_PER_BATCH", "8", "LINEAR.BASE_LR", "0.1")
    return probe_config("", root / "run", *words, *more)


@pytest.mark.parametrize("augment", ["none", "pad_flip"])
def test_the_linear_probe_leaves_out_images_without_a_label(stl10, augment):
    results = linear.main(_config(stl10, "LINEAR.AUGMENT", augment, "LINEAR.EPOCHS", "8"), "random")
    assert results["metrics"]["top1"] > 90
    lines = (stl10 / "run/metrics.json").read_text().splitlines()
    assert len(lines) == 8 and '"iteration": 23' in lines[-1]  # 3 steps of 8 per epoch: 24 images, not 32


@pytest.mark.parametrize("amp, dtype", [("none", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_probes_run_in_the_precision_of_the_run(stl10, amp, dtype, monkeypatch):
    """fp16 is chosen where a GPU has no bf16."""
    seen = []
    for module in (features, linear):
        monkeypatch.setattr(module, "pooled_features", lambda *a: seen.append(pooled_features(*a)) or seen[-1])
    linear.main(_config(stl10, "SOLVER.AMP", amp, "LINEAR.AUGMENT", "pad_flip", "LINEAR.EPOCHS", "1"), "random")
    assert [len(x) for x in seen] == [8, 8, 8, 8] and {x.dtype for x in seen} == {dtype}
