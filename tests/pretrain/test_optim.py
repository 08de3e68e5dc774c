"""Optimizers: a gradient scaler may skip the first step, and LARS follows its equation."""

import pytest
import torch
from torch import nn

from pretrain.config import load_config
from pretrain.optim import build_optimizer


def _solver(*overrides: str):
    return load_config(None, overrides).SOLVER


def _model() -> nn.Linear:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0, 2.0], [0.5, 0.0, 4.0]]))
        model.bias.copy_(torch.tensor([1.0, -1.0]))
    return model


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_that_the_scaler_skips_leaves_no_trace(optimizer):
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]  # unknown to type checkers
    torch.use_deterministic_algorithms(True)  # uninitialized memory is filled with NaN
    try:
        results = []
        for skip_first in (False, True):
            model = _model()
            steps = build_optimizer(model, _solver("SOLVER.OPTIMIZER", optimizer, "SOLVER.BASE_LR", "0.1"))
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            for factor in [float("inf"), 1.0, 2.0] if skip_first else [1.0, 2.0]:
                steps.zero_grad()
                scaler.scale(model(torch.ones(1, 3)).sum() * factor).backward()
                scaler.step(steps)
                scaler.update()
            results.append([p.detach().clone() for p in model.parameters()])
        for first, second in zip(*results, strict=True):
            assert first.isfinite().all() and torch.equal(first, second)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("decay", [0.01, 0.0])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("trust", [0.02, 0.5])  # below the learning rate, and above it
def test_lars_scales_weights_by_their_norm_and_leaves_biases_alone(trust, clip, decay):
    """A layer's rate is the learning rate times the trust ratio (You et al. 2017); LARS_CLIP caps it (LARC)."""
    model = _model()
    lr = 0.4
    weight = model.weight.detach().clone()
    bias = model.bias.detach().clone()
    words = f"SOLVER.OPTIMIZER lars SOLVER.BASE_LR {lr} SOLVER.WEIGHT_DECAY {decay} SOLVER.LARS_TRUST {trust}"
    lars = build_optimizer(model, _solver(*words.split(), "SOLVER.LARS_CLIP", str(clip)))
    gradient = torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]]) / 10
    model.weight.grad = gradient.clone()
    model.bias.grad = torch.ones(2)
    lars.step()
    ratio = trust * weight.norm() / (gradient.norm() + decay * weight.norm())
    rate = min(ratio, lr) if clip else lr * ratio
    torch.testing.assert_close(model.weight.detach(), weight - rate * (gradient + decay * weight))
    torch.testing.assert_close(model.bias.detach(), bias - lr)
