"""Files in the layouts of public projects; in each, the ResNet to be read is filled with 1, the key encoder's with 2.

A tensor has one value in memory, so that a file is small. `docs/reference/layouts.md` lists how each is read.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from pretrain.common.weights.resnet_names import to_detectron2, to_transformers

State = dict[str, Tensor]
HEAD = torch.zeros(2, 2)


def resnet(value: float = 1, arch: str = "resnet18", **options: Any) -> State:
    """A ResNet without classifier, filled with a value."""
    shapes = _shapes(getattr(torchvision.models, arch), **options)
    return {name: torch.tensor(value, dtype=dtype).expand(shape) for name, (dtype, shape) in shapes.items()}


@functools.cache
def _shapes(build: Callable[..., nn.Module], **options: Any) -> dict[str, tuple[torch.dtype, torch.Size]]:
    with torch.device("meta"):
        state = build(weights=None, **options).state_dict()
    return {name: (t.dtype, t.shape) for name, t in state.items() if not name.startswith("fc.")}


def cifar(state: State) -> State:
    """The ResNet with a 3x3 stem."""
    return state | {"conv1.weight": state["conv1.weight"][..., :3, :3]}


def under(prefix: str, state: State) -> State:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def heads(*names: str) -> State:
    return dict.fromkeys(names, HEAD)


def sequential(prefix: str, state: State, first: int = 4) -> State:
    """The names in a Sequential of torchvision's children; ``first``: the position of layer1."""
    positions = {"conv1": 0, "bn1": 1, **{f"layer{i}": first + i - 1 for i in range(1, 5)}}
    return {f"{prefix}{positions[part]}.{rest}": t for n, t in state.items() for part, _, rest in [n.partition(".")]}


def shortcut(state: State) -> State:
    return {name.replace("downsample", "shortcut"): tensor for name, tensor in state.items()}


def detectron2(state: State, arch: str = "resnet18") -> State:
    return to_detectron2(state, arch)


def c4(state: State) -> State:
    """A Detectron2 detector whose last stage is in its head."""
    return {
        f"roi_heads.{name}" if name.startswith("res5") else f"backbone.{name}": tensor
        for name, tensor in detectron2(state, "resnet50").items()
    } | heads("roi_heads.res5.norm.weight", "roi_heads.box_predictor.cls_score.weight")


def hugging_face(prefix: str, state: State) -> State:
    return {f"{prefix}{to_transformers(name)}": tensor for name, tensor in detectron2(state).items()}


def simclr_v2(state: State) -> State:
    renamed = {}
    for name, tensor in state.items():
        name = re.sub(r"^conv1\.", "net.0.0.", re.sub(r"^bn1\.", "net.0.1.0.", name))
        name = re.sub(r"^layer(\d)\.(\d+)\.", r"net.\1.blocks.\2.", name)
        name = re.sub(r"\.conv(\d)\.", lambda m: f".net.{2 * int(m[1]) - 2}.", name)
        name = re.sub(r"\.bn(\d)\.", lambda m: f".net.{2 * int(m[1]) - 1}.0.", name)
        renamed[name.replace("downsample.0", "projection.shortcut").replace("downsample.1", "projection.bn.0")] = tensor
    return renamed


def pycontrast(*names: str) -> dict[str, Any]:
    model = under("module.encoder.", resnet()) | heads("module.head.0.weight", *names)
    return {"opt": argparse.Namespace(arch="resnet18"), "model": model, "contrast": {"memory": HEAD}, "epoch": 800}


def moco(*names: str) -> dict[str, Any]:
    pair = under("module.encoder_q.", resnet()) | under("module.encoder_k.", resnet(2))
    more = heads("module.encoder_q.fc.0.weight", "module.encoder_k.fc.0.weight", "module.queue", *names)
    return {"epoch": 200, "arch": "resnet18", "state_dict": pair | more, "optimizer": {"state": {0: {"exp_avg": HEAD}}}}


def lightning(state: State) -> dict[str, Any]:
    callbacks = {"ModelCheckpoint{'monitor': None}": {"best_model_path": "", "best_k_models": {}}}
    optimizer = {"state": {0: {"momentum_buffer": HEAD}}, "param_groups": [{"lr": 0.1}]}
    return {"epoch": 9, "global_step": 90, "pytorch-lightning_version": "2.6.6", "state_dict": state, "loops": {},
            "callbacks": callbacks, "optimizer_states": [optimizer], "hyper_parameters": {"lr": 0.1}}  # fmt: skip


def lightly(*names: str, pair: bool = True) -> dict[str, Any]:
    key = sequential("backbone_momentum.", resnet(2)) if pair else {}
    return lightning(sequential("backbone.", resnet()) | key | heads("projection_head.layers.0.weight", *names))


def solo_learn(*names: str, pair: bool = True) -> dict[str, Any]:
    key = under("momentum_backbone.", resnet(2)) if pair else {}
    return lightning(under("backbone.", resnet()) | key | heads("classifier.weight", "projector.0.weight", *names))


def densecl(*, with_copy: bool) -> State:
    pair = under("encoder_q.0.", resnet()) | under("encoder_k.0.", resnet(2))
    copy = under("backbone.", resnet()) if with_copy else {}
    return pair | copy | heads("queue", "queue2", "encoder_q.1.mlp.0.weight", "encoder_k.1.mlp.0.weight")


LAYOUTS: dict[str, Callable[[], Any]] = {
    "Barlow Twins, training checkpoint": lambda: {
        "epoch": 9, "optimizer": {},
        "model": under("module.backbone.", resnet()) | heads("module.projector.0.weight", "module.bn.running_mean"),
    },
    "Barlow Twins, VICReg: released backbones": resnet,
    "BYOL and SimCLR v1, converted": lambda: {"state_dict": resnet() | heads("fc.weight")},
    "byol-pytorch": lambda: under("online_encoder.net.", resnet()) | under("target_encoder.net.", resnet(2))
    | heads("online_predictor.0.weight"),
    "DeepSpeed, mp_rank_00_model_states.pt": lambda: {"module": resnet(), "buffer_names": [], "global_steps": 5},
    "DenseCL and OpenSelfSup, training checkpoint": lambda: {"meta": {}, "state_dict": densecl(with_copy=True)},
    "DenseCL, released": lambda: {"state_dict": under("", resnet()), "author": "DenseCL"},
    "Detectron2, backbone": lambda: {"model": detectron2(resnet()) | heads("stem.fc.weight", "stem.fc.bias")},
    "Detectron2, detector with C4": lambda: {"model": c4(resnet(arch="resnet50")), "iteration": 9},
    "Detectron2, detector with FPN": lambda: {
        "model": under("backbone.bottom_up.", detectron2(resnet()))
        | heads("backbone.fpn_lateral2.weight", "proposal_generator.rpn_head.conv.weight", "roi_heads.mask_head.x"),
        "optimizer": {"state": {}}, "iteration": 9,
    },
    "DETR": lambda: {"model": under("backbone.0.body.", resnet(arch="resnet50"))
                     | heads("transformer.encoder.layers.0.norm1.weight", "class_embed.weight")},
    "DINO, released backbone": lambda: resnet(arch="resnet50"),
    "DINO, training checkpoint": lambda: {
        "student": under("module.backbone.", resnet()) | heads("module.head.mlp.0.weight"),
        "teacher": under("backbone.", resnet(2)) | heads("head.mlp.0.weight"), "epoch": 100,
        "dino_loss": heads("center"),
    },
    "fastai": lambda: {"model": sequential("0.", resnet()) | heads("1.2.weight"), "opt": {"state": []}},
    "Hugging Face, classifier": lambda: hugging_face("resnet.", resnet()) | heads("classifier.1.weight"),
    "Hugging Face, backbone; our own export": lambda: hugging_face("", resnet()),
    "InsDis, InfoMin": pycontrast,
    "JCL, MoCo v1 and v2, PCL": moco,
    "kuangliu/pytorch-cifar": lambda: {
        "net": under("module.", shortcut(cifar(resnet())) | heads("linear.weight")),
        "acc": 95.1, "epoch": 9,
    },
    "leftthomas/SimCLR": lambda: sequential("f.", cifar(resnet()), 3) | heads("g.0.weight"),
    "lightly, BYOL": lambda: lightly("prediction_head.layers.0.weight", "projection_head_momentum.layers.0.weight"),
    "lightly, DenseCL": lambda: lightly("projection_head_global.layers.0.weight", "projection_head_local.layers.0.x"),
    "lightly, MoCo": lambda: lightly("projection_head_momentum.layers.0.weight", "criterion.memory_bank.bank"),
    "lightly, ResNetGenerator": lambda: lightning(
        sequential("backbone.", shortcut(cifar(resnet())), 2) | heads("projection_head.x")),
    "lightly, SimCLR": lambda: lightly(pair=False),
    "lightly, SimSiam": lambda: lightly("prediction_head.layers.0.weight", pair=False),
    "lightly, SwAV": lambda: lightly("prototypes.heads.0.weight", pair=False),
    "lightly, benchmarks": lambda: lightning(
        under("backbone.", resnet()) | heads("projection_head.layers.0.weight", "online_classifier.head.weight")),
    "Lightning, module named model": lambda: lightning(under("model.", resnet()) | heads("model.fc.weight")),
    "Lightning, module named net": lambda: lightning(under("net.", resnet())),
    "Lightning, module named resnet": lambda: lightning(under("resnet.", resnet()) | heads("head.weight")),
    "Lightning, module named encoder": lambda: lightning(under("encoder.", resnet()) | heads("decoder.conv1.weight")),
    "mmdetection": lambda: {"meta": {"epoch": 12}, "state_dict": under("backbone.", resnet(arch="resnet50")) | heads(
        "neck.lateral_convs.0.conv.weight", "rpn_head.rpn_conv.weight", "roi_head.bbox_head.fc_cls.weight")},
    "mmpretrain, classifier": lambda: {"state_dict": under("backbone.", resnet()) | heads("head.fc.weight")},
    "mmpretrain and mmselfsup 1.x, BYOL": lambda: {
        "state_dict": under("backbone.", resnet()) | under("target_net.module.0.", resnet(2))
        | heads("neck.fc0.weight", "head.predictor.fc0.weight", "target_net.module.1.fc0.weight")},
    "mmpretrain and mmselfsup 1.x, MoCo": lambda: {
        "state_dict": under("backbone.", resnet()) | under("encoder_k.module.0.", resnet(2))
        | heads("neck.mlp.0.weight", "encoder_k.steps", "encoder_k.module.1.mlp.0.weight", "queue", "queue_ptr")},
    "mmselfsup 0.x, MoCo": lambda: {"meta": {}, "state_dict": densecl(with_copy=False)},
    "MoCo, demo on CIFAR": lambda: {"epoch": 9, "state_dict": sequential("encoder_q.net.", resnet(), 3)
                                    | sequential("encoder_k.net.", resnet(2), 3)
                                    | heads("encoder_q.net.9.weight", "queue")},
    "MoCo v3": lambda: {
        "arch": "resnet18", "state_dict": under("module.base_encoder.", resnet())
        | under("module.momentum_encoder.", resnet(2)) | heads("module.predictor.0.weight")},
    "PIRL": lambda: pycontrast("module.head_jig.fc1.weight", "module.jigsaw.fc2.weight"),
    "PixPro": lambda: {"model": under("module.encoder.", resnet()) | under("module.encoder_k.", resnet(2))
                       | heads("module.projector.linear1.weight", "module.projector_k.linear1.weight"), "epoch": 100},
    "PyTorch's tutorials": lambda: {"epoch": 4, "model_state_dict": resnet() | heads("fc.weight"), "loss": 0.3,
                                    "optimizer_state_dict": {"state": {}}},
    "PyTorch, DistributedDataParallel": lambda: {"state_dict": under("module.", resnet())},
    "PyTorch, torch.compile": lambda: under("_orig_mod.module.", resnet()),
    "ReSSL": lambda: {"model": under("module.encoder_q.net.", resnet()) | under("module.encoder_k.net.", resnet(2))
                      | heads("module.encoder_q.head.0.weight", "module.queue")},
    "SCE (eztorch)": lambda: lightning(under("trunk.", resnet()) | under("momentum_trunk.", resnet(2))
                                       | heads("projector.0.weight", "momentum_projector.0.weight", "queue")),
    "SimCLR v2, converted": lambda: {"resnet": simclr_v2(resnet()), "head": heads("layers.0.weight")},
    "SimSiam": lambda: {"arch": "resnet18", "state_dict": under("module.encoder.", resnet())
                        | heads("module.encoder.fc.0.weight", "module.predictor.0.weight")},
    "solo-learn, DINO": lambda: solo_learn("head.mlp.0.weight", "momentum_head.mlp.0.weight", "dino_loss_func.center"),
    "solo-learn, MoCo": lambda: solo_learn("momentum_projector.0.weight", "queue"),
    "solo-learn, NNCLR": lambda: solo_learn("queue", "queue_y", pair=False),
    "sthalles/SimCLR": lambda: {"epoch": 9, "arch": "resnet18",
                                "state_dict": under("backbone.", resnet()) | heads("backbone.fc.0.weight")},
    "SupContrast": lambda: {"opt": argparse.Namespace(), "epoch": 10, "model": under(
        "encoder.module.", shortcut(cifar(resnet()))) | heads("head.0.weight")},
    "SwAV, DeepCluster v2, SeLa v2": lambda: under("module.", resnet()) | heads(
        "module.projection_head.0.weight", "module.projection_head.1.running_var", "module.prototypes.weight"),
    "TCL": lambda: {"net": shortcut(cifar(resnet())), "acc": 71.2, "save_epoch": 49},
    "timm": lambda: resnet() | heads("fc.weight", "fc.bias"),
    "torchvision": lambda: resnet(arch="resnet34") | heads("fc.weight", "fc.bias"),
    "torchvision, detector": lambda: {"model": under("backbone.body.", resnet()) | heads(
        "backbone.fpn.inner_blocks.0.0.weight", "rpn.head.cls_logits.weight", "roi_heads.box_head.fc6.weight")},
    "VICReg, training checkpoint": lambda: {"epoch": 9, "model": under("module.backbone.", resnet())
                                            | heads("module.projector.0.weight")},
    "VISSL": lambda: {"phase": 9, "classy_state_dict": {"base_model": {"meta": {}, "model": {
        "trunk": under("_feature_blocks.", resnet()), "heads": heads("0.clf.0.weight")}}}},
}  # fmt: skip
