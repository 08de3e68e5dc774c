"""Every probe removes an earlier result when it starts, and can be stopped between two batches."""

import csv
import io
import json

import numpy as np
import pytest
import torch

from pretrain.common.run.state import update_state
from pretrain.probe import embedding, features
from tests.errors import refused
from tests.pretrain.probe.configs import probe_config, stop_in_batch
from tests.pretrain.runs import stopped

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


def test_a_stop_ends_a_probe_between_two_batches_and_leaves_no_earlier_result(images, tmp_path, monkeypatch):
    products = [tmp_path / product for product in ("results.json", "embedding.csv", "embedding.png")]
    update_state(tmp_path, stage="embedding")
    for path in products:
        path.write_text(json.dumps({"stage": "embedding"}))
    seen, context = stop_in_batch(monkeypatch, 2, features, "pool_features")
    stopped(lambda: embedding.main(probe_config(images, tmp_path), "random", context=context), "asked")
    assert len(seen) == 2 and not any(path.exists() for path in products)
    embedding.main(probe_config(images, tmp_path), "random")
    assert json.loads((tmp_path / "results.json").read_text())["protocol"]["image_size"] == 16


@pytest.mark.filterwarnings("error")
def test_any_names_of_classes_are_drawn_as_they_are():
    classes = ["$x$", "$\\frac", "a\udcff", "\u7ea2"]
    figure = embedding.draw(np.eye(4)[:, :2], np.arange(4), classes)
    figure.savefig(io.BytesIO())
    shown = [text.get_text().replace("\\$", "$") for text in figure.axes[0].get_legend().get_texts()]
    assert shown == ["$x$", "$\\frac", "a\\udcff", "\u7ea2"]


_DIFFERENT = np.eye(4, 6, dtype=np.float32)
_CONSTANT = np.full((30, 6), 3, np.float32)


@pytest.mark.parametrize(
    ("features_NF", "named"),
    [
        (_CONSTANT, "all 30 images are equal"),
        (np.zeros((30, 6)), "all 30 images are equal"),
        (_CONSTANT + 1e-7 * np.random.default_rng(0).normal(size=(30, 6)), "all 30 images are equal"),
        (_DIFFERENT[:1], "not 1"),
        (_DIFFERENT[:2], "not 2"),
        (_DIFFERENT, ""),  # fewer images than the default perplexity, and dimensions without any difference
        (np.concatenate([np.repeat(_DIFFERENT[:1], 29, axis=0), _DIFFERENT[1:2]]), ""),
        (np.repeat(_DIFFERENT[:2], 15, axis=0), ""),
        (np.concatenate([np.zeros((29, 6)), _DIFFERENT[:1]]), ""),
    ],
)
def test_equal_features_have_no_map(images, tmp_path, monkeypatch, features_NF, named):
    content = features.Features(torch.tensor(features_NF), torch.zeros(len(features_NF), dtype=torch.int64), 1)
    monkeypatch.setattr(embedding, "extract", lambda *args, **options: content)
    cfg = probe_config(images, tmp_path)
    if named:
        refused(lambda: embedding.main(cfg, "random"), named)
        assert not (tmp_path / "results.json").exists()
    else:
        assert embedding.main(cfg, "random")["images"] == len(features_NF)
        rows = list(csv.DictReader((tmp_path / "embedding.csv").open()))
        assert np.isfinite([[float(row["x"]), float(row["y"])] for row in rows]).all()


def test_two_colors_are_apart_on_the_map(images, tmp_path):
    results = embedding.main(probe_config(images, tmp_path), "random")
    rows = list(csv.DictReader((tmp_path / "embedding.csv").open()))
    assert len(rows) == results["images"] == 16
    points = [(float(r["x"]), float(r["y"]), r["label"]) for r in rows]
    for x, y, label in points:  # the nearest other point has the same color
        near = min((p for p in points if p[:2] != (x, y)), key=lambda p: (p[0] - x) ** 2 + (p[1] - y) ** 2)
        assert near[2] == label
    assert (tmp_path / "embedding.png").read_bytes().startswith(b"\x89PNG")
