"""Random ResNets and checkpoints of them, for tests of everything that reads, converts or loads weights."""

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor, nn

from pretrain.common.run.state import update_state
from pretrain.config import load_config


def resnet_state(arch: str = "resnet18", seed: int = 0, head: bool = True) -> dict[str, Tensor]:
    """Build a random ResNet; its BN statistics are random too, because defaults would hide a swap."""
    return {
        k: v.clone()
        for k, v in _resnet_state(getattr(torchvision.models, arch), seed).items()
        if head or not k.startswith("fc.")
    }


@functools.cache
def _resnet_state(build: Callable[..., nn.Module], seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model = build(weights=None, num_classes=8)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.0)
            nn.init.normal_(module.bias, std=0.1)
            module.get_buffer("running_mean").normal_(std=0.1)
            module.get_buffer("running_var").uniform_(0.5, 2.0)
            module.get_buffer("num_batches_tracked").fill_(7)
    return model.state_dict()


def write_run(folder: Path, arch: str, keys: Sequence[str] = ()) -> None:
    """Write a run folder of pretraining with random encoders of seeds 0 (query) and 1 (key)."""
    folder.mkdir(parents=True)
    config = load_config(None, ["METHOD.NAME", "jcl", "MODEL.ARCH", arch, "DATA.TRAIN", "cifar10", *keys])
    file = {**moco(resnet_state(arch), resnet_state(arch, seed=1)), "arch": arch, "step": 700, "config": config.dump()}
    torch.save(file, folder / "checkpoint_final.pth")
    update_state(folder, stage="pretrain")


def caffe2(folded: bool = False) -> dict[str, np.ndarray]:
    """Build a random ResNet-50 in Caffe2's names, with a bias in its first convolution and a classifier, as MSRA's has.

    Args:
        folded: a batch norm has a scale and a bias only, as in Detectron's file; Detectron2's has statistics, too.
    """
    norm = {"weight": "s", "bias": "b"} if folded else {"weight": "gamma", "bias": "beta"}
    arrays = {"conv1_b": np.ones(64, np.float32)}
    for name, tensor in resnet_state("resnet50").items():
        block = re.sub(r"layer(\d)\.(\d+)\.", lambda m: f"res{int(m[1]) + 1}_{m[2]}_", name)
        block = block.replace("downsample.0", "branch1").replace("downsample.1", "branch1_bn")
        block = re.sub(r"_conv(\d)", lambda m: f"_branch2{'abc'[int(m[1]) - 1]}", block)
        block = re.sub(r"_bn(\d)", lambda m: f"_branch2{'abc'[int(m[1]) - 1]}_bn", block)
        layer, _, part = block.replace("bn1.", "res_conv1_bn.").replace("fc.", "fc1000.").rpartition(".")
        if part != "num_batches_tracked" and not (folded and part.startswith("running_")):
            suffix = norm.get(part, part) if layer.endswith("_bn") else part[0]
            arrays[f"{layer}_{suffix}"] = tensor.numpy()
    return arrays


def detectron2_stages(path: str | Path, depth: int, norm: str, image: Tensor, **keys: Any) -> dict[str, Tensor]:
    """Compute res2-res5 of Detectron2's ResNet in evaluation mode, with a file that its own checkpointer loads."""
    from detectron2.checkpoint import DetectionCheckpointer
    from detectron2.modeling.backbone.resnet import BasicStem, ResNet

    blocks = ResNet.make_default_stages(depth, norm=norm, **keys)
    resnet = ResNet(BasicStem(norm=norm), blocks, out_features=["res2", "res3", "res4", "res5"])
    # Gives the tensors their full names, backbone.bottom_up.*
    DetectionCheckpointer(nn.ModuleDict({"backbone": nn.ModuleDict({"bottom_up": resnet})})).load(str(path))
    with torch.no_grad():
        return resnet.eval()(image)


def moco(query: dict[str, Tensor], key: dict[str, Tensor], wrapper: str = "") -> dict[str, Any]:
    """Build a checkpoint of pretraining, in MoCo's format."""
    state = {f"module.encoder_q.{wrapper}{k}": v for k, v in query.items()}
    state |= {f"module.encoder_k.{wrapper}{k}": v for k, v in key.items()}
    state |= {"module.queue": torch.zeros(8, 16), "module.queue_ptr": torch.zeros(1, dtype=torch.long)}
    return {"epoch": 200, "arch": "resnet18", "state_dict": state, "optimizer": {"state": {}, "param_groups": []}}
