"""The ResNet's names and freezing."""

from __future__ import annotations

import torch
from torch import nn

from pretrain.common.resnet_names import names
from transfer.torchvision_engine.backbone import BottomUp


def build(freeze_at: int = 0) -> BottomUp:
    return BottomUp("resnet18", nn.BatchNorm2d, groups=1, width_per_group=64, stride_in_1x1=False, freeze_at=freeze_at)


def test_freezing_leaves_constants_without_gradients():
    model = build(freeze_at=2)
    frozen = {name.split(".")[0] for name, p in model.named_parameters() if not p.requires_grad}
    kept = {name.split(".")[0] for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert frozen == {"conv1", "layer1"} and kept == {"layer2", "layer3", "layer4"}


def test_the_state_has_detectron2s_names_and_loads_again():
    torch.manual_seed(0)
    model, other = build(), build()
    state = model.state_dict()
    assert list(state) == list(names("resnet18").values())
    other.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    (state["res5.0.shortcut.norm.running_var"]).fill_(7)  # the state shares the model's storage
    assert model.layer4[0].downsample[1].running_var.unique().tolist() == [7]
