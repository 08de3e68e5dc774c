"""What the four probes share: a folder of their own, no trace of an earlier result, a stop between two batches."""

import csv
import json

import pytest

from pretrain.common import interrupt
from pretrain.common.errors import UserError
from pretrain.common.lock import claim
from pretrain.data import views
from pretrain.probe import distributions, embedding, features, knn, linear
from tests.errors import refused
from tests.pretrain.probe.configs import probe_config

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


def _distributions(cfg, weights):
    return distributions.main(cfg, {"one": weights}, images=48, augmentations=2)


PROBES = {"linear": linear.main, "knn": knn.main, "embedding": embedding.main, "distributions": _distributions}


@pytest.fixture
def stopped_soon(monkeypatch):
    """A stop is requested while the second batch of features is computed; yields the sizes of all batches."""
    seen, real = [], views.normalize

    def counted(pixels, *statistics):
        seen.append(pixels.shape[:-3].numel())
        if len(seen) == 2:
            interrupt.request_stop("asked")
        return real(pixels, *statistics)

    interrupt.clear()
    monkeypatch.setattr(features, "_BATCH", 4)
    monkeypatch.setattr(views, "normalize", counted)
    yield seen
    interrupt.clear()


@pytest.mark.parametrize("probe", PROBES)
def test_a_folder_of_another_stage_or_in_use_is_refused_and_released_in_any_case(images, tmp_path, probe):
    cfg = probe_config(images, tmp_path)
    (tmp_path / "stage.txt").write_text("pretrain\n")
    refused(lambda: PROBES[probe](cfg, "random"), tmp_path, "pretrain", probe, "OUTPUT_DIR")
    assert [path.name for path in tmp_path.iterdir()] == ["stage.txt"]
    (tmp_path / "stage.txt").unlink()
    with claim(tmp_path, "pretraining"), pytest.raises(UserError, match="is in use: pretraining on"):
        PROBES[probe](cfg, "random")
    refused(lambda: PROBES[probe](cfg, str(tmp_path / "nowhere")), "nowhere")
    with claim(tmp_path, "somebody else"):
        assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize("probe", ["knn", "embedding", "distributions"])
def test_a_stop_ends_a_probe_between_two_batches_and_leaves_no_earlier_result(images, tmp_path, probe, stopped_soon):
    products = ["results.json", *([] if probe == "knn" else [f"{probe}.csv", f"{probe}.png"])]
    for name in products:
        (tmp_path / name).write_text(json.dumps({"stage": probe}))
    with pytest.raises(interrupt.Stopped, match="asked"):
        PROBES[probe](probe_config(images, tmp_path), "random")
    assert len(stopped_soon) == 2
    assert not [name for name in products if (tmp_path / name).exists()]
    interrupt.clear()
    PROBES[probe](probe_config(images, tmp_path), "random")
    assert json.loads((tmp_path / "results.json").read_text())["protocol"]["image_size"] == 16


def test_two_colors_are_apart_on_the_map(images, tmp_path):
    results = embedding.main(probe_config(images, tmp_path), "random")
    rows = list(csv.DictReader((tmp_path / "embedding.csv").open()))
    assert len(rows) == results["images"] == 16
    points = [(float(r["x"]), float(r["y"]), r["label"]) for r in rows]
    for x, y, label in points:  # the nearest other point has the same color
        near = min((p for p in points if p[:2] != (x, y)), key=lambda p: (p[0] - x) ** 2 + (p[1] - y) ** 2)
        assert near[2] == label
    assert (tmp_path / "embedding.png").read_bytes().startswith(b"\x89PNG")
