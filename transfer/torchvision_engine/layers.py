"""Convolutions and norms with Detectron2's names and arithmetic."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fvcore.nn.distributed import differentiable_all_reduce
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import FrozenBatchNorm2d

Norm = Callable[[int], nn.Module]  # channels -> a norm


class Conv2d(nn.Conv2d):
    """A convolution and its norm, if any, which is its child: `conv1.weight`, `conv1.norm.weight`."""

    def __init__(self, *args: Any, norm: Norm | None = None, **kwargs: Any) -> None:
        super().__init__(*args, bias=norm is None, **kwargs)
        self.norm = norm(self.out_channels) if norm else nn.Identity()

    def forward(self, input: Tensor) -> Tensor:
        return self.norm(super().forward(input))


class ProcessSyncBatchNorm(nn.BatchNorm2d):
    """Batch norm over all processes on CPUs, where torch.nn.SyncBatchNorm does not run."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        assert self.momentum is not None
        x = input.float()  # counts and statistics are exact, and have the type of the running statistics
        count = differentiable_all_reduce(x.new_tensor([x.numel() / x.shape[1]]))
        mean = differentiable_all_reduce(x.sum((0, 2, 3))) / count
        centered = x - mean[:, None, None]
        var = differentiable_all_reduce(centered.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            self.get_buffer("running_mean").lerp_(mean, self.momentum)
            self.get_buffer("running_var").lerp_(var * count / (count - 1), self.momentum)
            self.get_buffer("num_batches_tracked").add_(1)
        scale = (var + self.eps).rsqrt() * self.weight
        return (centered * scale[:, None, None] + self.bias[:, None, None]).to(input.dtype)


class SyncBatchNorm(nn.SyncBatchNorm):
    """SyncBatchNorm that casts empty inputs to float32, the type of the other ranks' statistics."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input if input.numel() else input.float())


class FrozenBatchNorm(FrozenBatchNorm2d):
    """FrozenBatchNorm2d whose result has the input's type; torchvision's is float32 even under mixed precision."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.get_buffer("running_var").sub_(self.eps)  # the identity until weights are loaded

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, mean, var = map(self.get_buffer, ("weight", "bias", "running_mean", "running_var"))
        if not x.requires_grad:  # as in Detectron2: one kernel, whose backward pass would need x
            return F.batch_norm(x, mean, var, weight, bias, training=False, eps=self.eps)
        scale = weight * (var + self.eps).rsqrt()
        bias = bias - mean * scale
        return x * scale.to(x.dtype)[:, None, None] + bias.to(x.dtype)[:, None, None]


def norm_layer(name: str, device: torch.device) -> Norm | None:
    """Return the norm that Detectron2 calls ``name``, or None for no norm."""
    sync: Norm = nn.BatchNorm2d
    if dist.is_initialized() and dist.get_world_size() > 1:
        sync = SyncBatchNorm if device.type == "cuda" else ProcessSyncBatchNorm
    norms = {"BN": nn.BatchNorm2d, "SyncBN": sync, "FrozenBN": FrozenBatchNorm, "GN": partial(nn.GroupNorm, 32)}
    return norms[name] if name else None


def freeze(module: nn.Module) -> nn.Module:
    """Return the module with parameters that have no gradient and new, constant batch norms.

    Weights are loaded later, so the constants have their initial values.
    """
    if isinstance(module, (nn.BatchNorm2d, nn.SyncBatchNorm)):
        return FrozenBatchNorm(module.num_features)
    for name, child in module.named_children():
        setattr(module, name, freeze(child))
    return module.requires_grad_(False)
