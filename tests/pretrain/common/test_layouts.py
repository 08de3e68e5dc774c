"""Of every project's file, exactly the ResNet that is meant is read; a file without one, or with several, is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pretrain.common.backbone_file import extract_backbone, read_backbone
from pretrain.common.weights_file import read_weights_file
from tests.errors import refused
from tests.pretrain.common.layouts import CIFAR_STEM, HEAD, LAYOUTS, heads, lightning, resnet, sequential, under

ONE = torch.ones(1)
PAIR = {"query": resnet(), "key": resnet(2)}
AVERAGES = {
    "timm": {"state_dict": resnet(), "state_dict_ema": resnet(2)},
    "torchvision": {"model": resnet(), "model_ema": {"n_averaged": ONE, **under("module.", resnet(2))}},
    "mmengine": {"state_dict": under("backbone.", resnet(1)), "ema_state_dict": under("module.backbone.", resnet(2))},
}


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


SEVERAL = {
    "two networks": {"image": resnet(), "audio": resnet(2)},
    "the network and another inside": under("", resnet()) | under("backbone.", resnet(2)),
    **{f"average, {project}": content for project, content in AVERAGES.items()},
    "average of a pair": {"state_dict": under("encoder_q.", resnet()), "ema": under("encoder_q.", resnet(2))},
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_one_of_several_networks_is_chosen_by_its_prefix(kind: str, tmp_path: Path) -> None:
    torch.save(SEVERAL[kind], path := tmp_path / "several.pth")
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


CHOSEN: dict[str, tuple[Any, int]] = {
    "equal copies are one": ({"model": resnet(), "model_ema": resnet(), "best": resnet()}, 1),
    "the only one is a key": ({"teacher": resnet()}, 1),
    "next to a student, an average is its teacher": ({"student": resnet(), "ema": resnet(2)}, 1),
    "camel case": (under("encoderQ.", resnet()) | under("momentumEncoder.", resnet(2)), 1),
    "the other is incomplete": ({"image": resnet(), "audio": resnet(2, "resnet34", norm_layer=nn.Identity)}, 1),
    "the other is a ResNet-152": ({"a": resnet(), "b": resnet(2, "resnet152")}, 1),
    "a learned head of convolutions": (resnet() | heads("deconv_layers.0.weight", "attnpool.k_proj.weight"), 1),
    "an optimizer that names tensors": ({"model": resnet(), "optimizer": under("state.", resnet(2))}, 1),
}


@pytest.mark.parametrize("kind", CHOSEN)
def test_what_decides_between_networks(kind: str, tmp_path: Path) -> None:
    content, number = CHOSEN[kind]
    torch.save(content, tmp_path / "w.pth")
    assert value(read_backbone(tmp_path / "w.pth").state_dict) == number


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


REFUSED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "vision transformer": (heads("cls_token", "blocks.0.attn.qkv.weight"), ("holds no ResNet", "transformer")),
    "ResNeXt": (resnet(arch="resnext50_32x4d"), ("ResNeXt", "(128, 64, 1, 1)")),
    "wide ResNet": (resnet(arch="wide_resnet50_2"), ("wide ResNet",)),
    "ResNet-152": (resnet(arch="resnet152"), ("ResNet-152", "(3, 8, 36, 3)")),
    "four channels": (resnet() | {"conv1.weight": ONE.expand(64, 4, 7, 7)}, ("conv1.weight", "(64, 4, 7, 7)", "RGB")),
    "group normalization": (
        {name: t for name, t in resnet().items() if "running" not in name}, ("lacks bn1.running_mean",)),
    "ResNet-D": (resnet() | heads("layer2.0.downsample.2.weight"), ("layer2.0.downsample.2.weight", "ResNet-D")),
    "deep stem": (rename(resnet(), conv1="conv1.0"), ("conv1.0.weight", "stem")),
    "deep stem of mmpretrain": (under("backbone.", rename(resnet(), conv1="stem.0", bn1="stem.1")), ("stem.0.weight",)),
    "CLIP": (under("visual.", resnet()) | heads("visual.conv2.weight", "visual.attnpool.x"), ("conv2.weight",)),
    "LoRA": (resnet() | heads("layer1.0.conv1.lora_A"), ("layer1.0.conv1.lora_A", "merge")),
    "adapter": (resnet() | heads("bn1.adapter"), ("bn1.adapter", "merge")),
    "squeeze and excitation": (resnet() | heads("layer1.0.se.fc1.weight"), ("layer1.0.se.fc1.weight", "SE-ResNet")),
    "selective kernels": (
        {"resnet": {f"net.1.blocks.0.{name}": HEAD for name in ("net.1.0.weight", "net.2.main_conv.0.weight")}},
        ("no ResNet-18",)),
    "layer0": (resnet() | heads("layer0.weight"), ("layer0.weight",)),
    "layer5": (resnet() | heads("layer5.0.conv1.weight"), ("layer5.0.conv1.weight",)),
    "a block of Detectron2": (
        {"model": heads("backbone.bottom_up.res2.0.conv1.norm.weight")}, ("no ResNet-18",)),
    "a layer in a Sequential": (sequential("", resnet()) | heads("5.0.adapter.weight"), ("adapter",)),
    "Flax": ({"params": {"conv_init": {"kernel": HEAD}, "bn_init": {"scale": HEAD}}}, ("JAX", "convert")),
    "Haiku": ({"resnet/~/initial_conv": {"w": HEAD}}, ("JAX", "convert")),
    "other tensors": ({"state_dict": {"encoder.weight": HEAD}}, ("holds no ResNet", "state_dict.encoder.weight")),
    "no tensors": ({"epoch": 3, "metrics": {"acc": 0.5}}, ("holds no tensors", "epoch, metrics")),
    "solo-learn on CIFAR": (
        lightning(under("backbone.", resnet() | {"conv1.weight": CIFAR_STEM}) | heads("classifier.weight")),
        ("solo-learn", "pads by 2")),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_plain_resnet_is_named(kind: str, tmp_path: Path) -> None:
    content, words = REFUSED[kind]
    torch.save(content, tmp_path / "w.pth")
    refused(lambda: read_backbone(tmp_path / "w.pth"), tmp_path / "w.pth", *words)


def test_what_is_not_read_is_listed(tmp_path: Path) -> None:
    torch.save(LAYOUTS["lightly, MoCo"](), tmp_path / "w.pth")
    assert read_backbone(tmp_path / "w.pth").unread == (
        "state_dict.backbone_momentum, projection_head.layers.0.weight, projection_head_momentum.layers.0.weight, "
        "criterion.memory_bank.bank"
    )
