"""FLOPs, saved activations and parameters in closed form are those of torch."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.detection import build_step, draw_batch
from pretrain.model.encoder import build_backbone
from tools.estimates import detection
from tools.estimates.networks import Work, count_resnet, count_resnet_parameters
from transfer.config import load_config

IMAGES = 2


@pytest.mark.parametrize(
    ("depth", "size", "stem"),
    [(18, 64, "imagenet"), (34, 65, "imagenet"), (50, 96, "imagenet"), (101, 64, "imagenet"), (50, 28, "cifar")],
)
def test_a_resnet_is_counted_as_torch_counts_it(depth: int, size: int, stem: str) -> None:
    network = build_backbone(f"resnet{depth}", stem).train()
    images = torch.zeros(IMAGES, 3, size, size)
    total = sum((stage.work for stage in count_resnet(depth, size, size, stem)), Work())
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(images)
    assert total.flops * IMAGES == counter.get_total_flops()
    assert total.saved * 4 * IMAGES == pytest.approx(count_saved_bytes(network, images), rel=0.025)
    if stem == "imagenet":
        assert count_resnet_parameters(depth) == sum(parameter.numel() for parameter in network.parameters())


def count_saved_bytes(network: nn.Module, images: torch.Tensor) -> int:
    """Count the bytes that torch keeps for the backward pass, besides weights and buffers."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*network.parameters(), *network.buffers())}
    sizes: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # so that no memory is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        network(images)
    return sum(sizes.values())


def test_a_detector_is_counted_as_torch_counts_it() -> None:
    """Boxes alone: the regions of the mask head are at most a quarter, and fewer on most images."""
    small = "MODEL.RESNETS.DEPTH 18 MODEL.RESNETS.RES2_OUT_CHANNELS 64 MODEL.FPN.OUT_CHANNELS 64 MODEL.DEVICE cpu"
    sizes = "INPUT.MIN_SIZE_TRAIN (128,) INPUT.MAX_SIZE_TRAIN 128 MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE 64"
    norms = "MODEL.RESNETS.NORM BN MODEL.FPN.NORM BN"
    cfg = load_config("configs/coco_R50_FPN_1x.yaml", f"{small} {sizes} {norms}".split())
    _, step = build_step("torchvision", cfg, [draw_batch(1, 128, 128, cfg)])
    with FlopCounterMode(display=False) as counter:
        step()
    expected = detection.count_training_flops(detection.describe(cfg))
    assert expected == pytest.approx(counter.get_total_flops(), rel=0.03)
