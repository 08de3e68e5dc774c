"""The encoder: torchvision's ResNet (ImageNet or CIFAR stem) with a projection head as its classifier.

MoCo's names: the head is ``fc``, so a two-layer head is ``fc.0`` and ``fc.2`` and a linear one ``fc``.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import ResNet

from ..common.errors import UserError
from ..data import views
from .batch_norm import GroupedBatchNorm, GroupedResNet
from .dense import DenseFeatures, DenseResNet, normalize_maps


def build_backbone(
    arch: str, stem: str = "imagenet", norm_layer: Callable[[int], nn.Module] = nn.BatchNorm2d
) -> ResNet:
    """Build a random ResNet without classifier: (N, 3, H, W) -> (N, F) after global average pooling.

    Args:
        arch: resnet18 | resnet34 | resnet50 | resnet101.
        stem: ``imagenet``, or ``cifar``: 3x3 stride 1 and no pooling (SimCLR, App. B.9).
        norm_layer: builds a norm from its number of channels.
    """
    backbone = getattr(torchvision.models, arch)(weights=None, norm_layer=norm_layer)
    if stem == "cifar":
        backbone.conv1 = nn.Conv2d(3, backbone.conv1.out_channels, kernel_size=3, stride=1, padding=1, bias=False)
        nn.init.kaiming_normal_(backbone.conv1.weight, mode="fan_out", nonlinearity="relu")
        backbone.maxpool = nn.Identity()
    backbone.fc = nn.Identity()
    return backbone


def count_channels(resnet: ResNet) -> int:
    """Return F, the channels after global average pooling (512 or 2048)."""
    return list(resnet.layer4.parameters())[-1].shape[0]


def pool_features(resnet: ResNet, images: Tensor) -> Tensor:
    """Map (N, 3, H, W) to (N, F) after global average pooling, ignoring ``fc``."""
    x = resnet.maxpool(resnet.relu(resnet.bn1(resnet.conv1(images))))
    x = resnet.layer4(resnet.layer3(resnet.layer2(resnet.layer1(x))))
    return torch.flatten(resnet.avgpool(x), 1)


def build_head(
    in_dim: int, hidden_dims: Sequence[int], out_dim: int, norm_layer: Callable[[int], nn.Module] | None = None
) -> nn.Module:
    """Build the projection head: linear layers with ReLU (after a norm, if any) between them."""
    layers: list[nn.Module] = []
    for hidden in hidden_dims:
        layers.append(nn.Linear(in_dim, hidden))
        if norm_layer is not None:
            layers.append(norm_layer(hidden))
        layers.append(nn.ReLU(inplace=True))
        in_dim = hidden
    last = nn.Linear(in_dim, out_dim)
    return nn.Sequential(*layers, last) if layers else last


def build_network(
    arch: str, stem: str, *, hidden_dims: list[int], head_bn: bool, dim: int, bn_groups: int = 1, dense: bool = False
) -> ResNet:
    """Build backbone and head as one module: (N, 3, H, W) -> (N, dim), not normalized.

    Args:
        bn_groups: groups of each training batch with their own batch-norm statistics; 1 is ordinary batch norm.
        dense: build a `DenseResNet`.
    """
    norm_2d: Any = nn.BatchNorm2d
    norm_1d: Any = nn.BatchNorm1d
    if bn_groups > 1:
        norm_2d = norm_1d = functools.partial(GroupedBatchNorm, groups=bn_groups)
    encoder = build_backbone(arch, stem, norm_2d)
    encoder.fc = cast(Any, build_head(count_channels(encoder), hidden_dims, dim, norm_1d if head_bn else None))
    if dense:
        return DenseResNet(encoder, count_channels(encoder), dim)
    return GroupedResNet(encoder) if bn_groups > 1 else encoder


@dataclass(frozen=True)
class Encoder:
    """A network, and what turns images into its input and its output into embeddings.

    Attributes:
        network: (n, 3, H, W) -> (n, D), not normalized, or `DenseResNet`'s outputs; see `build_network`.
        parallel: the network, wrapped in DistributedDataParallel if it is trained on several ranks.
        normalize: uint8 pixels -> float32; see `views.normalize`.
        autocast: the context of SOLVER.AMP's precision.
        memory_format: the layout of weights and images.
        bn_groups: groups of the global batch with their own BN statistics; runs with equal results agree on it.
    """

    network: ResNet
    parallel: nn.Module
    normalize: views.Normalization
    autocast: torch.autocast
    memory_format: torch.memory_format
    bn_groups: int

    def embed(self, images: Tensor) -> tuple[Tensor, DenseFeatures | None]:
        """Embed uint8 images (n, 3, H, W) as unit-norm float32 (n, D), with the features of a dense head if any.

        Raises:
            UserError: batch norm gets a single value per channel, which has no statistics.
        """
        x = self.normalize(images).contiguous(memory_format=self.memory_format)
        try:
            with self.autocast:
                output = self.parallel(x)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            groups = next((m.groups for m in self.network.modules() if isinstance(m, GroupedBatchNorm)), 1)
            each = "one image" if len(images) == groups else f"{len(images) // groups} images"
            problem = f"batch norm needs more than one value per channel, but gets those of {each}"
            problem += f" ({len(images)} in {groups} BN groups)" if groups > 1 else ""
            remedy = "raise SOLVER.IMS_PER_BATCH, lower MODEL.BN_GROUPS or SOLVER.ACCUMULATE, or start fewer processes"
            raise UserError(f"{problem}; {remedy}") from error
        if isinstance(output, Tensor):
            return F.normalize(output.float(), dim=1), None
        embeddings, dense_maps, feature_maps = output
        return F.normalize(embeddings.float(), dim=1), normalize_maps(dense_maps, feature_maps)
