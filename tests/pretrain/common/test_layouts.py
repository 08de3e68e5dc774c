"""From each project's file, exactly the intended ResNet is read; files with none or several are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.common.weights.backbone import extract_backbone, read_backbone
from pretrain.common.weights.file import read_weights_file
from pretrain.common.weights.provenance import InputFormat
from tests.errors import refused
from tests.pretrain.common.layouts import LAYOUTS, TABLE, build, heads, resnet, under

pytestmark = pytest.mark.usefixtures("tiny_resnet18")
DTYPES = {name: tensor.dtype for name, tensor in resnet().items()}


def value(state: dict[str, torch.Tensor]) -> float:
    """Return the one value that all tensors contain."""
    values = {float(number) for tensor in state.values() for number in (tensor.min(), tensor.max())}
    assert len(values) == 1
    return values.pop()


@pytest.mark.parametrize("project", LAYOUTS)
def test_exactly_the_backbone_is_read(project: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save(LAYOUTS[project](), path)
    file = read_weights_file(path)
    backbone = extract_backbone(file)
    assert backbone.state_dict.keys() == resnet(arch=backbone.arch).keys() and value(backbone.state_dict) == 1
    if "* student" in str(TABLE["layouts"][project]):
        assert backbone.provenance.encoder == "teacher" and "--prefix" in backbone.choice
        assert value(extract_backbone(file, "key").state_dict) == 1
        assert value(extract_backbone(file, prefix=backbone.choice.split()[-4]).state_dict) == 2
    elif any((tensor == 2).all() for tensor in file.tensors.values()):
        assert "--encoder key" in backbone.choice
        assert backbone.provenance.encoder == "query"
        assert value(extract_backbone(file, "key").state_dict) == 2
    else:
        refused(lambda: extract_backbone(file, "key"), path, "key")


@pytest.mark.parametrize("kind", TABLE["several"])
def test_one_of_several_networks_is_chosen_by_its_prefix(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "several.pth"
    torch.save(build(TABLE["several"][kind]), path)
    text = refused(lambda: read_backbone(path), path, "--prefix", "(resnet18)", "convert_to_d2.py")
    assert ("average" in text) == kind.startswith("average")
    file = read_weights_file(path)
    prefixes = [word.strip(",;: ") for word in text.partition("ResNets")[2].split(" (resnet18)")[:-1]]
    prefixes = [prefix.split()[-1] for prefix in prefixes]
    assert sorted(value(extract_backbone(file, prefix=prefix).state_dict) for prefix in prefixes) == [1, 2]
    refused(lambda: extract_backbone(file, prefix="elsewhere"), "elsewhere", *prefixes)


def test_a_prefix_may_name_a_part_of_the_path(tmp_path: Path) -> None:
    model = {**under("module.net.encoder_q.", resnet(1)), **under("module.net.encoder_k.", resnet(2))}
    best = {**under("net.encoder_q.", resnet(3)), **under("net.encoder_k.", resnet(4))}
    torch.save({"model": model, "best": best}, tmp_path / "w.pth")
    file = read_weights_file(tmp_path / "w.pth")
    assert value(extract_backbone(file, "query", "best").state_dict) == 3
    assert value(extract_backbone(file, "key", "best.net.").state_dict) == 4
    assert value(extract_backbone(file, "query", "model.module.net").state_dict) == 1
    assert value(extract_backbone(file, "query", "model.net.encoder_k").state_dict) == 2
    assert value(extract_backbone(file, "query", "model.net.encoder_k.*").state_dict) == 2


@pytest.mark.parametrize("kind", TABLE["chosen"])
def test_what_decides_between_networks(kind: str, tmp_path: Path) -> None:
    torch.save(build(TABLE["chosen"][kind]), tmp_path / "w.pth")
    backbone = read_backbone(tmp_path / "w.pth").state_dict
    assert {name: tensor.dtype for name, tensor in backbone.items()} == DTYPES
    assert value({name: tensor for name, tensor in backbone.items() if "tracked" not in name}) == 1


@pytest.mark.parametrize("key", ["config", "cfg"])  # of mmcv and of mmengine
def test_a_caffe_resnet_of_mmdetection_is_for_detectors_only(key: str, tmp_path: Path) -> None:
    for style in ("caffe", "pytorch"):
        meta = {key: f"model = dict(\n    backbone=dict(type='ResNet', depth=18, style='{style}'))\n"}
        torch.save({"meta": meta, "state_dict": under("backbone.", resnet())}, tmp_path / f"{style}.pth")
    assert value(read_backbone(tmp_path / "pytorch.pth").state_dict) == 1
    refused(lambda: read_backbone(tmp_path / "caffe.pth"), "BGR", "detectors only")
    provenance = extract_backbone(read_weights_file(tmp_path / "caffe.pth")).provenance
    assert provenance.input == InputFormat("BGR", stride_in_1x1=True)


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a statistic is missing": (lambda s: s.pop("layer3.0.bn1.running_var"), "lacks layer3.0.bn1.running_var"),
    "norms have no statistics": (
        lambda s: [s.pop(name) for name in list(s) if ".running_" in name],
        "its norms have no running statistics (such as group norm)",
    ),
    "the stem is missing": (lambda s: s.pop("conv1.weight"), "lacks conv1.weight"),
    "the first convolution is missing": (lambda s: s.pop("layer1.0.conv1.weight"), "lacks layer1.0.conv1.weight"),
    "shape": (lambda s: s.update({"bn1.bias": torch.zeros(65)}), "bn1.bias has shape (65,)"),
    "integers": (lambda s: s.update({"bn1.bias": s["bn1.bias"].int()}), "bn1.bias is torch.int32"),
    "block": (lambda s: [s.pop(name) for name in list(s) if name.startswith("layer4.1")], "(2, 2, 2, 1) basic"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_query_is_named_and_not_replaced_by_the_key(kind: str, tmp_path: Path) -> None:
    damage, name = DAMAGE[kind]
    query = resnet()
    damage(query)
    torch.save(under("encoder_q.", query) | under("encoder_k.", resnet(2)), tmp_path / "w.pth")
    refused(lambda: read_backbone(tmp_path / "w.pth"), "w.pth", name)


def test_another_arch_is_named_and_a_config_of_another_project_is_kept(tmp_path: Path) -> None:
    torch.save({"state_dict": resnet(), "arch": "resnet50"}, tmp_path / "a.pth")
    refused(lambda: read_backbone(tmp_path / "a.pth"), "resnet50", "resnet18")
    torch.save({"state_dict": resnet(), "config": "METHOD: []", "epoch": "1", "arch": [1]}, tmp_path / "w.pth")
    provenance = read_backbone(tmp_path / "w.pth").provenance.to_json()
    assert provenance["config"] == "METHOD: []" and not {"method", "epoch"} & set(provenance)


@pytest.mark.parametrize("kind", TABLE["refused"])
def test_what_is_no_plain_resnet_is_named(kind: str, tmp_path: Path) -> None:
    case = TABLE["refused"][kind]
    torch.save(build(case["file"]), tmp_path / "w.pth")
    refused(lambda: read_backbone(tmp_path / "w.pth"), tmp_path / "w.pth", *case["error"])


EXTRA = {  # an additional tensor -> what the error says about it
    "layer1.0.conv1.lora_A": "merge",
    "layer1_adapter.weight": "merge",
    "bn1.adapter": "merge",
    "layer1.0.se.fc1.weight": "SE-ResNet",
    "layer2.0.downsample.2.weight": "ResNet-D",
    "conv2.weight": "another stem",
    **dict.fromkeys(["layer0.weight", "layer0.0.weight", "layer5.0.conv1.weight", "layer1.2.conv1.weight"], ""),
    **dict.fromkeys(["stem.conv1.weight", "relu.weight", "maxpool.1.filt", "res5.0.conv1.weight"], ""),
}


@pytest.mark.parametrize("name", EXTRA)
def test_what_changes_the_features_of_a_resnet_is_refused(name: str, tmp_path: Path) -> None:
    """Heads next to the ResNet do not change them; LAYOUTS has many."""
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
