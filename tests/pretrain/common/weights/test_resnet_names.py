"""The name table is a bijection between torchvision's ResNets and Detectron2's."""

import pytest
import torchvision

from pretrain.common.weights.resnet_names import build_name_table, is_bottleneck, to_detectron2, to_torchvision
from transfer.weights.verify import RESNET_STAGES

ARCHS = ("resnet18", "resnet34", "resnet50", "resnet101")


@pytest.mark.parametrize("arch", ARCHS)
def test_names_are_a_bijection_onto_detectron2s(arch: str) -> None:
    table = build_name_table(arch)
    expected = [name for name in getattr(torchvision.models, arch)().state_dict() if not name.startswith("fc.")]
    assert list(table) == expected
    assert len(set(table.values())) == len(table)
    assert to_torchvision(to_detectron2({name: name for name in table}, arch)) == {name: name for name in table}


@pytest.mark.detectron2
@pytest.mark.parametrize("arch", ARCHS)
def test_names_are_those_of_detectron2(arch: str) -> None:
    from detectron2.modeling.backbone.resnet import BasicStem, ResNet

    keys = {"stride_in_1x1": False} if is_bottleneck(arch) else {}
    stages = ResNet.make_default_stages(int(arch.removeprefix("resnet")), norm="BN", **keys)
    theirs = ResNet(BasicStem(norm="BN"), stages, out_features=list(RESNET_STAGES)).state_dict()
    assert set(build_name_table(arch).values()) == set(theirs)
