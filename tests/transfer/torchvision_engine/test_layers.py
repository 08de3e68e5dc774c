"""The batch norms of the torchvision engine."""

from typing import Any

import torch
from torchvision.ops import FrozenBatchNorm2d

from transfer.torchvision_engine.layers import FrozenBatchNorm


def test_frozen_batch_norm_keeps_the_type_of_its_input():
    norm: Any = FrozenBatchNorm(64)
    x = torch.randn(2, 64, 3, 3)
    assert torch.allclose(norm(x), x)
    norm.weight.uniform_(0.5, 2), norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2)
    assert torch.allclose(norm(x), FrozenBatchNorm2d.forward(norm, x), atol=1e-6)
    half = norm(x.half())
    assert half.dtype == torch.float16 and torch.allclose(half.float(), norm(x), atol=0.02)
