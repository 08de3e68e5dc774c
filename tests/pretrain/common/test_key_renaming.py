"""The formats of thirteen public self-supervised ResNet-50s and of other projects, each in a file of that form."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pretrain.common.backbone_file import read_backbone
from tests.errors import refused
from tests.resnets import moco, resnet_state

State = dict[str, Tensor]
HEAD = torch.zeros(2, 2)


def under(prefix: str, state: State, **more: Tensor) -> State:
    """The backbone under a prefix, and tensors of a head beside it (``__`` stands for a dot)."""
    body = {f"{prefix}{name}": tensor for name, tensor in state.items() if not name.startswith("fc.")}
    return body | {name.replace("__", "."): tensor for name, tensor in more.items()}


def pycontrast(state: State, **more: Tensor) -> dict[str, Any]:
    model = under("module.encoder.", state, module__head__0__weight=HEAD, **more)
    return {"opt": argparse.Namespace(arch="resnet18"), "model": model, "contrast": {"memory": HEAD}, "epoch": 800}


def swav(state: State) -> State:
    more = {"module__projection_head__0__weight": HEAD, "module__prototypes__weight": HEAD}
    return under("module.", state, **more, module__projection_head__1__running_var=HEAD[0])


def simclr_v2(state: State) -> dict[str, Any]:
    """Names as Separius/SimCLRv2-Pytorch gives them: a Sequential of Sequentials."""
    renamed = {}
    for name, tensor in state.items():
        name = re.sub(r"^conv1\.", "net.0.0.", re.sub(r"^bn1\.", "net.0.1.0.", name))
        name = re.sub(r"^layer(\d)\.(\d+)\.", r"net.\1.blocks.\2.", name)
        name = re.sub(r"\.conv(\d)\.", lambda m: f".net.{2 * int(m[1]) - 2}.", name)
        name = re.sub(r"\.bn(\d)\.", lambda m: f".net.{2 * int(m[1]) - 1}.0.", name)
        name = name.replace("downsample.0", "projection.shortcut").replace("downsample.1", "projection.bn.0")
        renamed[name] = tensor
    return {"resnet": renamed, "head": {"layers.0.weight": HEAD}}


def lightly(state: State) -> dict[str, Any]:
    numbers = {"conv1": 0, "bn1": 1, "layer1": 4, "layer2": 5, "layer3": 6, "layer4": 7}
    body = under("", state)
    named = {f"{numbers[part]}.{rest}": t for name, t in body.items() for part, _, rest in [name.partition(".")]}
    both = {f"{side}.{name}": t for side in ("backbone", "backbone_momentum") for name, t in named.items()}
    heads = {"projection_head.layers.0.weight": HEAD, "projection_head_momentum.layers.0.weight": HEAD}
    return {"epoch": 9, "state_dict": both | heads, "pytorch-lightning_version": "2.0.0"}


def solo_learn(state: State) -> dict[str, Any]:
    heads = dict.fromkeys(
        ("projector__0__weight", "classifier__weight", "momentum_projector__0__weight", "queue"), HEAD
    )
    return {"state_dict": under("backbone.", state, **heads) | under("momentum_backbone.", state), "epoch": 9}


def vissl(state: State) -> dict[str, Any]:
    model = {"trunk": under("_feature_blocks.", state), "heads": {"0.clf.weight": HEAD}}
    return {"phase": 9, "classy_state_dict": {"base_model": {"model": model, "meta": {}}}}


FORMATS: dict[str, Callable[[State], Any]] = {
    "InsDis, InfoMin": pycontrast,
    "MoCo v1 and v2, PCL v1 and v2": lambda state: moco(state, state) | {"arch": "resnet18"},
    "PIRL": lambda state: pycontrast(state, module__head_jig__fc1__weight=HEAD, module__jigsaw__fc2__weight=HEAD),
    "SimCLR v1, BYOL": lambda state: {"state_dict": state},  # as converted, with its classifier
    "SimCLR v2": simclr_v2,
    "SeLa v2, DeepCluster v2, SwAV": swav,
    "lightly": lightly,
    "solo-learn": solo_learn,
    "VISSL": vissl,
    "mmpretrain": lambda state: {"state_dict": under("backbone.", state, neck__fc0__weight=HEAD, head__fc__bias=HEAD)},
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_tensor_finds_its_place(name: str, tmp_path: Path) -> None:
    state = resnet_state()
    torch.save(FORMATS[name](state), tmp_path / "weights.pth.tar")
    backbone = read_backbone(tmp_path / "weights.pth.tar")
    assert backbone.arch == "resnet18"
    wanted = {key: tensor for key, tensor in state.items() if not key.startswith("fc.")}
    assert backbone.state_dict.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in backbone.state_dict.items())


def test_a_resnet_with_selective_kernels_is_refused(tmp_path: Path) -> None:
    content = simclr_v2(resnet_state())
    content["resnet"]["net.1.blocks.0.net.2.main_conv.0.weight"] = HEAD
    torch.save(content, tmp_path / "sk.pth")
    refused(lambda: read_backbone(tmp_path / "sk.pth"), "net.1.blocks.0.net.2.main_conv.0.weight")
