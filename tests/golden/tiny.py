"""A ResNet-18 with 2 to 16 channels instead of 64 to 512: every tensor by name and layout, in 45 kB."""

from __future__ import annotations

from typing import Any

import pytest
import torchvision
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from transfer.torchvision_engine.backbone import BottomUp


class _Tiny(ResNet):
    def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Sequential:
        if planes == 64:
            self.inplanes = 2
        return super()._make_layer(block, planes // 32, *args, **kwargs)


def resnet18(weights: None = None, norm_layer: Any = None, num_classes: int = 1000, **_: Any) -> ResNet:
    model = _Tiny(BasicBlock, [2, 2, 2, 2], norm_layer=norm_layer)
    model.conv1 = nn.Conv2d(3, 2, kernel_size=7, stride=2, padding=3, bias=False)
    model.bn1 = (norm_layer or nn.BatchNorm2d)(2)
    model.fc = nn.Linear(16, num_classes)
    return model


def use(patch: pytest.MonkeyPatch) -> None:
    """Makes every ResNet-18 this one."""
    real = BottomUp.__init__

    def init(self: BottomUp, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.channels = [2, 4, 8, 16]

    patch.setattr(torchvision.models, "resnet18", resnet18)
    patch.setattr(BottomUp, "__init__", init)
