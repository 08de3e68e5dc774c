"""The verification of a conversion notices other features, and its network is Detectron2's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from pretrain.common.resnet_names import is_bottleneck, to_detectron2
from tests.errors import refused
from tests.resnets import resnet_state
from transfer.convert import convert
from transfer.weights import verify


def test_other_features_are_refused() -> None:
    image, plain = verify.sample_image(), resnet_state(head=False)
    source = verify.torchvision_stages(plain, "resnet18", image)
    square = "layer3.1.conv1.weight"  # keeps its shape when transposed
    damaged = to_detectron2({**plain, square: plain[square].transpose(0, 1)}, "resnet18")
    refused(lambda: verify.compare(source, verify.plain_stages(damaged, "resnet18", image)), "res4 of the converted")


def test_another_stride_is_refused() -> None:
    """The weights are equal; a bottleneck that strides in its first convolution computes other features."""
    image, plain = verify.sample_image()[..., :64, :64], resnet_state("resnet50", head=False)
    source = verify.torchvision_stages(plain, "resnet50", image, stride_in_1x1=True)
    names = to_detectron2(plain, "resnet50")
    assert verify.compare(source, verify.plain_stages(names, "resnet50", image, stride_in_1x1=True))
    refused(lambda: verify.compare(source, verify.plain_stages(names, "resnet50", image)), "res3 of the converted")


@pytest.mark.detectron2
@pytest.mark.parametrize(("arch", "suffix"), [("resnet18", ".pth"), ("resnet50", ".pkl")])
def test_detectron2_reads_a_converted_file_and_computes_the_same(tmp_path: Path, arch: str, suffix: str) -> None:
    from detectron2.checkpoint import DetectionCheckpointer
    from detectron2.modeling.backbone.resnet import BasicStem, ResNet

    state = resnet_state(arch, head=False)
    torch.save(state, tmp_path / "s.pth")
    convert(tmp_path / "s.pth", tmp_path / f"w{suffix}")
    keys: dict[str, Any] = {"stride_in_1x1": False} if is_bottleneck(arch) else {}
    blocks = ResNet.make_default_stages(int(arch.removeprefix("resnet")), norm="BN", **keys)
    resnet = ResNet(BasicStem(norm="BN"), blocks, out_features=list(verify.STAGES))
    holder = nn.Module()  # gives the tensors their full names, backbone.bottom_up.*
    holder.backbone = nn.Module()
    cast(nn.Module, holder.backbone).bottom_up = resnet
    DetectionCheckpointer(holder).load(str(tmp_path / f"w{suffix}"))
    image = verify.sample_image()
    with torch.no_grad():
        target = resnet.eval()(image)
    assert set(verify.compare(verify.torchvision_stages(state, arch, image), target)) == set(verify.STAGES)
