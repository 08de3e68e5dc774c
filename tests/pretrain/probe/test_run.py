"""What the four probes share: their own folder, no trace of an earlier result, one line for bad weights."""

import json

import pytest
import torch

from pretrain.common import interrupt
from pretrain.common.errors import UserError
from pretrain.common.lock import claim
from pretrain.config import load_config
from pretrain.data import views
from pretrain.probe import distributions, embedding, features, knn, linear
from tests.errors import refused

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


def _distributions(cfg, weights):
    return distributions.main(cfg, {"one": weights}, images=48, augmentations=2)


PROBES = {"linear": linear.main, "knn": knn.main, "embedding": embedding.main, "distributions": _distributions}


def _config(images, output, *more):
    return load_config(None, [
        "MODEL.ARCH", "resnet18", "PROBE.CROP", "none", "DATA.TRAIN", f"folder:{images}", "VIEWS.IMAGE_SIZE", "16",
        "LINEAR.IMS_PER_BATCH", "16", "LINEAR.EPOCHS", "1", "LINEAR.AUGMENT", "none", "DATALOADER.NUM_WORKERS", "0",
        "DEVICE", "cpu", "OUTPUT_DIR", str(output), *more,
    ])  # fmt: skip


@pytest.fixture
def stopped_soon(monkeypatch):
    """A stop is requested while the second batch of features is computed; yields the sizes of all batches."""
    seen = []

    def counted(pixels, *statistics):
        seen.append(pixels.shape[:-3].numel())
        if len(seen) == 2:
            interrupt.request_stop("asked")
        return real(pixels, *statistics)

    real = views.normalize
    interrupt.clear()
    monkeypatch.setattr(features, "_BATCH", 4)
    monkeypatch.setattr(views, "normalize", counted)
    yield seen
    interrupt.clear()


@pytest.mark.parametrize("probe", PROBES)
def test_the_folder_of_another_stage_is_refused_and_left_alone(images, tmp_path, probe):
    (tmp_path / "stage.txt").write_text("pretrain\n")
    refused(lambda: PROBES[probe](_config(images, tmp_path), "random"), tmp_path, "pretrain", probe, "OUTPUT_DIR")
    assert [path.name for path in tmp_path.iterdir()] == ["stage.txt"]


@pytest.mark.parametrize("probe", PROBES)
def test_a_folder_in_use_is_refused_and_released_in_any_case(images, tmp_path, probe):
    cfg = _config(images, tmp_path)
    with claim(tmp_path, "pretraining"), pytest.raises(UserError, match="is in use: pretraining on"):
        PROBES[probe](cfg, "random")
    with pytest.raises(UserError, match="no run folder or checkpoint at"):
        PROBES[probe](cfg, str(tmp_path / "nowhere"))
    with claim(tmp_path, "somebody else"):
        assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize("probe", ["knn", "embedding", "distributions"])
def test_a_stop_ends_a_probe_between_two_batches_and_leaves_no_earlier_result(images, tmp_path, probe, stopped_soon):
    products = ["results.json", *([] if probe == "knn" else [f"{probe}.csv", f"{probe}.png"])]
    for name in products:
        (tmp_path / name).write_text(json.dumps({"stage": probe}))
    with pytest.raises(interrupt.Stopped, match="asked"):
        PROBES[probe](_config(images, tmp_path), "random")
    assert len(stopped_soon) == 2
    assert not [name for name in products if (tmp_path / name).exists()]
    interrupt.clear()
    PROBES[probe](_config(images, tmp_path), "random")
    assert json.loads((tmp_path / "results.json").read_text())["protocol"]["image_size"] == 16


@pytest.mark.parametrize(
    ("probe", "content"),
    [*((probe, "empty") for probe in PROBES), *(("knn", c) for c in ("text", "list", "no tensors", "another network"))],
)
def test_a_file_that_holds_no_backbone_is_one_line(images, tmp_path, probe, content):
    path = tmp_path / "weights.pth"
    other = {"list": [1], "no tensors": {"epoch": 3}, "another network": {"state_dict": {"0.weight": torch.ones(2, 2)}}}
    if content in other:
        torch.save(other[content], path)
    else:
        path.write_text("" if content == "empty" else "not a checkpoint\nat all\n")
    with pytest.raises(UserError) as caught:
        PROBES[probe](_config(images, tmp_path / "run"), str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
