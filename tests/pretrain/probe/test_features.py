"""What probes learn from: labeled images only, where a data set has others too."""

import numpy as np
import pytest
import torch

from pretrain.config import load_config
from pretrain.model.encoder import pooled_features
from pretrain.probe import features, linear

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


@pytest.fixture
def stl10(tmp_path):
    """STL10's files: 24 labeled images in two colors, 8 without a label (-1), 8 to be scored on."""
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    rng = np.random.default_rng(0)

    def write(part: str, labels: list[int]) -> None:
        colors = np.array([(200, 60, 60), (60, 60, 200)])[labels]
        pixels = rng.normal(colors[:, :, None, None], 25, (len(labels), 3, 96, 96))
        (folder / f"{part}_X.bin").write_bytes(pixels.clip(0, 255).astype(np.uint8).tobytes())
        if part != "unlabeled":
            (folder / f"{part}_y.bin").write_bytes(bytes(label + 1 for label in labels))

    write("train", [0, 1] * 12)
    write("unlabeled", [0, 1] * 4)
    write("test", [0, 1] * 4)
    (folder / "class_names.txt").write_text("\n".join(f"class{i}" for i in range(10)))
    return tmp_path


def _config(root, *more):
    return load_config(None, [
        "MODEL.ARCH", "resnet18", "PROBE.CROP", "none", "DATA.TRAIN", "stl10", "DATA.ROOT", str(root),
        "VIEWS.IMAGE_SIZE", "16", "LINEAR.IMS_PER_BATCH", "8", "LINEAR.EPOCHS", "8", "LINEAR.BASE_LR", "0.1",
        "DATALOADER.NUM_WORKERS", "0", "DEVICE", "cpu", "OUTPUT_DIR", str(root / "run"), *more,
    ])  # fmt: skip


@pytest.mark.parametrize("augment", ["none", "pad_flip"])
def test_the_linear_probe_leaves_out_images_without_a_label(stl10, augment):
    assert linear.main(_config(stl10, "LINEAR.AUGMENT", augment), "random")["metrics"]["top1"] > 90
    assert len((stl10 / "run/metrics.json").read_text().splitlines()) == 8
    assert '"iteration": 23' in (stl10 / "run/metrics.json").read_text()  # 3 steps of 8 per epoch: 24 images, not 32


@pytest.mark.parametrize("amp, dtype", [("none", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_probes_run_in_the_precision_of_the_run(stl10, amp, dtype, monkeypatch):
    """fp16 is chosen where a GPU has no bf16."""
    seen = []
    for module in (features, linear):
        monkeypatch.setattr(module, "pooled_features", lambda *a: seen.append(pooled_features(*a)) or seen[-1])
    words = ("LINEAR.AUGMENT", "pad_flip", "LINEAR.EPOCHS", "1")
    cfg = _config(stl10, "SOLVER.AMP", amp, *words)
    linear.main(cfg, "random")
    assert [len(x) for x in seen] == [8, 8, 8, 8] and {x.dtype for x in seen} == {dtype}
