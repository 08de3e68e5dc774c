"""torchvision's ResNet (ImageNet or CIFAR stem) with a projection head in place of its classifier, and its batch norm.

MoCo's names: the head is ``fc``, so a two-layer head is ``fc.0`` and ``fc.2`` and a linear one ``fc``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from .dense import add_dense_head


def build_backbone(arch: str, stem: str = "imagenet") -> torchvision.models.ResNet:
    """A random ResNet without classifier: (N, 3, H, W) -> (N, F) after global average pooling.

    Args:
        arch: resnet18 | resnet34 | resnet50 | resnet101.
        stem: ``imagenet``, or ``cifar``: 3x3 stride 1 and no pooling (SimCLR, App. B.9).
    """
    backbone = getattr(torchvision.models, arch)(weights=None)
    if stem == "cifar":
        backbone.conv1 = nn.Conv2d(3, backbone.conv1.out_channels, kernel_size=3, stride=1, padding=1, bias=False)
        nn.init.kaiming_normal_(backbone.conv1.weight, mode="fan_out", nonlinearity="relu")
        backbone.maxpool = nn.Identity()
    else:
        backbone.maxpool = _MaxPool(kernel_size=3, stride=2, padding=1)
    backbone.fc = nn.Identity()
    return backbone


class _MaxPool(nn.MaxPool2d):
    """The same values; on a CPU, torch pools channels_last several times faster than contiguous images."""

    def forward(self, x: Tensor) -> Tensor:
        is_slow = x.device.type == "cpu" and x.is_contiguous()
        pooled = cast(Tensor, super().forward(x.contiguous(memory_format=torch.channels_last) if is_slow else x))
        return pooled.contiguous() if is_slow else pooled


def feature_dim(resnet: torchvision.models.ResNet) -> int:
    """F: channels after global average pooling (512 or 2048)."""
    return list(resnet.layer4.parameters())[-1].shape[0]


def pooled_features(resnet: torchvision.models.ResNet, images: Tensor) -> Tensor:
    """(N, 3, H, W) -> (N, F) after global average pooling, whatever is in place of the classifier."""
    x = resnet.maxpool(resnet.relu(resnet.bn1(resnet.conv1(images))))
    x = resnet.layer4(resnet.layer3(resnet.layer2(resnet.layer1(x))))
    return torch.flatten(resnet.avgpool(x), 1)


def build_head(in_dim: int, hidden_dims: Sequence[int], out_dim: int, batch_norm: bool) -> nn.Module:
    """The projection head: linear layers with ReLU (and BN) between them; without hidden layers, one linear layer."""
    if not hidden_dims:
        return nn.Linear(in_dim, out_dim)
    layers: list[nn.Module] = []
    for hidden in hidden_dims:
        layers += [nn.Linear(in_dim, hidden), *([nn.BatchNorm1d(hidden)] if batch_norm else []), nn.ReLU(inplace=True)]
        in_dim = hidden
    return nn.Sequential(*layers, nn.Linear(in_dim, out_dim))


def build_encoder(
    arch: str, stem: str, *, hidden_dims: Sequence[int], head_bn: bool, dim: int, bn_groups: Sequence[int] = (),
    dense: bool = False,
) -> torchvision.models.ResNet:  # fmt: skip
    """Backbone and head in one module: (N, 3, H, W) -> (N, dim), not normalized.

    Args:
        bn_groups: as in `split_batch_norm`; one group or none: ordinary batch norm.
        dense: a `DenseResNet`.
    """
    encoder = build_backbone(arch, stem)
    encoder.fc = cast(Any, build_head(feature_dim(encoder), hidden_dims, dim, head_bn))
    if dense:
        add_dense_head(encoder, feature_dim(encoder), dim)
    if len(bn_groups) > 1:
        split_batch_norm(encoder, bn_groups)
    return encoder


class Grouped:
    """Training statistics over contiguous groups of the batch: the slices that as many processes would hold.

    One process then behaves as several do, each with its own BN, which ShuffleBN needs (He et al. 2020, Sec. 3.3).
    Running statistics are the mean over the groups.

    Attributes:
        groups: images in each group. A batch of k rows per image has k times as many rows in each.
    """

    groups: Sequence[int]

    def forward(self, x: Tensor) -> Tensor:
        bn = cast(nn.BatchNorm2d, self)
        if not bn.training:
            return super().forward(x)  # type: ignore[misc]
        mean, var = cast(Tensor, bn.running_mean), cast(Tensor, bn.running_var)
        cast(Tensor, bn.num_batches_tracked).add_(1)
        means_GC, vars_GC = mean.repeat(len(self.groups), 1), var.repeat(len(self.groups), 1)
        rows_per_image = len(x) // sum(self.groups)
        parts = x.split([rows_per_image * images for images in self.groups])
        # Splitting and joining is as fast as folding the parts into channels, and preserves channels_last.
        rest = (bn.weight, bn.bias, True, cast(float, bn.momentum), bn.eps)
        y = torch.cat([F.batch_norm(part, means_GC[g], vars_GC[g], *rest) for g, part in enumerate(parts)])
        with torch.no_grad():
            mean.copy_(means_GC.mean(0))
            var.copy_(vars_GC.mean(0))
        return y


class GroupedBatchNorm1d(Grouped, nn.BatchNorm1d):
    """BatchNorm1d with statistics over parts of the batch."""


class GroupedBatchNorm2d(Grouped, nn.BatchNorm2d):
    """BatchNorm2d with statistics over parts of the batch."""


def split_batch_norm(module: nn.Module, groups: Sequence[int]) -> None:
    """Turns every BatchNorm of ``module`` into its grouped form, in place; state names do not change.

    Args:
        groups: images in each group; a training batch must hold a multiple of their sum.
    """
    for child in module.modules():
        if isinstance(child, nn.BatchNorm2d):
            child.__class__ = GroupedBatchNorm2d
        elif isinstance(child, nn.BatchNorm1d):
            child.__class__ = GroupedBatchNorm1d
        else:
            continue
        cast(Grouped, child).groups = groups


def set_bn_groups(encoder: nn.Module, groups: Sequence[int]) -> None:
    """Sets the images in each group of the next training batch; no effect on batch norm that was not split.

    Micro-batches with groups of the same sizes share a graph of torch.compile: nothing else changes between them.
    """
    for module in encoder.modules():
        if isinstance(module, Grouped):
            module.groups = groups
