"""The batch norms of the torchvision engine."""

from typing import Any

import pytest
import torch
from torchvision.ops import FrozenBatchNorm2d

from tests.counted_calls import CountedCalls
from transfer.torchvision_engine.layers import FrozenBatchNorm


def test_frozen_batch_norm_keeps_the_type_of_its_input():
    norm: Any = FrozenBatchNorm(64)
    x = torch.randn(2, 64, 3, 3)
    assert torch.allclose(norm(x), x)
    norm.weight.uniform_(0.5, 2), norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2)
    assert torch.allclose(norm(x), FrozenBatchNorm2d.forward(norm, x), atol=1e-6)
    half = norm(x.half())
    assert half.dtype == torch.float16 and torch.allclose(half.float(), norm(x), atol=0.02)


@pytest.mark.detectron2
@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_batch_norm_is_detectron2s_to_the_bit(dtype: torch.dtype, needs_gradient: bool):
    from detectron2.layers import FrozenBatchNorm2d as Detectron2Norm

    theirs: Any = Detectron2Norm(64)
    ours = FrozenBatchNorm(64)
    for name in ("weight", "bias", "running_mean", "running_var"):
        getattr(theirs, name).uniform_(0.5, 2)
    ours.load_state_dict(theirs.state_dict())
    for images in (2, 0):
        x = torch.randn(images, 64, 3, 3).to(dtype).requires_grad_(needs_gradient)
        assert torch.equal(ours(x), theirs(x))
    with CountedCalls() as counter:
        ours(torch.randn(2, 64, 3, 3))
    assert counter.calls.keys() <= {"randn", "native_batch_norm", "cudnn_batch_norm", "empty"}
