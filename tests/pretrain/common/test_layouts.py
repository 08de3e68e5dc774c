"""Of every project's file, exactly the ResNet that is meant is read; without one, or with several, it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pretrain.common.weights.backbone import extract_backbone, read_backbone
from pretrain.common.weights.file import read_weights_file
from tests.errors import refused
from tests.pretrain.common.layouts import HEAD, LAYOUTS, cifar, heads, lightning, resnet, sequential, under

pytestmark = pytest.mark.usefixtures("tiny_resnet18")
ONE = torch.ones(1)


def value(state: dict[str, torch.Tensor]) -> float:
    """The one value that all of its tensors have."""
    values = {float(number) for tensor in state.values() for number in (tensor.min(), tensor.max())}
    assert len(values) == 1
    return values.pop()


@pytest.mark.parametrize("project", LAYOUTS)
def test_exactly_the_backbone_is_read(project: str, tmp_path: Path) -> None:
    torch.save(LAYOUTS[project](), path := tmp_path / "weights.pth")
    file = read_weights_file(path)
    backbone = extract_backbone(file)
    assert backbone.state_dict.keys() == resnet(arch=backbone.arch).keys() and value(backbone.state_dict) == 1
    if any((tensor == 2).all() for tensor in file.tensors.values()):
        assert backbone.provenance["encoder"] == "query"
        assert value(extract_backbone(file, "key").state_dict) == 2
    else:
        refused(lambda: extract_backbone(file, "key"), path, "key")


SEVERAL: dict[str, Callable[[], Any]] = {
    "two networks": lambda: {"image": resnet(), "audio": resnet(2)},
    "the network and another inside": lambda: resnet() | under("backbone.", resnet(2)),
    "average, timm": lambda: {"state_dict": resnet(), "state_dict_ema": resnet(2)},
    "average, torchvision": lambda: {"model": resnet(),
                                     "model_ema": {"n_averaged": ONE, **under("module.", resnet(2))}},
    "average, mmengine": lambda: {"state_dict": under("backbone.", resnet()),
                                  "ema_state_dict": under("module.backbone.", resnet(2))},
    "average of a pair": lambda: {"state_dict": under("encoder_q.", resnet()), "ema": under("encoder_q.", resnet(2))},
}  # fmt: skip


@pytest.mark.parametrize("kind", SEVERAL)
def test_one_of_several_networks_is_chosen_by_its_prefix(kind: str, tmp_path: Path) -> None:
    torch.save(SEVERAL[kind](), path := tmp_path / "several.pth")
    text = refused(lambda: read_backbone(path), path, "--prefix", "(resnet18)", "convert_to_d2.py")
    assert ("average" in text) == kind.startswith("average")
    file = read_weights_file(path)
    prefixes = [word.strip(",;: ") for word in text.partition("ResNets")[2].split(" (resnet18)")[:-1]]
    prefixes = [prefix.split()[-1] for prefix in prefixes]
    assert sorted(value(extract_backbone(file, prefix=prefix).state_dict) for prefix in prefixes) == [1, 2]
    refused(lambda: extract_backbone(file, prefix="elsewhere"), "elsewhere", *prefixes)


def test_a_prefix_may_name_a_part_of_the_path(tmp_path: Path) -> None:
    content = {"model": {**under("module.net.encoder_q.", resnet(1)), **under("module.net.encoder_k.", resnet(2))},
               "best": {**under("net.encoder_q.", resnet(3)), **under("net.encoder_k.", resnet(4))}}  # fmt: skip
    torch.save(content, tmp_path / "w.pth")
    file = read_weights_file(tmp_path / "w.pth")
    for prefix, encoder, number in (("best", "query", 3), ("best.net.", "key", 4), ("model.module.net", "query", 1),
                                    ("model.net.encoder_k", "query", 2)):  # fmt: skip
        assert value(extract_backbone(file, encoder, prefix).state_dict) == number


CHOSEN: dict[str, Callable[[], Any]] = {
    "equal copies are one": lambda: {"model": resnet(), "model_ema": resnet(), "best": resnet()},
    "the only one is a key": lambda: {"teacher": resnet()},
    "next to a student, an average is its teacher": lambda: {"student": resnet(), "ema": resnet(2)},
    "next to a base encoder, too": lambda: {"base_encoder": resnet(), "ema_encoder": resnet(2)},
    "camel case": lambda: under("encoderQ.", resnet()) | under("momentumEncoder.", resnet(2)),
    "the other is incomplete": lambda: {"image": resnet(), "audio": resnet(2, "resnet34", norm_layer=nn.Identity)},
    "the other is a ResNet-152": lambda: {"a": resnet(), "b": resnet(2, "resnet152")},
    "a learned head of convolutions": lambda: resnet() | heads("deconv_layers.0.weight", "attnpool.k_proj.weight"),
    "an optimizer that names tensors": lambda: {"model": resnet(), "optimizer": under("state.", resnet(2))},
}


@pytest.mark.parametrize("kind", CHOSEN)
def test_what_decides_between_networks(kind: str, tmp_path: Path) -> None:
    torch.save(CHOSEN[kind](), tmp_path / "w.pth")
    assert value(read_backbone(tmp_path / "w.pth").state_dict) == 1


def test_a_damaged_query_is_not_replaced_by_the_key(tmp_path: Path) -> None:
    for name in ("layer3.0.bn1.running_var", "conv1.weight", "layer1.0.conv1.weight"):
        query = resnet()
        del query[name]
        torch.save(under("encoder_q.", query) | under("encoder_k.", resnet(2)), tmp_path / "w.pth")
        refused(lambda: read_backbone(tmp_path / "w.pth"), f"lacks {name}")


def rename(state: dict[str, Any], **names: str) -> dict[str, Any]:
    return {
        names.get(name.split(".")[0], name.split(".")[0]) + "." + name.partition(".")[2]: t for name, t in state.items()
    }


REFUSED: dict[str, Callable[[], tuple[Any, tuple[str, ...]]]] = {
    "vision transformer": lambda: (heads("cls_token", "blocks.0.attn.qkv.weight"), ("no ResNet", "transformer")),
    "ResNeXt": lambda: (resnet(arch="resnext50_32x4d"), ("ResNeXt", "(128, 64, 1, 1)")),
    "wide ResNet": lambda: (resnet(arch="wide_resnet50_2"), ("wide ResNet",)),
    "ResNet-152": lambda: (resnet(arch="resnet152"), ("ResNet-152", "(3, 8, 36, 3)")),
    "four channels": lambda: (resnet() | {"conv1.weight": ONE.expand(8, 4, 7, 7)}, ("(8, 4, 7, 7)", "RGB")),
    "group normalization": lambda: (
        {name: t for name, t in resnet().items() if "running" not in name}, ("lacks bn1.running_mean",)),
    "deep stem": lambda: (rename(resnet(), conv1="conv1.0"), ("conv1.0.weight", "stem")),
    "deep stem of mmpretrain": lambda: (rename(resnet(), conv1="stem.0", bn1="stem.1"), ("stem.0.weight", "stem")),
    "selective kernels": lambda: (
        {"resnet": {f"net.1.blocks.0.{name}": HEAD for name in ("net.1.0.weight", "net.2.main_conv.0.weight")}},
        ("no ResNet-18",)),
    "a block of Detectron2": lambda: (
        {"model": heads("backbone.bottom_up.res2.0.conv1.norm.weight")}, ("no ResNet-18",)),
    "a layer in a Sequential": lambda: (sequential("", resnet()) | heads("5.0.adapter.weight"), ("adapter",)),
    "Flax": lambda: ({"params": {"conv_init": {"kernel": HEAD}, "bn_init": {"scale": HEAD}}}, ("JAX", "convert")),
    "Haiku": lambda: ({"resnet/~/initial_conv": {"w": HEAD}}, ("JAX", "convert")),
    "other tensors": lambda: ({"state_dict": {"encoder.weight": HEAD}}, ("contains no ResNet", "encoder.weight")),
    "no tensors": lambda: ({"epoch": 3, "metrics": {"acc": 0.5}}, ("contains no tensors", "epoch, metrics")),
    "solo-learn on CIFAR": lambda: (
        lightning(under("backbone.", cifar(resnet())) | heads("classifier.weight")),
        ("solo-learn", "pads by 2")),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_plain_resnet_is_named(kind: str, tmp_path: Path) -> None:
    content, words = REFUSED[kind]()
    torch.save(content, tmp_path / "w.pth")
    refused(lambda: read_backbone(tmp_path / "w.pth"), tmp_path / "w.pth", *words)


EXTRA = {  # a tensor next to those of a ResNet, and what the answer says of it
    "layer1.0.conv1.lora_A": "merge", "layer1_adapter.weight": "merge", "bn1.adapter": "merge", "layer0.weight": "",
    "layer5.0.conv1.weight": "", "layer1.0.se.fc1.weight": "SE-ResNet", "layer1.2.conv1.weight": "",
    "layer2.0.downsample.2.weight": "ResNet-D", "conv2.weight": "another stem", "stem.conv1.weight": "",
    "relu.weight": "", "maxpool.1.filt": "", "res5.0.conv1.weight": "",
}  # fmt: skip


@pytest.mark.parametrize("name", EXTRA)
def test_what_changes_the_features_of_a_resnet_is_refused(name: str, tmp_path: Path) -> None:
    """Heads next to it do not: LAYOUTS has many."""
    torch.save(under("module.encoder.", resnet() | heads(name)), tmp_path / "w.pth")
    refused(lambda: read_backbone(tmp_path / "w.pth"), "w.pth", name.partition(".")[0], EXTRA[name])


@pytest.mark.docs
def test_the_table_of_layouts_is_current() -> None:
    from docs import reference

    page = Path(reference.__file__).parent / "reference" / "layouts.md"
    assert page.read_text(encoding="utf-8") == reference.pages()[page]


def test_what_is_not_read_is_listed(tmp_path: Path) -> None:
    torch.save(LAYOUTS["lightly, MoCo"](), tmp_path / "w.pth")
    assert read_backbone(tmp_path / "w.pth").unread == (
        "state_dict.backbone_momentum, projection_head.layers.0.weight, projection_head_momentum.layers.0.weight, "
        "criterion.memory_bank.bank"
    )
