import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pretrain.model.encoder import GroupedBatchNorm, build_backbone, build_network, pool_features


@pytest.mark.parametrize(("hidden", "layers"), [([], ["fc"]), ([32], ["fc.0", "fc.2"])])
def test_head_has_mocos_names(hidden, layers):
    encoder = build_network("resnet18", "imagenet", hidden_dims=hidden, head_bn=False, dim=16)
    head = [f"{layer}.{name}" for layer in layers for name in ("weight", "bias")]
    assert [name for name in encoder.state_dict() if name.startswith("fc")] == head
    assert encoder(torch.zeros(2, 3, 32, 32)).shape == (2, 16)


def test_cifar_stem_keeps_the_resolution():
    backbone = build_backbone("resnet18", "cifar")
    seen = {}
    backbone.layer1.register_forward_pre_hook(lambda _, args: seen.update(shape=args[0].shape))
    assert backbone(torch.zeros(2, 3, 32, 32)).shape == (2, 512)
    assert seen["shape"] == (2, 64, 32, 32)


def test_pooled_features_are_the_backbones_output():
    backbone = build_backbone("resnet18").eval()
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(pool_features(backbone, images), backbone(images))


@pytest.mark.parametrize("groups", [1, 3, 4])
@pytest.mark.parametrize("channels_last", [False, True])
def test_grouped_bn_is_one_bn_per_group(groups, channels_last):
    x = torch.randn(12, 4, 5, 5, dtype=torch.float64)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    bn = GroupedBatchNorm(4, groups).double()
    nn.init.uniform_(bn.weight)
    nn.init.uniform_(bn.bias)
    plain = [nn.BatchNorm2d(4).double() for _ in range(groups)]
    for other in plain:
        other.load_state_dict(bn.state_dict())
    parts = x.chunk(groups)
    torch.testing.assert_close(bn(x), torch.cat([other(part) for other, part in zip(plain, parts, strict=True)]))
    torch.testing.assert_close(bn.running_mean, torch.stack([p.get_buffer("running_mean") for p in plain]).mean(0))
    torch.testing.assert_close(bn.running_var, torch.stack([p.get_buffer("running_var") for p in plain]).mean(0))
    assert bn.num_batches_tracked == 1
    torch.testing.assert_close(bn.eval()(x), F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias))
