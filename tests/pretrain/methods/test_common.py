"""What the objectives share: which results carry a gradient."""

import torch

from pretrain.methods.common import negatives


def test_the_largest_logit_carries_no_gradient():
    q_ND = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    logsumexp_N, largest_N = negatives(q_ND, torch.eye(4), 0.1)
    assert logsumexp_N.requires_grad and not largest_N.requires_grad
