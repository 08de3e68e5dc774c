"""Dense contrast is compared with a loop over images and locations, from DenseCL's equations (Sec. 3.2-3.4)."""

import functools
import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from pretrain.common.weights.backbone import read_backbone
from pretrain.methods import METHODS, LossOutput
from pretrain.model.dense import DenseFeatures, DenseResNet, mix_dense_loss
from pretrain.model.encoder import build_backbone, count_channels
from pretrain.steps import training_step
from tests.pretrain.runs import build_state
from tests.pretrain.test_steps import DENSE, batch_of, config

pytestmark = pytest.mark.usefixtures("tiny_resnet18")
n, L, C, D, K = 3, 5, 6, 4, 7


def unit(*shape: int, seed: int) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return F.normalize(values, dim=-1)


@pytest.mark.parametrize(("name", "num_keys"), [("mocov2", 1), ("jcl", 3), ("sce", 1)])
def test_the_dense_loss_is_the_objective_of_each_location_and_its_match(name: str, num_keys: int):
    query = unit(n, L, D, seed=1).requires_grad_()
    keys = unit(num_keys, n, L, D, seed=2)
    queue = unit(K, D, seed=3).T
    query_map = unit(n, L, C, seed=4)
    key_maps = unit(num_keys, n, L, C, seed=5)
    hyper = {"temperature": 0.2, "lambda_": 0.5, "key_temperature": 0.05, "mask_positive": False}
    objective = METHODS[name].load_function()
    keywords = METHODS[name].hyper.keys() & hyper.keys()
    method = functools.partial(objective, **{keyword: hyper[keyword] for keyword in keywords})
    total = torch.zeros((), dtype=torch.float64)
    for i, s in itertools.product(range(n), range(L)):
        similarity_ML = [[float(query_map[i, s] @ key_maps[m, i, t]) for t in range(L)] for m in range(num_keys)]
        matches = [row.index(max(row)) for row in similarity_ML]
        matched_MD = torch.stack([keys[m, i, t] for m, t in enumerate(matches)])
        total = total + method(query[i, s][None], matched_MD[:, None], queue).loss / (n * L)

    images = LossOutput(torch.tensor(3.0, dtype=torch.float64), None, {})
    queries = DenseFeatures(query, query[:, 0], query_map)
    of_keys = DenseFeatures(keys, keys[:, :, 0], key_maps)
    result = mix_dense_loss(images, method, queries, of_keys, queue, 0.25)
    torch.testing.assert_close(result.loss, 0.75 * 3 + 0.25 * total)
    torch.testing.assert_close(torch.autograd.grad(result.loss, query), torch.autograd.grad(0.25 * total, query))


def test_a_step_minimizes_the_weighted_sum_and_enqueues_the_mean_dense_keys():
    dense = build_state(config("jcl", *DENSE))
    plain = build_state(config("jcl"))
    objective: Any = dense.objective
    queue = objective.model.dense_negatives.queue.clone()
    loss, metrics = training_step(dense, batch_of(4), 0)
    alone, _ = training_step(plain, batch_of(4), 0)
    torch.testing.assert_close(loss, 0.5 * alone + 0.5 * metrics["dense_loss"])
    after = objective.model.dense_negatives.queue
    assert (after[:, 8:] == queue[:, 8:]).all() and (after[:, :8] != queue[:, :8]).all()
    assert (after[:, :8].norm(dim=0) <= 1 + 1e-5).all()
    assert objective.encoder.network.dense[0].weight.grad.abs().sum() > 0


def test_weight_0_is_the_method_to_the_last_bit_even_where_the_dense_loss_is_not_finite():
    dense = build_state(config("jcl", *DENSE, "METHOD.DENSE_WARMUP_STEPS", "2"))
    plain = build_state(config("jcl"))
    objective: Any = dense.objective
    with torch.no_grad():
        objective.model.dense_negatives.queue.fill_(torch.nan)
    for step in range(2):
        assert training_step(dense, batch_of(4, step), step)[0] == training_step(plain, batch_of(4, step), step)[0]
    state = dense.objective.model.state_dict()
    for name, value in plain.objective.model.state_dict().items():
        assert torch.equal(state[name], value), name
    assert all(parameter.isfinite().all() for parameter in dense.objective.encoder.network.parameters())


def test_a_checkpoint_resumes_and_its_backbone_is_read(tmp_path):
    cfg = config("jcl", *DENSE)
    saved = build_state(cfg).state_dict()
    build_state(cfg).load_state_dict(saved)  # refuses unless every tensor is there
    state = saved["state_dict"]
    torch.save(saved, tmp_path / "dense.pth")
    for name, value in read_backbone(tmp_path / "dense.pth").state_dict.items():
        assert torch.equal(value, state[f"module.encoder_q.{name}"])
    # MoCo's linear probe loads these without strict, and stops unless fc alone is missing.
    names = [name.removeprefix("module.encoder_q.") for name in state if name.startswith("module.encoder_q.")]
    of_moco = {name: state[f"module.encoder_q.{name}"] for name in names if not name.startswith("fc.")}
    encoder = build_backbone("resnet18", "cifar")
    encoder.fc = torch.nn.Linear(count_channels(encoder), 10)
    mismatch = encoder.load_state_dict(of_moco, strict=False)
    assert set(mismatch.missing_keys) == {"fc.weight", "fc.bias"}
    assert mismatch.unexpected_keys and all(name.startswith("dense.") for name in mismatch.unexpected_keys)


def test_the_dense_head_leaves_the_generators_of_gpus_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _: pytest.fail("re-seeded"))
    torch.default_generator.manual_seed(0)
    first: Any = build_backbone("resnet18")
    second: Any = build_backbone("resnet18")
    before = torch.get_rng_state()
    heads: list[Any] = [DenseResNet(encoder, count_channels(encoder), D).dense for encoder in (first, second)]
    assert torch.equal(before, torch.get_rng_state()) and torch.equal(heads[0][0].weight, heads[1][0].weight)
