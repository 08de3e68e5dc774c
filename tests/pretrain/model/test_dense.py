"""Dense contrast against a loop over images and locations, written from the equations of DenseCL (Sec. 3.2-3.4)."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from pretrain.common import checkpoint
from pretrain.common.backbone_file import read_backbone
from pretrain.methods.jcl import jcl
from pretrain.methods.moco import moco
from pretrain.methods.sce import sce
from pretrain.model.dense import add_dense_head, matched_keys
from pretrain.model.encoder import build_backbone, feature_dim
from pretrain.steps import training_step
from tests.errors import refused
from tests.pretrain.runs import assert_same_end, run, training
from tests.pretrain.test_steps import DENSE, batch_of, config

pytestmark = pytest.mark.usefixtures("tiny_resnet18")
n, L, C, D, K, TAU = 3, 5, 6, 4, 7, 0.2


def unit(*shape: int, seed: int) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return F.normalize(values, dim=-1)


@pytest.mark.parametrize(("name", "num_keys"), [("moco", 1), ("jcl", 1), ("jcl", 3), ("sce", 1)])
def test_the_dense_loss_is_the_objective_of_each_location_and_its_match(name: str, num_keys: int):
    query, keys, queue = unit(n, L, D, seed=1).requires_grad_(), unit(num_keys, n, L, D, seed=2), unit(K, D, seed=3).T
    query_map, key_maps = unit(n, L, C, seed=4), unit(num_keys, n, L, C, seed=5)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(n):
        for s in range(L):
            q = query[i, s]
            matches = [int(torch.stack([query_map[i, s] @ key_maps[m, i, t] for t in range(L)]).argmax())
                       for m in range(num_keys)]  # fmt: skip
            k = torch.stack([keys[m, i, t] for m, t in enumerate(matches)])
            negatives = torch.stack([q @ queue[:, j] / TAU for j in range(K)])
            mean = k.mean(0)
            if name == "sce":
                target = 0.5 * torch.softmax(torch.cat([torch.zeros(1, dtype=q.dtype), k[0] @ queue]) / 0.05, 0)
                target[0] += 0.5
                total = total - (target * torch.log_softmax(torch.cat([(q @ k[0] / TAU)[None], negatives]), 0)).sum()
                continue
            covariance = (k - mean).T @ (k - mean) / num_keys if name == "jcl" else torch.zeros(D, D, dtype=q.dtype)
            positive = q @ mean / TAU + 4.0 / (2 * TAU**2) * (q @ covariance @ q)
            total = total + torch.logsumexp(torch.cat([positive[None], negatives]), 0) - q @ mean / TAU
    (expected,) = torch.autograd.grad(total / (n * L), query)

    matched = matched_keys(query_map, key_maps, keys)
    objective, hyper = {
        "moco": (moco, {}), "jcl": (jcl, {"lambda_": 4.0}),
        "sce": (sce, {"key_temperature": 0.05, "lambda_": 0.5, "mask_positive": False}),
    }[name]  # fmt: skip
    loss = objective(query.flatten(0, 1), matched.flatten(1, 2), queue, temperature=TAU, **hyper).loss
    (gradient,) = torch.autograd.grad(loss, query)
    torch.testing.assert_close(loss, total / (n * L), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def test_a_step_minimizes_the_weighted_sum_and_enqueues_the_mean_dense_keys():
    dense, plain = training(config("jcl", *DENSE)), training(config("jcl"))
    queue = dense.objective.model.dense_negatives.queue.clone()
    loss, metrics = training_step(dense, batch_of(4), 0)
    alone, _ = training_step(plain, batch_of(4), 0)
    torch.testing.assert_close(loss, 0.5 * alone + 0.5 * metrics["dense_loss"])
    after = dense.objective.model.dense_negatives.queue
    assert (after[:, 8:] == queue[:, 8:]).all() and (after[:, :8] != queue[:, :8]).all()
    assert (after[:, :8].norm(dim=0) <= 1 + 1e-5).all()
    assert dense.objective.encoder.dense[0].weight.grad.abs().sum() > 0


def test_weight_0_is_the_method_to_the_last_bit():
    dense, plain = training(config("jcl", *DENSE, "METHOD.DENSE_WARMUP_STEPS", "2")), training(config("jcl"))
    for step in range(2):
        assert training_step(dense, batch_of(4, step), step)[0] == training_step(plain, batch_of(4, step), step)[0]
    state = dense.objective.model.state_dict()
    for name, value in plain.objective.model.state_dict().items():
        assert torch.equal(state[name], value), name
    loss, metrics = training_step(dense, batch_of(4, 2), 2)
    assert loss != training_step(plain, batch_of(4, 2), 2)[0] and metrics["dense_loss"] > 0


def test_a_run_resumes_to_the_same_bits_and_its_backbone_is_read(images, tmp_path):
    run(images, tmp_path / "whole", *DENSE)
    run(images, tmp_path / "parts", *DENSE, "SOLVER.MAX_STEPS", "5")
    run(images, tmp_path / "parts", *DENSE)
    assert_same_end(tmp_path / "whole", tmp_path / "parts")
    state = checkpoint.read(tmp_path / "whole" / checkpoint.FINAL)["state_dict"]
    for name, value in read_backbone(tmp_path / "whole").state_dict.items():
        assert torch.equal(value, state[f"module.encoder_q.{name}"])


def test_dense_keys_that_nothing_reads_are_refused():
    refused(lambda: config("mocov2", "METHOD.DENSE_WARMUP_STEPS", "5"), "METHOD.DENSE_WARMUP_STEPS is 5")
    refused(lambda: config("simclr", *DENSE), "METHOD.DENSE_WEIGHT is 0.5", "simclr")


def test_a_dense_loss_that_is_not_finite_leaves_the_warm_up_alone():
    dense, plain = training(config("jcl", *DENSE, "METHOD.DENSE_WARMUP_STEPS", "2")), training(config("jcl"))
    with torch.no_grad():
        dense.objective.model.dense_negatives.queue.fill_(torch.nan)
    assert training_step(dense, batch_of(4), 0)[0] == training_step(plain, batch_of(4), 0)[0]
    assert all(parameter.isfinite().all() for parameter in dense.objective.encoder.parameters())
    assert torch.equal(dense.objective.encoder.conv1.weight, plain.objective.encoder.conv1.weight)


def test_the_dense_head_leaves_the_generators_of_gpus_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _: pytest.fail("re-seeded"))
    torch.default_generator.manual_seed(0)
    one, two = build_backbone("resnet18"), build_backbone("resnet18")
    before = torch.get_rng_state()
    for encoder in (one, two):
        add_dense_head(encoder, feature_dim(encoder), D)
    assert torch.equal(before, torch.get_rng_state()) and torch.equal(one.dense[0].weight, two.dense[0].weight)
