import math

import pytest
import torch

from pretrain.probe.features import Features
from pretrain.probe.knn import classify, vote


def test_vote_equals_the_sum_over_neighbours():
    """Wu et al. 2018, Sec. 3.4, as loops."""
    torch.manual_seed(0)
    similarity, labels, k, tau, classes = torch.rand(5, 20) * 2 - 1, torch.randint(0, 4, (20,)), 7, 0.07, 4
    got = vote(similarity.double(), labels, k, tau, classes)
    for q in range(5):
        nearest = sorted(range(20), key=lambda t: -similarity[q, t].item())[:k]
        naive = [0.0] * classes
        for t in nearest:
            naive[labels[t]] += math.exp(similarity[q, t].item() / tau)
        total = sum(naive)
        assert (got[q] / got[q].sum()).tolist() == pytest.approx([n / total for n in naive], rel=1e-6)


def test_classify_counts_top1_and_top5():
    bank = Features(torch.eye(6), torch.arange(6), 6)
    queries = Features(torch.eye(6) * 3, torch.tensor([0, 1, 2, 3, 4, 0]), 6)
    got = classify(bank, queries, k=1, temperature=0.01)
    assert got["top1"] == pytest.approx(100 * 5 / 6) and got["train_images"] == 6
    assert classify(bank, queries, k=200, temperature=0.01)["top1"] == got["top1"]
