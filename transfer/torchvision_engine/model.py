r"""Faster, Mask and Keypoint R-CNN with FPN of torchvision's pieces; equal weights give Detectron2's numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from fvcore.common.config import CfgNode
from fvcore.nn.distributed import differentiable_all_reduce
from torch import Tensor, nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead
from torchvision.models.detection.keypoint_rcnn import KeypointRCNNHeads, KeypointRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RPNHead
from torchvision.models.resnet import Bottleneck, ResNet
from torchvision.ops import FeaturePyramidNetwork, FrozenBatchNorm2d
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from .. import resnet_names
from .roi_heads import BoxPredictor, RoIHeads
from .rpn import Anchors, RegionProposals, RoIPooler

_STRIDES = (4, 8, 16, 32, 64)  # of p2 .. p6


class Detector(nn.Module):
    """Images to losses (with targets, in training) or to detections.

    Args:
        arch: torchvision's name of the ResNet in ``body``.
        body: images to the maps of res2 .. res5.
        fpn: these to p2 .. p6.
        mean, std: of the pixels, in the order of the image's channels.
    """

    def __init__(
        self,
        arch: str,
        body: nn.Module,
        fpn: nn.Module,
        rpn: RegionProposals,
        roi_heads: RoIHeads,
        mean: list[float],
        std: list[float],
    ) -> None:
        super().__init__()
        self.arch = arch
        self.body, self.fpn, self.rpn, self.roi_heads = body, fpn, rpn, roi_heads
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, batch: list[dict[str, Any]]) -> Any:
        """A dictionary of losses in training, a list of detections (pixels of the resized image) otherwise.

        Args:
            batch: ``image`` (3, H, W) uint8 and, in training, ``target`` (see torchvision_roi_heads).
        """
        images, sizes = self.preprocess([record["image"] for record in batch])
        features = list(self.fpn(self.body(images)).values())
        if not self.training:
            proposals, _ = self.rpn(sizes, features)
            return self.roi_heads.detect(features, proposals, sizes)
        targets = [{k: _to(v, self.mean.device) for k, v in record["target"].items()} for record in batch]
        proposals, losses = self.rpn(sizes, features, targets)
        return {**losses, **self.roi_heads.losses(features, proposals, targets)}

    def preprocess(self, images: list[Tensor]) -> tuple[Tensor, list[tuple[int, int]]]:
        """Normalised images, zero-padded at the right and below to one size divisible by 32, and their (H, W)."""
        sizes = [(image.shape[-2], image.shape[-1]) for image in images]
        height, width = (-(-max(side) // 32) * 32 for side in zip(*sizes, strict=True))
        batch = self.mean.new_zeros(len(images), 3, height, width)
        for slot, image, (h, w) in zip(batch, images, sizes, strict=True):
            slot[:, :h, :w] = (image.to(self.mean.device, non_blocking=True) - self.mean) / self.std
        return batch, sizes


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


class ProcessSyncBatchNorm(nn.BatchNorm2d):
    """Batch norm over all processes on a CPU, where torch.nn.SyncBatchNorm does not run; equals it on one process."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(input)
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        count = differentiable_all_reduce(input.new_tensor([input.numel() / input.shape[1]]))
        mean = differentiable_all_reduce(input.sum((0, 2, 3))) / count
        centred = input - mean[:, None, None]
        var = differentiable_all_reduce(centred.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
            if self.num_batches_tracked is not None:
                self.num_batches_tracked += 1
        scale = (var + self.eps).rsqrt() * self.weight
        return centred * scale[:, None, None] + self.bias[:, None, None]


class FrozenBatchNorm(FrozenBatchNorm2d):
    """torchvision's, whose result has the input's type: under mixed precision theirs is float32 from there on."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, mean, var = map(self.get_buffer, ("weight", "bias", "running_mean", "running_var"))
        scale = weight * (var + self.eps).rsqrt()
        bias = bias - mean * scale
        return x * scale.to(x.dtype)[:, None, None] + bias.to(x.dtype)[:, None, None]


class SyncBatchNorm(nn.SyncBatchNorm):
    """PyTorch's; a rank without RoIs takes part in float32, as the other ranks' statistics are."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input if input.numel() else input.float())


def _frozen(channels: int) -> FrozenBatchNorm:
    norm = FrozenBatchNorm(channels)
    norm.get_buffer("running_var").sub_(norm.eps)  # the identity until weights are loaded
    return norm


def _norm(name: str, on_cuda: bool) -> Callable[[int], nn.Module] | None:
    """Detectron2's name of a norm -> a function of the channels, or None for no norm."""
    one_process = not dist.is_initialized() or dist.get_world_size() == 1
    sync = nn.BatchNorm2d if one_process else SyncBatchNorm if on_cuda else ProcessSyncBatchNorm
    return {
        "": None,
        "BN": nn.BatchNorm2d,
        "SyncBN": sync,
        "FrozenBN": _frozen,
        "GN": partial(nn.GroupNorm, 32),
    }[name]


def build_model(cfg: CfgNode, device: torch.device) -> Detector:
    """The detector of ``cfg`` (checked by config.check_supported), randomly initialised as in Detectron2."""
    model, on_cuda = cfg.MODEL, device.type == "cuda"
    body, channels = _body(model, on_cuda)
    fpn = FeaturePyramidNetwork(channels, model.FPN.OUT_CHANNELS, LastLevelMaxPool(), _norm(model.FPN.NORM, on_cuda))
    roi_heads = _roi_heads(model, cfg.TEST.DETECTIONS_PER_IMAGE, on_cuda)
    arch = f"resnet{model.RESNETS.DEPTH}"
    return Detector(arch, body, fpn, _rpn(model), roi_heads, model.PIXEL_MEAN, model.PIXEL_STD).to(device)


def _body(model: CfgNode, on_cuda: bool) -> tuple[nn.Module, list[int]]:
    """torchvision's ResNet up to res5 and the channels of its four stages."""
    settings = model.RESNETS
    resnet: ResNet = getattr(torchvision.models, f"resnet{settings.DEPTH}")(
        norm_layer=_norm(settings.NORM, on_cuda), groups=settings.NUM_GROUPS, width_per_group=settings.WIDTH_PER_GROUP
    )
    stages = [resnet.layer1, resnet.layer2, resnet.layer3, resnet.layer4]
    for block in (block for stage in stages for block in stage):
        if isinstance(block, Bottleneck) and settings.STRIDE_IN_1X1:
            block.conv1.stride, block.conv2.stride = block.conv2.stride, (1, 1)
    freeze_at = model.BACKBONE.FREEZE_AT
    for name in ["conv1", "bn1"] * (freeze_at >= 1) + [f"layer{i - 1}" for i in range(2, freeze_at + 1)]:
        setattr(resnet, name, _freeze(getattr(resnet, name)))
    body = IntermediateLayerGetter(resnet, {f"layer{i - 1}": f"p{i}" for i in range(2, 6)})
    expansion = 4 if settings.DEPTH >= 50 else 1
    return body, [64 * 2**i * expansion for i in range(4)]


def _freeze(module: nn.Module) -> nn.Module:
    """Parameters without gradient, batch norms as constants (fresh ones: weights are loaded later)."""
    if isinstance(module, (nn.BatchNorm2d, nn.SyncBatchNorm)):
        return _frozen(module.num_features)
    for name, child in module.named_children():
        setattr(module, name, _freeze(child))
    return module.requires_grad_(False)


def _rpn(model: CfgNode) -> RegionProposals:
    rpn, anchor = model.RPN, model.ANCHOR_GENERATOR
    anchors = Anchors(anchor.SIZES, anchor.ASPECT_RATIOS, _STRIDES, anchor.OFFSET)
    return RegionProposals(
        anchors,
        RPNHead(model.FPN.OUT_CHANNELS, anchors.num_anchors_per_location()[0]),
        box_weights=tuple(rpn.BBOX_REG_WEIGHTS),
        min_size=model.PROPOSAL_GENERATOR.MIN_SIZE,
        beta=rpn.SMOOTH_L1_BETA,
        loss_weight=rpn.LOSS_WEIGHT,
        box_loss_weight=rpn.BBOX_REG_LOSS_WEIGHT,
        fg_iou_thresh=rpn.IOU_THRESHOLDS[1],
        bg_iou_thresh=rpn.IOU_THRESHOLDS[0],
        batch_size_per_image=rpn.BATCH_SIZE_PER_IMAGE,
        positive_fraction=rpn.POSITIVE_FRACTION,
        pre_nms_top_n={"training": rpn.PRE_NMS_TOPK_TRAIN, "testing": rpn.PRE_NMS_TOPK_TEST},
        post_nms_top_n={"training": rpn.POST_NMS_TOPK_TRAIN, "testing": rpn.POST_NMS_TOPK_TEST},
        nms_thresh=rpn.NMS_THRESH,
    )


def _roi_heads(model: CfgNode, detections_per_image: int, on_cuda: bool) -> RoIHeads:
    heads, box, keypoint = model.ROI_HEADS, model.ROI_BOX_HEAD, model.ROI_KEYPOINT_HEAD
    shape = (model.FPN.OUT_CHANNELS, box.POOLER_RESOLUTION, box.POOLER_RESOLUTION)
    head = FastRCNNConvFCHead(shape, [box.CONV_DIM] * box.NUM_CONV, [box.FC_DIM] * box.NUM_FC, _norm(box.NORM, on_cuda))
    for layer in head:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_uniform_(layer.weight, a=1)
            nn.init.zeros_(layer.bias)
    width = box.FC_DIM if box.NUM_FC else (box.CONV_DIM if box.NUM_CONV else shape[0]) * box.POOLER_RESOLUTION**2
    normaliser = keypoint.NUM_KEYPOINTS * heads.BATCH_SIZE_PER_IMAGE * heads.POSITIVE_FRACTION
    return RoIHeads(
        box_pooler=RoIPooler(box.POOLER_RESOLUTION, box.POOLER_SAMPLING_RATIO),
        box_head=head,
        box_predictor=BoxPredictor(width, heads.NUM_CLASSES),
        mask=_mask_head(model, on_cuda) if model.MASK_ON else None,
        keypoint=_keypoint_head(model) if model.KEYPOINT_ON else None,
        num_classes=heads.NUM_CLASSES,
        iou_threshold=heads.IOU_THRESHOLDS[0],
        batch_size_per_image=heads.BATCH_SIZE_PER_IMAGE,
        positive_fraction=heads.POSITIVE_FRACTION,
        append_gt=heads.PROPOSAL_APPEND_GT,
        box_weights=tuple(box.BBOX_REG_WEIGHTS),
        beta=box.SMOOTH_L1_BETA,
        box_loss_weight=box.BBOX_REG_LOSS_WEIGHT,
        keypoint_loss_weight=keypoint.LOSS_WEIGHT,
        keypoint_normaliser=None if keypoint.NORMALIZE_LOSS_BY_VISIBLE_KEYPOINTS else normaliser,
        score_thresh=heads.SCORE_THRESH_TEST,
        nms_thresh=heads.NMS_THRESH_TEST,
        detections_per_image=detections_per_image,
    )


def _mask_head(model: CfgNode, on_cuda: bool) -> tuple[RoIPooler, nn.Module]:
    mask = model.ROI_MASK_HEAD
    convs = MaskRCNNHeads(
        model.FPN.OUT_CHANNELS, [mask.CONV_DIM] * mask.NUM_CONV, 1, norm_layer=_norm(mask.NORM, on_cuda)
    )
    last = mask.CONV_DIM if mask.NUM_CONV else model.FPN.OUT_CHANNELS
    predictor = MaskRCNNPredictor(last, mask.CONV_DIM, model.ROI_HEADS.NUM_CLASSES)
    nn.init.normal_(predictor.get_parameter("mask_fcn_logits.weight"), std=0.001)
    for name in ("conv5_mask.bias", "mask_fcn_logits.bias"):
        nn.init.zeros_(predictor.get_parameter(name))
    layers = nn.Sequential()
    layers.add_module("convs", convs)
    layers.add_module("predictor", predictor)
    return RoIPooler(mask.POOLER_RESOLUTION, mask.POOLER_SAMPLING_RATIO), layers


def _keypoint_head(model: CfgNode) -> tuple[RoIPooler, nn.Module]:
    keypoint = model.ROI_KEYPOINT_HEAD
    layers = nn.Sequential()
    layers.add_module("convs", KeypointRCNNHeads(model.FPN.OUT_CHANNELS, keypoint.CONV_DIMS))
    layers.add_module("predictor", KeypointRCNNPredictor(keypoint.CONV_DIMS[-1], keypoint.NUM_KEYPOINTS))
    return RoIPooler(keypoint.POOLER_RESOLUTION, keypoint.POOLER_SAMPLING_RATIO), layers


# This model's names -> Detectron2's outside the backbone (see resnet_names). A norm is `.1` beside its conv `.0`.
_NAMES: list[tuple[str, str | Callable[[re.Match], str]]] = [
    (r"fpn\.inner_blocks\.(\d)\.0\.", lambda m: f"backbone.fpn_lateral{int(m[1]) + 2}."),
    (r"fpn\.inner_blocks\.(\d)\.1\.", lambda m: f"backbone.fpn_lateral{int(m[1]) + 2}.norm."),
    (r"fpn\.layer_blocks\.(\d)\.0\.", lambda m: f"backbone.fpn_output{int(m[1]) + 2}."),
    (r"fpn\.layer_blocks\.(\d)\.1\.", lambda m: f"backbone.fpn_output{int(m[1]) + 2}.norm."),
    (r"rpn\.head\.conv\.0\.0\.", "proposal_generator.rpn_head.conv."),
    (r"rpn\.head\.cls_logits\.", "proposal_generator.rpn_head.objectness_logits."),
    (r"rpn\.head\.bbox_pred\.", "proposal_generator.rpn_head.anchor_deltas."),
    (r"roi_heads\.box_head\.(\d+)\.0\.", lambda m: f"roi_heads.box_head.conv{int(m[1]) + 1}."),
    (r"roi_heads\.box_head\.(\d+)\.1\.", lambda m: f"roi_heads.box_head.conv{int(m[1]) + 1}.norm."),
    (r"roi_heads\.box_predictor\.", "roi_heads.box_predictor."),
    (r"roi_heads\.mask_head\.convs\.(\d+)\.0\.", lambda m: f"roi_heads.mask_head.mask_fcn{int(m[1]) + 1}."),
    (r"roi_heads\.mask_head\.convs\.(\d+)\.1\.", lambda m: f"roi_heads.mask_head.mask_fcn{int(m[1]) + 1}.norm."),
    (r"roi_heads\.mask_head\.predictor\.conv5_mask\.", "roi_heads.mask_head.deconv."),
    (r"roi_heads\.mask_head\.predictor\.mask_fcn_logits\.", "roi_heads.mask_head.predictor."),
    (r"roi_heads\.keypoint_head\.convs\.(\d+)\.", lambda m: f"roi_heads.keypoint_head.conv_fcn{int(m[1]) // 2 + 1}."),
    (r"roi_heads\.keypoint_head\.predictor\.kps_score_lowres\.", "roi_heads.keypoint_head.score_lowres."),
]


def detectron2_names(model: Detector) -> dict[str, str]:
    """``{name here: Detectron2's name}`` of every tensor of the model's state; one to one."""
    backbone = resnet_names.names(model.arch)
    linears = [name for name, layer in model.roi_heads.box_head.named_children() if isinstance(layer, nn.Linear)]
    names = {}
    for name in model.state_dict():
        fully_connected = re.match(r"roi_heads\.box_head\.(\d+)\.(weight|bias)$", name)
        if name.startswith("body."):
            names[name] = f"backbone.bottom_up.{backbone[name.removeprefix('body.')]}"
        elif fully_connected:
            names[name] = f"roi_heads.box_head.fc{linears.index(fully_connected[1]) + 1}.{fully_connected[2]}"
        else:
            names[name] = next(re.sub(f"^{old}", new, name) for old, new in _NAMES if re.match(old, name))
    return names


def detectron2_state(model: Detector) -> dict[str, Tensor]:
    """The model's tensors under Detectron2's names; they share the model's storage."""
    state = model.state_dict()
    return {theirs: state[ours] for ours, theirs in detectron2_names(model).items()}
