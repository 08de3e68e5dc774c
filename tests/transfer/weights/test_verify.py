"""The check of a conversion notices different features, and uses Detectron2's network."""

import pytest

from pretrain.common.weights.resnet_names import is_bottleneck, to_detectron2
from tests.errors import refused
from tests.resnets import detectron2_stages, resnet_state
from tests.transfer import tiny_coco
from transfer.weights import verify


def test_other_features_are_refused() -> None:
    image = verify.sample_image()
    plain = resnet_state(head=False)
    source = verify.compute_torchvision_stages(plain, "resnet18", image)
    square = "layer3.1.conv1.weight"  # keeps its shape when transposed
    damaged = to_detectron2({**plain, square: plain[square].transpose(0, 1)}, "resnet18")
    target = verify.compute_plain_stages(damaged, "resnet18", image)
    refused(lambda: verify.check_features_agree(source, target), "res4")


def test_another_stride_is_refused() -> None:
    """With equal weights, a bottleneck that strides in its first convolution computes other features."""
    image = verify.sample_image()[..., :64, :64]
    plain = resnet_state("resnet50", head=False)
    source = verify.compute_torchvision_stages(plain, "resnet50", image, stride_in_1x1=True)
    names = to_detectron2(plain, "resnet50")
    target = verify.compute_plain_stages(names, "resnet50", image, stride_in_1x1=True)
    assert verify.check_features_agree(source, target)
    target = verify.compute_plain_stages(names, "resnet50", image)
    refused(lambda: verify.check_features_agree(source, target), "res3")


@pytest.mark.detectron2
@pytest.mark.parametrize(("arch", "suffix"), [("resnet18", ".pth"), ("resnet50", ".pkl")])
def test_detectron2_reads_a_converted_file_and_computes_the_same(tmp_path, arch: str, suffix: str) -> None:
    state = resnet_state(arch, head=False)
    image = verify.sample_image()
    path = tiny_coco.write_backbone(tmp_path, arch, name=f"w{suffix}")
    keys = {"stride_in_1x1": False} if is_bottleneck(arch) else {}
    target = detectron2_stages(path, int(arch[6:]), "BN", image, **keys)
    source = verify.compute_torchvision_stages(state, arch, image)
    assert set(verify.check_features_agree(source, target)) == set(verify.RESNET_STAGES)
