"""Parameter groups of SGD, learning rate schedules and gradient clipping."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.transfer import tiny_coco
from transfer.config import load_config
from transfer.torchvision_engine.solver import build_optimizer, build_schedule, clip_gradients


def config(**keys):
    return load_config(None, [word for key, value in keys.items() for word in (f"SOLVER.{key}", str(value))])


SCHEDULES = [
    {"MAX_ITER": 90, "STEPS": "(60,80)", "WARMUP_ITERS": 10, "BASE_LR": 0.02},
    {"MAX_ITER": 5, "STEPS": "(3,50)", "WARMUP_ITERS": 100},
    {"MAX_ITER": 40, "LR_SCHEDULER_NAME": "WarmupCosineLR", "WARMUP_ITERS": 4, "BASE_LR_END": 0.0001},
]


@pytest.mark.detectron2
@pytest.mark.parametrize("keys", SCHEDULES, ids=range(len(SCHEDULES)))
def test_every_iterations_rate_is_detectron2s(keys):
    from detectron2.config import get_cfg
    from detectron2.solver import build_lr_scheduler

    cfg = config(**keys)
    theirs = get_cfg()
    theirs.SOLVER.merge_from_other_cfg(tiny_coco.strip_own_keys(cfg).SOLVER)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=cfg.SOLVER.BASE_LR)
    scheduler = build_lr_scheduler(theirs, optimizer)
    rate = build_schedule(cfg, build_optimizer(cfg, network()))
    for iteration in range(cfg.SOLVER.MAX_ITER):
        assert rate(iteration) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9), iteration
        optimizer.step()
        if iteration + 1 < cfg.SOLVER.MAX_ITER:  # Detectron2 itself fails after the last step of one of the schedules
            scheduler.step()


def network() -> Any:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Linear(4, 2))
    net[2].weight.requires_grad_(False)
    return net


@pytest.mark.detectron2
def test_a_step_equals_detectron2s():
    from detectron2.config import get_cfg
    from detectron2.solver import build_optimizer as build_theirs

    keys = {"WEIGHT_DECAY": 0.1, "BASE_LR": 0.3, "NESTEROV": True}
    torch.manual_seed(0)  # the batch norm of some networks has hardly any variance to divide by
    cfg = config(**keys)
    theirs = get_cfg()
    a = network()
    b = network()
    images = torch.randn(2, 3, 8, 8)
    theirs.SOLVER.merge_from_other_cfg(tiny_coco.strip_own_keys(cfg).SOLVER)
    b.load_state_dict(a.state_dict())
    ours = build_optimizer(cfg, a)
    their_optimizer = build_theirs(theirs, b)
    for _ in range(3):
        for net, optimizer in ((a, ours), (b, their_optimizer)):
            optimizer.zero_grad()
            net[1](net[0](images)).square().sum().backward()
            optimizer.step()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)


def test_clipping_by_value_and_by_each_parameters_norm():
    def gradients(**keys):
        parameters: list[Any] = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
        parameters[0].grad = torch.tensor([3.0, -4.0])
        parameters[1].grad = torch.tensor([0.3, 0.4])
        clip_gradients(config(**{f"CLIP_GRADIENTS.{k}": v for k, v in keys.items()}).SOLVER.CLIP_GRADIENTS, parameters)
        return [p.grad.tolist() for p in parameters]

    assert gradients() == [[1.0, -1.0], pytest.approx([0.3, 0.4])]
    norm = gradients(CLIP_TYPE="norm", CLIP_VALUE=1.0)
    assert norm == [pytest.approx([0.6, -0.8], abs=1e-5), pytest.approx([0.3, 0.4])]
