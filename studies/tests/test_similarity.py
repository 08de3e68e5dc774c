"""Fig. 3 of JCL is compared with loops over all pairs of views."""

import csv
import json

import numpy as np
import pytest
import torch
import torchvision

from pretrain.probe import features
from studies.jcl_multikey import similarity
from tests.errors import refused
from tests.pretrain.probe.configs import probe_config

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


def test_spread_equals_all_pairs_and_the_explicit_covariance():
    torch.manual_seed(0)
    features_BAF = torch.randn(3, 7, 5, dtype=torch.float32)
    spread, variance = similarity.measure_similarity_and_variance(features_BAF)
    for b in range(3):
        u = features_BAF[b] / features_BAF[b].norm(dim=1, keepdim=True)
        pairs = [float(u[i] @ u[j]) for i in range(7) for j in range(7)]
        assert spread[b].item() == pytest.approx(np.mean(pairs), rel=1e-5)
        assert variance[b].item() == pytest.approx(np.cov(u.T.numpy(), bias=True).diagonal().mean(), rel=1e-5)


def test_two_runs_in_one_picture_and_one_table(images, tmp_path, monkeypatch):
    pool = features.pool_features
    cfg = probe_config(images, tmp_path, "SOLVER.AMP", "bf16")  # of the runs; the measures need full precision
    precisions = []
    monkeypatch.setattr(
        features, "pool_features", lambda *a: precisions.append(torch.is_autocast_enabled("cpu")) or pool(*a)
    )
    results = similarity.measure(cfg, {"one": "random", "same": "random"}, images=32, augmentations=4)
    rows = list(csv.DictReader((tmp_path / "similarity.csv").open()))
    assert {*precisions} == {False}
    assert len(rows) == 64 and results["images"] == 32
    ones = [row["similarity"] for row in rows if row["run"] == "one"]
    sames = [row["similarity"] for row in rows if row["run"] == "same"]
    assert ones == sames
    assert results["runs"]["one"]["similarity_mean"] == pytest.approx(np.mean([float(s) for s in ones]), rel=1e-5)
    assert (tmp_path / "similarity.png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_a_study_are_recorded_for_each_branch_and_seed(images, tmp_path, monkeypatch):
    names = {"mocov2": {"7": "mocov2_seed=7"}}
    record = tmp_path / "launch/pipeline.json"
    record.parent.mkdir()
    record.write_text(json.dumps({"study": {"branches": names}}))
    (tmp_path / "scores.json").write_text(json.dumps({"scores": {"kNN top-1": {"mocov2": {"7": 50.0}}}}))
    run = tmp_path / "mocov2_seed=7/pretrain"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(probe_config(images, run, "SEED", "7").dump())
    torch.manual_seed(7)
    torch.save(torchvision.models.resnet18().state_dict(), run / "checkpoint_final.pth")
    monkeypatch.setattr(similarity, "_SCORES", tmp_path / "scores.json")
    similarity.main(["--study", str(tmp_path)])
    scores = json.loads((tmp_path / "scores.json").read_text())["scores"]
    results = json.loads((tmp_path / "mocov2_seed=7/similarity/results.json").read_text())
    assert scores["kNN top-1"] == {"mocov2": {"7": 50.0}}
    assert scores["similarity of views"] == {"mocov2": {"7": results["runs"]["mocov2"]["similarity_mean"]}}
    assert 0 < scores["variance of views"]["mocov2"]["7"] < 1 and results["protocol"]["seed"] == 7


def test_keys_may_follow_the_runs(images, tmp_path):
    words = ["VIEWS.KEY", "moco_v1", "VIEWS.IMAGE_SIZE", "16", "MODEL.ARCH", "resnet18", "DEVICE", "cpu"]
    words += ["DATALOADER.NUM_WORKERS", "0", "DATA.TRAIN", f"folder:{images}", "OUTPUT_DIR", str(tmp_path)]
    similarity.main(["random", *words])
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["protocol"]["view"] == "moco_v1" and [*results["runs"]] == ["random"]


@pytest.mark.parametrize("words", [[], ["random", "--study", "x"]])
def test_runs_or_a_study(words: list[str]):
    refused(lambda: similarity.main(words), "--study")
