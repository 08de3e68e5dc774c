"""SupCon's loss is compared with the naive form of L_out, and with SimCLR's NT-Xent."""

import math

import torch
from torch.nn.functional import cross_entropy

from benchmarks import naive
from pretrain.methods.supcon import supcon
from tests.pretrain.methods.draws import LABELS, SEEDS, TEMPERATURES, TWO_VIEWS, assert_same_loss, batch_case, drawn
from tests.pretrain.methods.test_tcl import lemma_2


@drawn(seed=SEEDS, temperature=TEMPERATURES)
def test_loss_is_l_out(seed: int, temperature: float):
    assert_same_loss(supcon, naive.supcon, batch_case(seed, LABELS), temperature=temperature)


@drawn(seed=SEEDS, temperature=TEMPERATURES)
def test_gradient_is_lemma_1s(seed: int, temperature: float):
    """dL_i/dz_i = (sum_p z_p (P_ip - 1 / |P(i)|) + sum_n z_n P_in) / tau, of an anchor i as anchor only."""
    case = batch_case(seed, LABELS)
    gradient = torch.autograd.grad(supcon(*case, temperature=temperature).loss, case.anchors_AD)[0]
    torch.testing.assert_close(gradient, lemma_2(case, temperature, k1=0.0, k2=1.0))


@drawn(seed=SEEDS, temperature=TEMPERATURES)
def test_two_views_are_simclrs_nt_xent(seed: int, temperature: float):
    """Eq. (1) of SimCLR: cross-entropy over all others, of which the image's other view is the right one."""
    z = batch_case(seed, TWO_VIEWS).candidates_BD
    labels = torch.tensor(TWO_VIEWS)
    index = torch.arange(8)
    logits = (z @ z.T / temperature).masked_fill(torch.eye(8, dtype=torch.bool), -math.inf)
    expected = cross_entropy(logits, (index + 4) % 8)
    loss = supcon(z, z, labels, labels, index, temperature=temperature).loss
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, z), torch.autograd.grad(expected, z))
