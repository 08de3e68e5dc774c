"""Checks a conversion: one image through torchvision's ResNet and through Detectron2's; their stages must agree.

Detectron2's stages are computed from its names with plain convolutions, so that a conversion does not need Detectron2.
"""

from collections.abc import Mapping
from functools import partial

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.resnet import Bottleneck

from pretrain.common.errors import UserError
from pretrain.common.weights.backbone import BackboneFile
from pretrain.common.weights.resnet_names import DEPTHS, PREFIX, is_bottleneck, to_detectron2

RESNET_STAGES: tuple[str, ...] = ("res2", "res3", "res4", "res5")
TOLERANCE = 1e-4  # relative to the largest absolute value of a stage


def check_conversion(
    written: Mapping[str, Tensor], backbone: BackboneFile, *, to_torchvision: bool, stride_in_1x1: bool
) -> dict[str, float]:
    """Return the largest relative difference per stage between ``backbone`` and the tensors of the converted file.

    Args:
        to_torchvision: the file has torchvision's names.
        stride_in_1x1: bottlenecks downsample in their first convolution rather than in the 3x3.

    Raises:
        UserError: a stage differs.
    """
    image = sample_image()
    arch = backbone.arch
    if to_torchvision:
        source = compute_plain_stages(to_detectron2(backbone.state_dict, arch), arch, image, stride_in_1x1)
        return check_features_agree(source, compute_torchvision_stages(written, arch, image, stride_in_1x1))
    plain = {name.removeprefix(PREFIX): tensor for name, tensor in written.items()}
    target = compute_plain_stages(plain, arch, image, stride_in_1x1)
    return check_features_agree(compute_torchvision_stages(backbone.state_dict, arch, image, stride_in_1x1), target)


def sample_image() -> Tensor:
    """Return a normalized image of smooth shapes and noise, always the same: (1, 3, 96, 128)."""
    noise = torch.randn(1, 3, 96, 128, generator=torch.Generator().manual_seed(0))
    rows, columns = torch.meshgrid(torch.linspace(-3, 3, 96), torch.linspace(-4, 4, 128), indexing="ij")
    waves = torch.stack([torch.sin(rows + columns), torch.cos(2 * rows), torch.sin(3 * columns)])
    return waves[None] + 0.5 * noise


@torch.no_grad()
def compute_torchvision_stages(
    state: Mapping[str, Tensor], arch: str, image: Tensor, stride_in_1x1: bool = False
) -> dict[str, Tensor]:
    """Compute res2..res5 by torchvision's ResNet with the weights ``state`` (torchvision's names)."""
    resnet = getattr(torchvision.models, arch)(weights=None)
    resnet.fc = nn.Identity()
    kernel = state["conv1.weight"].shape[-1]  # 3 in the CIFAR stem
    resnet.conv1 = nn.Conv2d(3, resnet.conv1.out_channels, kernel, 2, kernel // 2, bias=False)
    for block in resnet.modules():
        if isinstance(block, Bottleneck) and stride_in_1x1:
            block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
    resnet.load_state_dict(dict(state))
    return IntermediateLayerGetter(resnet.eval(), {f"layer{i}": f"res{i + 1}" for i in range(1, 5)})(image)


@torch.no_grad()
def compute_plain_stages(
    state: Mapping[str, Tensor], arch: str, image: Tensor, stride_in_1x1: bool = False
) -> dict[str, Tensor]:
    """Compute res2..res5 from Detectron2's names (no prefix) with nothing but convolutions."""
    conv = partial(_convolve, state)
    x = F.max_pool2d(F.relu(conv(image, "stem.conv1", 2)), 3, 2, 1)
    stages: dict[str, Tensor] = {}
    for stage, blocks in zip(RESNET_STAGES, DEPTHS[arch], strict=True):
        for block in range(blocks):
            name = f"{stage}.{block}"
            stride = 2 if block == 0 and stage != "res2" else 1
            identity = conv(x, f"{name}.shortcut", stride) if f"{name}.shortcut.weight" in state else x
            if is_bottleneck(arch):
                x = F.relu(conv(x, f"{name}.conv1", stride if stride_in_1x1 else 1))
                x = F.relu(conv(x, f"{name}.conv2", 1 if stride_in_1x1 else stride))
                x = conv(x, f"{name}.conv3")
            else:
                x = F.relu(conv(x, f"{name}.conv1", stride))
                x = conv(x, f"{name}.conv2")
            x = F.relu(x + identity)
        stages[stage] = x
    return stages


def _convolve(state: Mapping[str, Tensor], x: Tensor, name: str, stride: int = 1) -> Tensor:
    weight = state[f"{name}.weight"]
    x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
    mean = state[f"{name}.norm.running_mean"]
    var = state[f"{name}.norm.running_var"]
    return F.batch_norm(x, mean, var, state[f"{name}.norm.weight"], state[f"{name}.norm.bias"])


def check_features_agree(
    source: Mapping[str, Tensor], target: Mapping[str, Tensor], description: str = "the converted weights"
) -> dict[str, float]:
    """Return the largest difference per name, relative to the largest absolute value in the source.

    Args:
        description: names the target in the error.

    Raises:
        UserError: one differs by more than TOLERANCE, or is not finite.
    """
    errors: dict[str, float] = {}
    for name, expected in source.items():
        scale = expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        errors[name] = float((expected - target[name]).abs().max() / scale)
        if not errors[name] <= TOLERANCE:  # NaN fails, too
            text = f"{errors[name]:.1e} relative, above {TOLERANCE:.0e}"
            raise UserError(f"{name} of {description} differs by {text}; nothing was written")
    return errors
