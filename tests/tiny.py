"""A narrow ResNet-18 in place of the real one: it has all its tensors, and steps take milliseconds."""

import functools
from typing import Any

import pytest
import torchvision
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

_REAL = torchvision.models.resnet18


class _Narrow(ResNet):
    """A ResNet-18 with ``width`` channels after the stem instead of 64."""

    def __init__(self, width: int, norm_layer: Any, num_classes: int) -> None:
        self._width = width
        super().__init__(BasicBlock, [2, 2, 2, 2], norm_layer=norm_layer)
        self.conv1 = nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = (norm_layer or nn.BatchNorm2d)(width)
        self.fc = nn.Linear(8 * width, num_classes)

    def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Sequential:
        if planes == 64:
            self.inplanes = self._width
        return super()._make_layer(block, planes * self._width // 64, *args, **kwargs)


def _resnet18(weights: None = None, norm_layer: Any = None, num_classes: int = 1000, *, width: int, **_: Any) -> ResNet:
    return _Narrow(width, norm_layer, num_classes)


def use(patch: pytest.MonkeyPatch, width: int = 8) -> None:
    """Give every ResNet-18 of this process ``width`` channels; with 8, it has 0.18 million parameters."""
    patch.setattr(torchvision.models, "resnet18", functools.partial(_resnet18, width=width))


def in_use() -> bool:
    return torchvision.models.resnet18 is not _REAL
