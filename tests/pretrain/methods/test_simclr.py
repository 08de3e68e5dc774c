"""SimCLR's loss against a loop over NT-Xent."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import cross_entropy

from pretrain.methods.simclr import simclr
from tests.pretrain.methods.draws import SEEDS, TEMPERATURES, TWO_VIEWS, BatchCase, batch_case, drawn


def oracle(case: BatchCase, temperature: float) -> float:
    z = case.candidates_BD.detach()
    images = len(z) // 2
    total = 0.0
    for i in range(2 * images):
        partner = (i + images) % (2 * images)
        everything = sum(math.exp(float(z[i] @ z[a]) / temperature) for a in range(2 * images) if a != i)
        total -= math.log(math.exp(float(z[i] @ z[partner]) / temperature) / everything)
    return total / (2 * images)


@drawn(seed=SEEDS, temperature=TEMPERATURES)
def test_loss_is_nt_xent(seed: int, temperature: float):
    case = batch_case(seed, TWO_VIEWS)
    assert math.isclose(simclr(*case, temperature=temperature).loss.item(), oracle(case, temperature), rel_tol=1e-9)


@drawn(seed=SEEDS, temperature=TEMPERATURES)
def test_gradient_is_that_of_cross_entropy_without_the_diagonal(seed: int, temperature: float):
    z = batch_case(seed, TWO_VIEWS).candidates_BD
    labels, index = torch.tensor(TWO_VIEWS), torch.arange(8)
    logits = (z @ z.T / temperature).masked_fill(torch.eye(8, dtype=torch.bool), -math.inf)
    expected = cross_entropy(logits, (index + 4) % 8)
    loss = simclr(z, z, labels, labels, index, temperature=temperature).loss
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, z), torch.autograd.grad(expected, z))
