"""What both engines need to run on several ranks; tests/transfer/test_two_ranks.py runs the rest on two."""

from __future__ import annotations

import pytest
import torch

from transfer import distributed


def test_batch_norm_is_pooled_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_other_rank(moments: torch.Tensor) -> None:  # mean 3, variance 2 there
        moments += torch.tensor([[3.0], [2.0 + 9.0]])

    monkeypatch.setattr(distributed.dist, "all_reduce", add_other_rank)
    monkeypatch.setattr(distributed.dist, "get_world_size", lambda: 2)
    norm = torch.nn.BatchNorm2d(3)
    norm.running_mean.fill_(1.0)
    norm.running_var.fill_(4.0)
    distributed.pool_batch_norm([norm])
    assert torch.allclose(norm.running_mean, torch.full((3,), 2.0))
    assert torch.allclose(norm.running_var, torch.full((3,), 3.0 + 1.0))  # mean of variances, variance of means
