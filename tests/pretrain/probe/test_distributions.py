import csv

import numpy as np
import pytest
import torch

from pretrain.probe import distributions, features
from tests.pretrain.probe.configs import probe_config

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


def test_spread_equals_all_pairs_and_the_explicit_covariance():
    torch.manual_seed(0)
    features_BAF = torch.randn(3, 7, 5, dtype=torch.float32)
    similarity, variance = distributions.measure_similarity_and_variance(features_BAF)
    for b in range(3):
        u = features_BAF[b] / features_BAF[b].norm(dim=1, keepdim=True)
        pairs = [float(u[i] @ u[j]) for i in range(7) for j in range(7)]
        assert similarity[b].item() == pytest.approx(np.mean(pairs), rel=1e-5)
        assert variance[b].item() == pytest.approx(np.cov(u.T.numpy(), bias=True).diagonal().mean(), rel=1e-5)


def test_two_runs_in_one_picture_and_one_table(images, tmp_path, monkeypatch):
    pool = features.pool_features
    cfg = probe_config(images, tmp_path, "SOLVER.AMP", "bf16")  # of the runs; the measures need full precision
    precisions = []
    monkeypatch.setattr(
        features, "pool_features", lambda *a: precisions.append(torch.is_autocast_enabled("cpu")) or pool(*a)
    )
    results = distributions.main(cfg, {"one": "random", "same": "random"}, images=32, augmentations=4)
    rows = list(csv.DictReader((tmp_path / "distributions.csv").open()))
    assert {*precisions} == {False}
    assert len(rows) == 64 and results["images"] == 32
    ones = [row["similarity"] for row in rows if row["run"] == "one"]
    sames = [row["similarity"] for row in rows if row["run"] == "same"]
    assert ones == sames
    assert results["runs"]["one"]["similarity_mean"] == pytest.approx(np.mean([float(s) for s in ones]), rel=1e-5)
    assert (tmp_path / "distributions.png").read_bytes().startswith(b"\x89PNG")
