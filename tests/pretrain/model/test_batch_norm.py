"""Batch norm with statistics per group: one norm, and the calls of a whole network."""

import copy
import types
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pretrain.model.batch_norm import GroupedBatchNorm, GroupedResNet
from pretrain.model.encoder import build_network
from tests.counted_calls import CountedCalls


class LoneNorm(GroupedResNet):
    """A network of a single norm."""

    def __init__(self, norm: GroupedBatchNorm) -> None:
        super().__init__(cast(Any, nn.ModuleDict({"bn1": norm})))

    def _forward_impl(self, x: Tensor) -> Tensor:
        return self.bn1(x)


@pytest.mark.parametrize("groups", [1, 3, 4])
@pytest.mark.parametrize("channels_last", [False, True])
def test_grouped_bn_is_one_bn_per_group(groups, channels_last):
    x = torch.randn(12, 4, 5, 5, dtype=torch.float64)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    bn = GroupedBatchNorm(4, groups).double()
    network = LoneNorm(bn)
    nn.init.uniform_(bn.weight)
    nn.init.uniform_(bn.bias)
    plain = [nn.BatchNorm2d(4).double() for _ in range(groups)]
    for other in plain:
        other.load_state_dict(bn.state_dict())
    parts = x.chunk(groups)
    torch.testing.assert_close(network(x), torch.cat([other(part) for other, part in zip(plain, parts, strict=True)]))
    torch.testing.assert_close(bn.running_mean, torch.stack([p.get_buffer("running_mean") for p in plain]).mean(0))
    torch.testing.assert_close(bn.running_var, torch.stack([p.get_buffer("running_var") for p in plain]).mean(0))
    assert bn.num_batches_tracked == 1
    torch.testing.assert_close(bn.eval()(x), F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias))


def normalize_naively(norm: GroupedBatchNorm, x: Tensor) -> Tensor:
    """Normalize each group with a copy of the running statistics, which become the mean over the groups."""
    mean_C = norm.get_buffer("running_mean")
    var_C = norm.get_buffer("running_var")
    means_GC = mean_C.repeat(norm.groups, 1)
    vars_GC = var_C.repeat(norm.groups, 1)
    parts = enumerate(x.chunk(norm.groups))
    options: Any = (norm.weight, norm.bias, True, norm.momentum, norm.eps)
    y = torch.cat([F.batch_norm(part, means_GC[g], vars_GC[g], *options) for g, part in parts])
    with torch.no_grad():
        mean_C.copy_(means_GC.mean(0))
        var_C.copy_(vars_GC.mean(0))
        norm.get_buffer("num_batches_tracked").add_(1)
    return y


@pytest.mark.parametrize("groups", [2, 8])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_network_equals_its_norms_one_by_one_in_a_fraction_of_the_calls(groups, dense, dtype):
    options: Any = {"hidden_dims": [32], "head_bn": True, "dim": 16, "bn_groups": groups, "dense": dense}
    network: Any = build_network("resnet18", "imagenet", **options).to(memory_format=torch.channels_last)
    naive = copy.deepcopy(network)
    for norm in naive.norms:
        norm.forward = types.MethodType(normalize_naively, norm)
    naive.norms = []
    calls = {}
    for seed in range(2):
        images = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
        for each in (network, naive):
            with CountedCalls() as counter, torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
                output = each(images)
                (output[0] if dense else output).float().square().sum().backward()
            calls[each is naive] = counter.calls
    for name, value in network.state_dict().items():
        assert torch.equal(value, naive.state_dict()[name]), name
    for parameter, expected in zip(network.parameters(), naive.parameters(), strict=True):
        assert parameter.grad is expected.grad or torch.equal(parameter.grad, expected.grad)
    norms = len(network.norms)
    ours = calls[False]
    naives = calls[True]
    assert norms == 21 and naives["repeat"] == naives["copy_"] == 2 * norms and naives["select"] == 2 * groups * norms
    assert ours["repeat"] == ours["_foreach_copy_"] == ours["_foreach_add_"] == 1 and ours["copy_"] == 0
    assert naives["mean"] - ours["mean"] == 2 * norms - 1
    assert naives["add"] - ours["add"] == 2 * (groups - 1) * norms  # gradients of weights and biases
    assert ours["sum"] - naives["sum"] == 2 * norms
