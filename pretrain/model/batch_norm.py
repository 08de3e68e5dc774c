"""Batch norm with separate statistics per group of a training batch, as if each group had its own process.

One process then behaves as several do, which ShuffleBN needs (He et al. 2020, Sec. 3.3).

Shape letters: G groups, C channels of one norm, S channels of all norms together, means and variances.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import ResNet


class GroupedBatchNorm(nn.BatchNorm2d):
    """Batch norm, 1D or 2D, with separate statistics per contiguous group of a batch.

    In training, it needs the statistics of its groups, which `GroupStatistics` divides before a pass and merges after.

    Args:
        groups: equal parts of each training batch.
    """

    def __init__(self, num_features: int, groups: int) -> None:
        super().__init__(num_features)
        self.groups = groups
        self.rows: list[list[tuple[Tensor, Tensor]]] = []  # of `GroupStatistics`
        self.position = 0

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept the two dimensions of a head's features as well as a feature map's four."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        # Autograd adds the gradients of one tensor's uses one by one, the last use first; those of rows in one sum.
        weights = self.weight.expand(self.groups, -1).unbind()[::-1]
        biases = self.bias.expand(self.groups, -1).unbind()[::-1]
        rows = [row[self.position] for row in self.rows]
        groups = zip(x.chunk(self.groups), rows, weights, biases, strict=True)
        momentum = cast(float, self.momentum)
        # Splitting and joining is as fast as folding the groups into channels, and preserves channels_last.
        return torch.cat(
            [F.batch_norm(part, mean, var, w, b, True, momentum, self.eps) for part, (mean, var), w, b in groups]
        )


class GroupStatistics:
    """The running statistics of all groups and norms of a network while a training batch passes through it.

    They are one (G, S) tensor: with tensors of its own, each norm would launch ten small kernels per pass.

    Args:
        modules: modules of one network; those that are not a `GroupedBatchNorm` are ignored.

    Attributes:
        rows: for each group, the mean and the variance (C,) of each norm, which `F.batch_norm` updates.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.norms = [module for module in modules if isinstance(module, GroupedBatchNorm)]
        self.rows: list[list[tuple[Tensor, Tensor]]] = []
        for position, norm in enumerate(self.norms):
            norm.rows = self.rows  # not this object, which would make a reference cycle
            norm.position = position

    @torch.no_grad()
    def divide(self) -> Tensor:
        """Start a pass: give each group a copy of the running statistics; return all of them, (G, S)."""
        self.rows.clear()  # of a pass that failed
        running = self._list_running()
        all_GS = torch.cat(running).repeat(self.norms[0].groups, 1)
        parts = [row_S.split([len(x_C) for x_C in running]) for row_S in all_GS.unbind()]
        self.rows.extend(list(zip(part[0::2], part[1::2], strict=True)) for part in parts)
        return all_GS

    @torch.no_grad()
    def merge(self, all_GS: Tensor) -> None:
        """End a pass: the running statistics become the mean over the groups."""
        running = self._list_running()
        torch._foreach_copy_(running, all_GS.mean(0).split([len(x_C) for x_C in running]))
        torch._foreach_add_([cast(Tensor, norm.num_batches_tracked) for norm in self.norms], 1)
        self.rows.clear()

    def _list_running(self) -> list[Tensor]:
        return [cast(Tensor, x_C) for norm in self.norms for x_C in (norm.running_mean, norm.running_var)]


class GroupedResNet(ResNet):
    """The layers of a ResNet whose norms may be `GroupedBatchNorm`."""

    def __init__(self, resnet: ResNet) -> None:
        nn.Module.__init__(self)  # not ResNet's, which would build new layers
        for name, layer in resnet.named_children():
            self.add_module(name, layer)
        self.statistics = GroupStatistics(self.modules())

    def forward(self, x: Tensor) -> Any:
        if not self.training or not self.statistics.norms:
            return super().forward(x)
        all_GS = self.statistics.divide()
        output = super().forward(x)
        self.statistics.merge(all_GS)
        return output
