"""Caffe2's names -> Detectron2's, for MSRA's ResNet-50 and ResNet-101 (`detectron2://ImageNetPretrained/MSRA/*.pkl`).

Caffe2                         Detectron2
conv1_w                        stem.conv1.weight
res_conv1_bn_gamma (or _s)     stem.conv1.norm.weight
res_conv1_bn_beta (or _b)      stem.conv1.norm.bias
res2_0_branch2a_w              res2.0.conv1.weight
res3_0_branch1_bn_running_var  res3.0.shortcut.norm.running_var

Detectron2's files contain a batch norm's four tensors (gamma, beta, running_mean, running_var). Files of Detectron, its
predecessor, contain two (s, b), into which the statistics are folded: such a network is the same with FrozenBN only.
"""

import dataclasses
from functools import cache

import torch

from pretrain.common.weights.file import COUNTER, WeightsFile
from pretrain.common.weights.provenance import Provenance
from pretrain.common.weights.resnet_names import build_name_table

_BRANCHES = {"shortcut": "branch1", "conv1": "branch2a", "conv2": "branch2b", "conv3": "branch2c"}
_NORM = {"weight": ("gamma", "s"), "bias": ("beta", "b")}


def from_caffe2(file: WeightsFile) -> WeightsFile:
    """Rename the tensors to Detectron2's names; return the file with its provenance.

    A file without Caffe2's names is returned unchanged. The classifier, the optimizer's momentum and the
    convolutions' biases are dropped, as Detectron2 drops them. Other unknown names stay, for the reader to reject.
    """
    table, dropped = _names()
    prefix = next((name.removesuffix("conv1_w") for name in file.tensors if name.split(".")[-1] == "conv1_w"), None)
    if prefix is None:
        return file
    tensors = {name.removeprefix(prefix): tensor for name, tensor in file.tensors.items()}
    dropped = dropped | {name for name in tensors if name.endswith("_momentum")}
    state = {table.get(name, name): tensor for name, tensor in tensors.items() if name not in dropped}
    folded = not any(".norm.running_" in name for name in state)
    if folded:
        for name, scale in [item for item in state.items() if item[0].endswith(".norm.weight")]:
            norm = name.removesuffix("weight")
            # Detectron2 also loads these if a file lacks them; with eps, FrozenBN then divides by sqrt(1 + 1e-5).
            state |= {f"{norm}running_mean": torch.zeros_like(scale), f"{norm}running_var": torch.ones_like(scale)}
    return dataclasses.replace(file, tensors=state, provenance=Provenance.from_caffe2(folded=folded))


@cache
def _names() -> tuple[dict[str, str], set[str]]:
    """Return a table of Caffe2's names -> Detectron2's, and the names of tensors that are dropped."""
    table: dict[str, str] = {}
    dropped = {"fc1000_w", "fc1000_b"}
    for name in build_name_table("resnet101").values():  # a ResNet-50 has some of them
        layer, _, leaf = name.rpartition(".")
        *block, conv = layer.removesuffix(".norm").split(".")
        blob = conv if block == ["stem"] else "_".join([*block, _BRANCHES[conv]])
        if not layer.endswith(".norm"):
            table[f"{blob}_w"] = name
            dropped.add(f"{blob}_b")
        elif leaf != COUNTER:
            norm = "res_conv1_bn" if block == ["stem"] else f"{blob}_bn"
            table.update({f"{norm}_{alias}": name for alias in _NORM.get(leaf, (leaf,))})
    return table, dropped
