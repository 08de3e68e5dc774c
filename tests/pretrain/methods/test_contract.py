"""Every objective in METHODS has the same interface and checks, and stays finite in half precision."""

import inspect
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from pretrain.common.config.yaml_io import get
from pretrain.config import default_config
from pretrain.methods import METHODS, LossOutput, ops
from tests.errors import refused
from tests.pretrain.methods.draws import LABELS, SEEDS, TWO_VIEWS, batch_case, drawn, queue_case, unit

ALL = sorted(METHODS)
ORDINARY = {"temperature": 0.2, "key_temperature": 0.05, "lambda_": 0.5, "mask_positive": True, "k1": 1.0, "k2": 1.0}
EXTREME = {**ORDINARY, "temperature": 0.01, "key_temperature": 0.01, "k1": 10_000.0}


def call(name: str, inputs: tuple[Tensor, ...], values: dict[str, Any]) -> LossOutput:
    method = METHODS[name]
    return method.load_function()(
        *inputs, **{keyword: values[keyword] for keyword in method.hyper if keyword in values}
    )


def inputs_for(name: str) -> tuple[Tensor, ...]:
    method = METHODS[name]
    if method.kind == "batch":
        return batch_case(0, TWO_VIEWS if name == "simclr" else LABELS)
    return queue_case(0, keys=3 if method.many_keys else 1)


@pytest.mark.parametrize("name", ALL)
def test_every_hyperparameter_is_keyword_only_without_default_and_fed_by_a_config_key(name: str):
    method = METHODS[name]
    cfg = default_config()
    parameters = inspect.signature(method.load_function()).parameters.values()
    keywords = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert all(p.default is inspect.Parameter.empty for p in keywords)
    hyper = {keyword: get(cfg, hyperparameter.name) for keyword, hyperparameter in method.hyper.items()}
    assert None not in hyper.values()
    assert {p.name for p in keywords} == set(method.schedule(0, 2, hyper) if method.schedule else hyper)


@pytest.mark.parametrize("name", ALL)
def test_result_has_a_scalar_loss_detached_metrics_and_the_mean_keys_to_enqueue(name: str):
    """Nothing is read back from the device on the way."""
    inputs = inputs_for(name)
    result = call(name, inputs, ORDINARY)
    assert result.loss.shape == () and result.loss.requires_grad
    assert result.metrics
    assert all(m.shape == () and not m.requires_grad and m.is_floating_point() for m in result.metrics.values())
    if METHODS[name].kind == "batch":
        assert result.enqueue_ND is None
    else:
        assert result.enqueue_ND is not None and not result.enqueue_ND.requires_grad
        assert torch.equal(result.enqueue_ND, inputs[1].mean(dim=0))  # not renormalized
    # Tensors on the meta device have no values, so reading one raises.
    unread = call(name, tuple(x.detach().to("meta") for x in inputs), ORDINARY)
    assert unread.loss.is_meta and all(m.is_meta for m in unread.metrics.values())


@pytest.mark.parametrize("name", ALL)
def test_gradcheck(name: str):
    """Check gradients of the queries, or of anchors and candidates; keys have one only if they are not targets."""
    inputs = inputs_for(name)
    differentiable = 1 if name in ("sce", "ressl") else 2
    leaves = tuple(x.detach().requires_grad_() for x in inputs[:differentiable])
    assert torch.autograd.gradcheck(lambda *xs: call(name, (*xs, *inputs[differentiable:]), ORDINARY).loss, leaves)


def extreme_inputs(name: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Build aligned, opposite, identical and random embeddings, so that similarities of 1, -1 and 0 all occur."""
    generator = torch.Generator().manual_seed(0)
    axis = torch.eye(8, dtype=torch.float64)[0]
    many = 3 if METHODS[name].many_keys else 1
    q_ND = torch.stack([axis, -axis, axis, *unit(generator, 3, 8)])
    if METHODS[name].kind == "batch":
        candidates = torch.cat([q_ND, normalize(q_ND + 0.1 * unit(generator, 6, 8), dim=1)]).to(dtype)
        labels = torch.arange(6).repeat(2)
        return candidates[:6].clone().requires_grad_(), candidates, labels[:6], labels, torch.arange(6)
    keys_MND = torch.stack([q_ND * (-1) ** m for m in range(many)])  # variance as large as it can be
    queue_DK = torch.cat([axis[:, None], -axis[:, None], unit(generator, 8, 20, dim=0)], dim=1)
    return q_ND.to(dtype).requires_grad_(), keys_MND.to(dtype), queue_DK.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ALL)
def test_no_overflow_and_the_value_of_float64(name: str, dtype: torch.dtype):
    inputs = extreme_inputs(name, dtype)
    result = call(name, inputs, EXTREME)
    exact = [x.detach().double() if x.is_floating_point() else x for x in inputs]
    exact[0].requires_grad_()
    expected = call(name, tuple(exact), EXTREME)
    assert result.loss.dtype == torch.float32
    torch.testing.assert_close(result.loss.double(), expected.loss, rtol=1e-5, atol=1e-5)
    gradient = torch.autograd.grad(result.loss, inputs[0])[0]
    assert gradient.isfinite().all()
    exact_gradient = torch.autograd.grad(expected.loss, exact[0])[0]
    scale = 1 / (EXTREME["temperature"] * len(inputs[0]))  # a logit's gradient is at most this
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-4}[dtype]  # the type of the gradient
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=tolerance, atol=tolerance * scale)
    assert all(m.isfinite() for m in result.metrics.values())


def test_the_largest_logit_carries_no_gradient():
    logsumexp_N, largest_N = ops.queue_logsumexp(torch.ones(3, 4).requires_grad_(), torch.eye(4), 0.1)
    assert logsumexp_N.requires_grad and not largest_N.requires_grad


def test_a_loss_near_0_keeps_its_digits():
    loss = ops.info_nce(torch.tensor(30.0), torch.tensor(0.0))
    assert math.isclose(loss.item(), math.exp(-30.0), rel_tol=1e-5)


@drawn(examples=10, seed=SEEDS)
def test_slices_of_the_queue_add_up_to_the_whole(seed: int):
    assert torch.get_num_threads() == 1  # with more threads, slices are larger
    q, _, queue = queue_case(seed, queries=1024, negatives=600)  # slices of 256, 256 and 88
    scaled = q.detach() / 0.05
    logits = scaled @ queue
    softmax = ops.queue_softmax(scaled, queue)
    torch.testing.assert_close(softmax.logsumexp_N, logits.logsumexp(dim=1))
    torch.testing.assert_close(softmax.largest_N, logits.amax(dim=1))
    torch.testing.assert_close(softmax.mean_ND, logits.softmax(dim=1) @ queue.T)


BAD_VALUES = {"temperature": (0.0, math.nan, math.inf), "key_temperature": (0.0,), "lambda_": (-0.1, math.nan)}
BAD_VALUES |= dict.fromkeys(["k1", "k2"], (-1.0,))


@pytest.mark.parametrize("name", ALL)
def test_a_value_out_of_range_is_named_with_its_limit(name: str):
    for keyword in BAD_VALUES.keys() & METHODS[name].hyper.keys():
        for value in BAD_VALUES[keyword]:
            changed = {**ORDINARY, keyword: value}
            refused(lambda values=changed: call(name, inputs_for(name), values), f"{keyword.rstrip('_')} is {value}")


def test_sce_takes_lambda_up_to_1_and_jcl_above():
    refused(lambda: call("sce", inputs_for("sce"), {**ORDINARY, "lambda_": 1.5}), "lambda is 1.5", "at most 1")
    assert call("jcl", inputs_for("jcl"), {**ORDINARY, "lambda_": 1.5}).loss.isfinite()


@pytest.mark.parametrize("name", ALL)
def test_shapes_that_disagree_raise(name: str):
    inputs = tuple(x.detach() for x in inputs_for(name))
    if METHODS[name].kind == "queue":
        q, keys, queue = inputs
        wrong = [(q, keys[:0], queue), (q, keys, queue[:, :0]), (q[:0], keys[:, :0], queue)]  # none
        wrong += [(q, keys[0], queue), (q, keys[:, :2], queue), (q, keys, queue[:4]), (q, keys, queue.T)]
        wrong += [] if METHODS[name].many_keys else [(q, torch.cat([keys, keys]), queue)]
    else:
        a, c, la, lc, index = inputs
        changes = [(0, a[:, :4]), (0, a[0]), (2, la[:-1]), (3, lc[:-1]), (4, index[:-1])]
        wrong = [(*inputs[:i], changed, *inputs[i + 1 :]) for i, changed in changes]
        wrong += [(a[:0], c, la[:0], lc, index[:0]), (a, c[:0], la, lc[:0], index)]  # none
    for changed in wrong:
        with pytest.raises(ValueError, match=r"queue are|candidates, their"):
            call(name, changed, ORDINARY)


def test_a_gpu_gets_larger_slices_of_the_queue():
    """Dense contrast has 3,136 queries of 64 images: 13 slices of 65,536 negatives instead of 98."""
    sizes = {}
    for device in ("meta", "cpu"):
        with mock.patch.object(torch.Tensor, "split", autospec=True, return_value=()) as split:
            ops.queue_softmax(torch.ones(3136, 1, device=device), torch.ones(1, 65536, device=device))
        sizes[device] = split.call_args.args[1]
    assert sizes["meta"] == 2**24 // 3136 > sizes["cpu"]
