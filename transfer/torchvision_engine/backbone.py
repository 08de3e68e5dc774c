"""torchvision's ResNet and the feature pyramid on it, with Detectron2's names in their states."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F
import torchvision
from fvcore.nn import weight_init
from torch import Tensor, nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.resnet import Bottleneck, ResNet

from pretrain.common.weights.resnet_names import build_name_table

from .layers import Conv2d, Norm, freeze

_STAGES = {"conv1": 1, "bn1": 1, "layer1": 2, "layer2": 3, "layer3": 4, "layer4": 5}  # as FREEZE_AT numbers them


class BottomUp(IntermediateLayerGetter):
    """A ResNet that maps images (N, 3, H, W) to res2 .. res5, of strides 4 .. 32, by name.

    Its modules are torchvision's; its state has the names of `resnet_names`.

    Args:
        arch: torchvision's name of the ResNet.
        stride_in_1x1: bottlenecks downsample in their first convolution rather than in the 3x3.
        freeze_at: the stem (1) and the stages up to this one (res2 is 2) keep their weights; 0 trains all of them.
    """

    def __init__(self, arch: str, norm: Norm | None, *, stride_in_1x1: bool, freeze_at: int) -> None:
        resnet: ResNet = getattr(torchvision.models, arch)(norm_layer=norm)
        super().__init__(resnet, {f"layer{i}": f"res{i + 1}" for i in range(1, 5)})
        for block in resnet.modules():
            if isinstance(block, Bottleneck) and stride_in_1x1:
                block.conv1.stride = block.conv2.stride
                block.conv2.stride = (1, 1)
        for name, stage in _STAGES.items():
            self[name] = freeze(self[name]) if stage <= freeze_at else self[name]
        self.channels = [resnet.fc.in_features // 2**i for i in (3, 2, 1, 0)]
        to_detectron2 = build_name_table(arch)
        to_torchvision = {detectron2: torchvision for torchvision, detectron2 in to_detectron2.items()}
        self.register_state_dict_post_hook(partial(_rename, to_detectron2))
        self.register_load_state_dict_pre_hook(partial(_rename, to_torchvision))


def _rename(table: Mapping[str, str], _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    """Rename the module's tensors in ``state``, as a hook of its state dict."""
    for name in [name for name in state if name.startswith(prefix)]:
        state[prefix + table[name.removeprefix(prefix)]] = state.pop(name)


class FPN(nn.Module):
    """Feature pyramid (Lin et al., 2017): images -> p2 .. p6, of strides 4 .. 64 and ``out_channels``."""

    def __init__(self, bottom_up: BottomUp, out_channels: int, norm: Norm | None) -> None:
        super().__init__()
        self.bottom_up = bottom_up
        self.laterals = [Conv2d(channels, out_channels, 1, norm=norm) for channels in bottom_up.channels]
        self.outputs = [Conv2d(out_channels, out_channels, 3, padding=1, norm=norm) for _ in bottom_up.channels]
        for kind, convs in (("lateral", self.laterals), ("output", self.outputs)):
            for stage, conv in enumerate(convs, start=2):
                self.add_module(f"fpn_{kind}{stage}", conv)
                weight_init.c2_xavier_fill(conv)

    def forward(self, images: Tensor) -> list[Tensor]:
        maps = [lateral(x) for lateral, x in zip(self.laterals, self.bottom_up(images).values(), strict=True)]
        for stage in (2, 1, 0):
            maps[stage] = maps[stage] + F.interpolate(maps[stage + 1], scale_factor=2.0, mode="nearest")
        pyramid = [output(x) for output, x in zip(self.outputs, maps, strict=True)]
        return [*pyramid, F.max_pool2d(pyramid[-1], 1, stride=2)]
