"""Algorithm 1 of JCL and of SCE: three steps are compared with a plain loop, written from the papers.

JCL (in MoCo's order): momentum update, keys, queries, loss, SGD, the mean keys are enqueued. SCE: keys, queries, loss,
SGD, momentum update, the keys are enqueued. Keys of all views are shuffled together; each half of a batch has its
own BN statistics.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import naive
from pretrain.config import load_config
from pretrain.data import views
from pretrain.data.loader import Batch
from pretrain.steps import training_step
from tests.pretrain.runs import build_state

pytestmark = pytest.mark.usefixtures("tiny_resnet18")

N, D, K, GROUPS, RATE, MOMENTUM, EMA, DECAY, TAU = 8, 16, 20, 2, 0.1, 0.9, 0.9, 1e-4, 0.2
COMMON = (
    f"MODEL.ARCH resnet18 MODEL.STEM cifar MODEL.HEAD_HIDDEN_DIMS [32] MODEL.EMBEDDING_DIM {D} MODEL.QUEUE_SIZE {K} "
    f"MODEL.BN_GROUPS {GROUPS} MODEL.EMA_MOMENTUM {EMA} SOLVER.IMS_PER_BATCH {N} SOLVER.BASE_LR {RATE} "
    f"SOLVER.MOMENTUM {MOMENTUM} SOLVER.WEIGHT_DECAY {DECAY} METHOD.TEMPERATURE {TAU} SOLVER.EPOCHS 2 DEVICE cpu"
)
JCL = {"METHOD.NAME": "jcl", "METHOD.NUM_KEYS": 3, "METHOD.JCL_LAMBDA": 4.0}
SCE = {"METHOD.NAME": "sce", "METHOD.KEY_TEMPERATURE": 0.05, "METHOD.SCE_LAMBDA": 0.5, "MODEL.EMA_UPDATE": "after_step"}


def _jcl_loss(q: Tensor, keys: Tensor, queue: Tensor) -> Tensor:
    return naive.jcl(q, keys, queue, temperature=TAU, lambda_=JCL["METHOD.JCL_LAMBDA"])


def _sce_loss(q: Tensor, keys: Tensor, queue: Tensor) -> Tensor:
    hyper = {"key_temperature": SCE["METHOD.KEY_TEMPERATURE"], "lambda_": SCE["METHOD.SCE_LAMBDA"]}
    return naive.sce(q, keys, queue, temperature=TAU, mask_positive=False, **hyper)


def _embed(encoder: nn.Module, images: Tensor) -> Tensor:
    """Embed the images as unit vectors; each half of the batch has its own BN statistics."""
    for module in encoder.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.groups = 1  # type: ignore[assignment]  # of this project's encoder: no groups
    return torch.cat([F.normalize(encoder(part), dim=1) for part in images.chunk(GROUPS)])


def _update(target: nn.Module, source: nn.Module) -> None:
    with torch.no_grad():
        for p, q in zip(target.parameters(), source.parameters(), strict=True):
            p.mul_(EMA).add_((1 - EMA) * q)


@pytest.mark.core
@pytest.mark.parametrize(
    ("method", "loss_fn", "atol"), [(JCL, _jcl_loss, 1e-4), (SCE, _sce_loss, 1e-3)], ids=["jcl", "sce"]
)
def test_three_steps_are_those_of_algorithm_1(method, loss_fn, atol):
    cfg = load_config(None, [*COMMON.split(), *(str(word) for item in method.items() for word in item)])
    run = build_state(cfg)
    objective: Any = run.objective
    f = copy.deepcopy(objective.model.encoder_q)
    g = copy.deepcopy(objective.model.encoder_k)
    queue = objective.model.negatives.queue.clone()
    pointer = 0
    velocities = [torch.zeros_like(p) for p in f.parameters()]
    m = method.get("METHOD.NUM_KEYS", 1)
    before_keys = "MODEL.EMA_UPDATE" not in method
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        images = torch.randint(0, 256, (1 + m, N, 3, 16, 16), generator=generator).to(torch.uint8)
        batch = Batch(images, torch.arange(N), torch.zeros(N, dtype=torch.long), {})
        loss, _ = training_step(run, batch, step)

        x = views.normalize(images, cfg.VIEWS.MEAN, cfg.VIEWS.STD)
        if before_keys:
            _update(g, f)
        order = torch.randperm(m * N, generator=torch.Generator().manual_seed(cfg.SEED * 1_000_003 + step))
        keys = torch.empty(m * N, D)
        with torch.no_grad():
            keys[order] = _embed(copy.deepcopy(g), x[1:].flatten(0, 1)[order])
        keys = keys.view(m, N, D)
        trained = copy.deepcopy(f)
        queries = _embed(trained, x[0])
        expected = loss_fn(queries, keys, queue)
        gradients = torch.autograd.grad(expected, list(trained.parameters()))
        with torch.no_grad():
            for p, velocity, gradient in zip(f.parameters(), velocities, gradients, strict=True):
                p.sub_(RATE * velocity.mul_(MOMENTUM).add_(gradient + DECAY * p))
            for key in keys.mean(0):  # first in, first out
                queue[:, pointer % K] = key
                pointer += 1
        if not before_keys:
            _update(g, f)
        torch.testing.assert_close(loss.float(), expected.detach(), rtol=0, atol=atol / 10)
        torch.testing.assert_close(objective.model.negatives.queue, queue, rtol=0, atol=atol)
        for ours, loop in ((objective.model.encoder_q, f), (objective.model.encoder_k, g)):
            for p, q in zip(ours.parameters(), loop.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=0, atol=atol)
