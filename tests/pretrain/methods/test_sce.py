"""SCE's loss is compared with the naive forms of the equation and the pseudo-code, and fulfills Proposition 1."""

import math

import pytest
import torch
from hypothesis import strategies as st

from benchmarks import naive
from pretrain.methods.moco import moco
from pretrain.methods.ressl import ressl
from pretrain.methods.sce import sce
from tests.pretrain.methods.draws import SEEDS, TEMPERATURES, assert_same_loss, drawn, queue_case

SHARES = st.floats(0.0, 1.0)


@pytest.mark.parametrize("mask_positive", [True, False])
@drawn(seed=SEEDS, tau=TEMPERATURES, tau_m=TEMPERATURES, lambda_=SHARES)
def test_loss_is_the_equation(mask_positive: bool, seed: int, tau: float, tau_m: float, lambda_: float):
    hyper = {"temperature": tau, "key_temperature": tau_m, "lambda_": lambda_, "mask_positive": mask_positive}
    assert_same_loss(sce, naive.sce, queue_case(seed), **hyper)


@drawn(seed=SEEDS, tau=TEMPERATURES, tau_m=TEMPERATURES, lambda_=SHARES)
def test_proposition_1(seed: int, tau: float, tau_m: float, lambda_: float):
    """L_SCE = lambda L_InfoNCE + (1 - lambda) (L_ReSSL + L_Ceil), with the masked form."""
    case = queue_case(seed)
    ceil = 0.0
    for i, q in enumerate(case.q_ND.detach()):
        negative = sum(math.exp(float(q @ n) / tau) for n in case.queue_DK.T)
        ceil -= math.log(negative / (math.exp(float(q @ case.keys_MND[0, i]) / tau) + negative)) / len(case.q_ND)
    info_nce = moco(*case, temperature=tau).loss.item()
    relational = ressl(*case, temperature=tau, key_temperature=tau_m).loss.item()
    whole = sce(*case, temperature=tau, key_temperature=tau_m, lambda_=lambda_, mask_positive=True).loss.item()
    assert math.isclose(whole, lambda_ * info_nce + (1 - lambda_) * (relational + ceil), rel_tol=1e-9)


def test_no_gradient_through_the_target():
    """The key's gradient is the positive logit's alone: weight (p_0 - w_0) on q / tau."""
    q, keys, queue = queue_case(1, queries=1)
    keys.requires_grad_()
    result = sce(q, keys, queue, temperature=0.1, key_temperature=0.05, lambda_=0.5, mask_positive=True)
    p = torch.cat([(q * keys[0]).sum(dim=1, keepdim=True), q @ queue], dim=1).div(0.1).softmax(dim=1)
    torch.testing.assert_close(torch.autograd.grad(result.loss, keys)[0][0], (p[0, 0] - 0.5) * q / 0.1)


def test_metrics():
    q, keys, queue = queue_case(3)
    hyper = {"temperature": 0.1, "key_temperature": 0.05, "lambda_": 0.25}
    masked = sce(q, keys, queue, mask_positive=True, **hyper)
    published = sce(q, keys, queue, mask_positive=False, **hyper)
    assert math.isclose(masked.metrics["target_positive"], 0.25)
    s = [1 / (1 + sum(math.exp(float(key @ n) / 0.05) for n in queue.T)) for key in keys[0]]
    assert math.isclose(published.metrics["target_positive"], 0.25 + 0.75 * sum(s) / 3)
