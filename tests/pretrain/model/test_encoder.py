import pytest
import torch

from pretrain.model.encoder import build_backbone, build_network, pool_features


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
