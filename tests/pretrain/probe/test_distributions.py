import csv

import numpy as np
import pytest
import torch

from pretrain.common.errors import UserError
from pretrain.config import load_config
from pretrain.model.encoder import build_backbone, build_head
from pretrain.probe import distributions
from pretrain.probe.features import load_frozen

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


def test_spread_equals_all_pairs_and_the_explicit_covariance():
    torch.manual_seed(0)
    features = torch.randn(3, 7, 5, dtype=torch.float32)
    similarity, variance = distributions.spread(features)
    for b in range(3):
        u = features[b] / features[b].norm(dim=1, keepdim=True)
        pairs = [float(u[i] @ u[j]) for i in range(7) for j in range(7)]
        assert similarity[b].item() == pytest.approx(np.mean(pairs), rel=1e-5)
        assert variance[b].item() == pytest.approx(np.cov(u.T.numpy(), bias=True).diagonal().mean(), rel=1e-5)


def test_two_runs_in_one_picture_and_one_table(images, tmp_path):
    cfg = load_config(None, [
        "MODEL.ARCH", "resnet18", "PROBE.CROP", "none", "DATA.TRAIN", f"folder:{images}", "VIEWS.IMAGE_SIZE", "16",
        "DATALOADER.NUM_WORKERS", "0", "DEVICE", "cpu", "OUTPUT_DIR", str(tmp_path),
    ])  # fmt: skip
    results = distributions.main(cfg, {"one": "random", "same": "random"}, images=32, augmentations=4)
    rows = list(csv.DictReader((tmp_path / "distributions.csv").open()))
    assert len(rows) == 64 and results["images"] == 32
    ones, sames = ([r["similarity"] for r in rows if r["run"] == name] for name in ("one", "same"))
    assert ones == sames
    assert results["runs"]["one"]["similarity_mean"] == pytest.approx(np.mean([float(s) for s in ones]), rel=1e-5)
    assert results["protocol"]["space"] == "features" and float(rows[0]["variance"]) < 1 / 512
    assert (tmp_path / "distributions.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("head", [{"hidden_dims": [], "batch_norm": False}, {"hidden_dims": [12], "batch_norm": True}])
def test_the_embedding_is_the_outcome_of_the_head(images, tmp_path, head):
    torch.manual_seed(0)
    encoder = build_backbone("resnet18", "cifar")
    encoder.fc = build_head(64, head["hidden_dims"], 6, head["batch_norm"])
    state = {f"module.encoder_q.{name}": tensor for name, tensor in encoder.state_dict().items()}
    torch.save({"state_dict": state, "arch": "resnet18"}, tmp_path / "run.pth")
    cfg = load_config(None, ["PROBE.SPACE", "embedding", "DEVICE", "cpu"])
    loaded, _ = load_frozen(tmp_path / "run.pth", cfg, torch.device("cpu"), with_head=True)
    x = torch.randn(3, 3, 16, 16)
    assert torch.equal(loaded(x), encoder.eval()(x)) and loaded(x).shape == (3, 6)


def test_a_file_without_a_head_is_refused(images, tmp_path):
    torch.save(build_backbone("resnet18", "cifar").state_dict(), tmp_path / "backbone.pth")
    cfg = load_config(None, [
        "DATA.TRAIN", f"folder:{images}", "PROBE.SPACE", "embedding", "DEVICE", "cpu", "OUTPUT_DIR", str(tmp_path),
    ])  # fmt: skip
    with pytest.raises(UserError, match=r"backbone.pth: there is no projection head in it; compare features instead"):
        distributions.main(cfg, {"one": str(tmp_path / "backbone.pth")}, images=16, augmentations=2)
