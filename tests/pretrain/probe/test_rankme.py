"""RankMe is compared with NumPy's singular values in the paper's equation, and with matrices of known rank."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from pretrain.common import distributed
from pretrain.common.interrupt import StopRequest
from pretrain.common.ranks.agreement import AgreedStop
from pretrain.probe.rankme import compute_rankme, evaluate
from tests.pretrain.ranks import call_on_ranks
from tests.pretrain.runs import build_state, lines, run
from tests.pretrain.test_steps import config

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


def draw(images: int, dims: int) -> torch.Tensor:
    return torch.randn(images, dims, generator=torch.Generator().manual_seed(0))


def compute_naively(z: np.ndarray) -> float:
    sigma = np.linalg.svd(z, compute_uv=False)
    entropy = 0.0
    for value in sigma:
        p = value / sum(sigma) + 1e-7
        entropy -= p * math.log(p)
    return math.exp(entropy)


@pytest.mark.parametrize(("images", "dims"), [(40, 7), (7, 7), (5, 12)])
def test_rankme_is_eq_1(images: int, dims: int):
    z = draw(images, dims).double() * torch.arange(1, dims + 1)
    assert compute_rankme(z) == pytest.approx(compute_naively(z.numpy()), rel=1e-4)
    assert compute_rankme(3 * z.float()) == pytest.approx(compute_rankme(z), rel=1e-4)


def test_the_rank_of_known_matrices():
    direction = draw(1, 16)
    assert compute_rankme(draw(500, 1) @ direction) == pytest.approx(1, abs=1e-3)
    assert compute_rankme(direction.expand(500, 16)) == pytest.approx(1, abs=1e-3)  # a collapsed encoder
    assert compute_rankme(torch.zeros(500, 16)) == pytest.approx(1, abs=1e-3)
    assert compute_rankme(torch.eye(16)[torch.arange(160) % 16]) == pytest.approx(16, rel=1e-4)
    assert compute_rankme(draw(20_000, 16)) == pytest.approx(16, rel=0.01)
    assert compute_rankme(draw(500, 4) @ draw(4, 16)) < 4 + 1e-3
    assert compute_rankme(torch.eye(16)[:3]) == pytest.approx(3, rel=1e-4)  # fewer images than dimensions
    assert math.isnan(compute_rankme(torch.full((4, 2), math.nan)))
    assert math.isnan(compute_rankme(torch.tensor([[1.0, math.inf]])))


def _on_ranks(folder: Path) -> None:
    z = draw(41, 7)
    values = compute_rankme(z[distributed.rank_slice(41)])
    torch.save(values, folder / f"{distributed.rank()}.pth")


def test_ranks_agree_with_one_process(tmp_path):
    call_on_ranks(_on_ranks, 3, tmp_path)
    values = [torch.load(tmp_path / f"{rank}.pth") for rank in range(3)]
    assert values == pytest.approx([compute_rankme(draw(41, 7))] * 3, rel=1e-6) and len(set(values)) == 1


def test_a_run_without_labels_reports_it_at_each_period_and_at_the_end(images, tmp_path):
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, path in enumerate(sorted((images / "train").rglob("*.png"))):
        (flat / f"{number}.png").symlink_to(path)
    results = run(flat, tmp_path / "run", "PROBE.KNN_PERIOD", "1")
    records = lines(tmp_path / "run", "rankme")
    assert [line["iteration"] for line in records] == [5, 11]
    assert results["metrics"] == {"rankme": records[-1]["rankme"], "rankme_images": 48}
    assert 1 < records[-1]["rankme"] <= 8 and "knn_top1" not in records[-1]
    assert "epoch 2: RankMe " in (tmp_path / "run/log.txt").read_text()


def test_evaluating_changes_neither_the_network_nor_its_mode(images):
    from pretrain.data import datasets

    network = build_state(config("simclr")).objective.encoder.network
    before = {name: value.clone() for name, value in network.state_dict().items()}
    data = datasets.load(f"folder:{images}", "train")
    cfg = config("simclr", "DATALOADER.NUM_WORKERS", "0", "VIEWS.IMAGE_SIZE", "16")
    cpu = torch.device("cpu")
    values = evaluate(network, data, cfg, AgreedStop(StopRequest(), cpu), cpu)
    assert values["rankme_images"] == len(data) and 1 < values["rankme"] <= 16
    assert network.training and all(torch.equal(before[name], value) for name, value in network.state_dict().items())
