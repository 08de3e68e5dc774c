"""Batch norm with separate statistics per group of a training batch, as if each group had its own process.

One process then behaves as several do, which ShuffleBN needs (He et al. 2020, Sec. 3.3).

Shape letters: G groups, C channels of one norm, S channels of all norms together, means and variances.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import ResNet


class GroupedBatchNorm(nn.BatchNorm2d):
    """Batch norm, 1D or 2D, with separate statistics per contiguous group of a batch.

    In training, it needs the statistics of its groups, which the `GroupedResNet` that it is in gives it for each pass.

    Args:
        groups: equal parts of each training batch.
    """

    def __init__(self, num_features: int, groups: int) -> None:
        super().__init__(num_features)
        self.groups = groups
        self.rows: list[list[tuple[Tensor, Tensor]]] = []  # of `GroupedResNet`
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


class GroupedResNet(ResNet):
    """The layers of a ResNet whose norms may be `GroupedBatchNorm`.

    While a training batch passes through it, the running statistics of all groups and norms are one (G, S) tensor: with
    tensors of its own, each norm would launch ten small kernels per pass.

    Attributes:
        norms: its grouped norms; none if the statistics are those of the whole batch.
    """

    def __init__(self, resnet: ResNet) -> None:
        nn.Module.__init__(self)  # not ResNet's, which would build new layers
        for name, layer in resnet.named_children():
            self.add_module(name, layer)
        self.norms = [module for module in self.modules() if isinstance(module, GroupedBatchNorm)]
        # For each group, the mean and the variance (C,) of each norm, which `F.batch_norm` updates.
        self._rows: list[list[tuple[Tensor, Tensor]]] = []
        for position, norm in enumerate(self.norms):
            norm.rows = self._rows  # not this network, which would make a reference cycle
            norm.position = position

    def forward(self, x: Tensor) -> Any:
        """Pass each group with its own copy of the running statistics; these become the mean over the groups."""
        if not self.training or not self.norms:
            return super().forward(x)
        running = [cast(Tensor, x_C) for norm in self.norms for x_C in (norm.running_mean, norm.running_var)]
        sizes = [len(x_C) for x_C in running]
        with torch.no_grad():
            all_GS = torch.cat(running).repeat(self.norms[0].groups, 1)
            parts = [row_S.split(sizes) for row_S in all_GS.unbind()]
        self._rows.clear()  # of a pass that failed
        self._rows.extend(list(zip(part[0::2], part[1::2], strict=True)) for part in parts)

        output = super().forward(x)

        self._rows.clear()
        with torch.no_grad():
            torch._foreach_copy_(running, all_GS.mean(0).split(sizes))
            torch._foreach_add_([cast(Tensor, norm.num_batches_tracked) for norm in self.norms], 1)
        return output
