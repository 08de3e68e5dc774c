"""Faster, Mask and Keypoint R-CNN with FPN: the same weights, under the same names, give Detectron2's numbers."""

from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from ..training.samplers import ModelInput
from .backbone import FPN, BottomUp
from .boxes import RoIPooler, Sample, match, subsample
from .heads import BoxHead, BoxPredictor, KeypointHead, MaskHead
from .layers import norm_layer
from .mapper import Target
from .rpn import RPN, Anchors, RPNHead

_STRIDES = (4, 8, 16, 32, 64)  # of p2 .. p6
_SIZE_MULTIPLE = 32  # padded sides are multiples, so that each level's side is half the previous one


class RoIHeads(nn.Module):
    """The second stage: losses of sampled proposals in training, detections otherwise.

    Args:
        iou_threshold: a proposal is foreground from this IoU with a ground-truth box on.
        positive_fraction: maximum fraction of foreground among the ``batch_size_per_image`` sampled proposals.
    """

    def __init__(
        self,
        box_head: BoxHead,
        box_predictor: BoxPredictor,
        mask_head: MaskHead | None,
        keypoint_head: KeypointHead | None,
        *,
        iou_threshold: float,
        batch_size_per_image: int,
        positive_fraction: float,
    ) -> None:
        super().__init__()
        self.box_head, self.box_predictor = box_head, box_predictor
        self.mask_head, self.keypoint_head = mask_head, keypoint_head
        self.iou_threshold, self.positive_fraction = iou_threshold, positive_fraction
        self.batch_size_per_image = batch_size_per_image

    def losses(self, features: list[Tensor], proposals: list[Tensor], targets: list[Target]) -> dict[str, Tensor]:
        """Compute the losses, under Detectron2's names."""
        samples = [self.sample(*image) for image in zip(proposals, targets, strict=True)]
        losses = self.box_predictor.losses(self.box_head(features, [s.boxes for s in samples]), samples)
        for head in filter(None, (self.mask_head, self.keypoint_head)):
            losses |= head.losses(features, samples)
        return losses

    @torch.no_grad()
    def sample(self, proposals: Tensor, target: Target) -> Sample:
        """Draw proposals of one image to train on; the ground-truth boxes are proposals, too."""
        proposals = torch.cat([proposals, target["boxes"]])
        index, label = match(target["boxes"], proposals, self.iou_threshold, self.iou_threshold, keep_best=False)
        foreground, background = subsample(label, self.batch_size_per_image, self.positive_fraction)
        matched = index[foreground]
        labels = torch.cat([target["labels"][matched], torch.full_like(background, self.box_predictor.num_classes)])
        return Sample(proposals[torch.cat([foreground, background])], labels, matched, target)

    def detect(
        self, features: list[Tensor], proposals: list[Tensor], image_sizes: list[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        """Return each image's ``boxes``, ``scores``, ``labels`` and, from other heads, ``masks`` or ``keypoints``."""
        detections = self.box_predictor.detect(self.box_head(features, proposals), proposals, image_sizes)
        boxes = [image["boxes"] for image in detections]
        labels = torch.cat([image["labels"] for image in detections])
        for head in filter(None, (self.mask_head, self.keypoint_head)):
            name, values = head.detect(features, boxes, labels)
            values_by_image = values.split([len(image_boxes) for image_boxes in boxes])
            for image, image_values in zip(detections, values_by_image, strict=True):
                image[name] = image_values
        return detections


class GeneralizedRCNN(nn.Module):
    """Images to losses (with targets, in training) or to detections.

    Args:
        mean, std: pixel statistics, in the order of the image's channels.
    """

    def __init__(
        self, backbone: FPN, proposal_generator: RPN, roi_heads: RoIHeads, mean: list[float], std: list[float]
    ) -> None:
        super().__init__()
        self.backbone, self.proposal_generator, self.roi_heads = backbone, proposal_generator, roi_heads
        self.pixel_mean: Tensor
        self.pixel_std: Tensor
        self.register_buffer("pixel_mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, batch: list[ModelInput]) -> Any:
        """Return a dictionary of losses in training, a list of detections (pixels of the resized image) otherwise."""
        images, sizes = self.preprocess([record["image"] for record in batch])
        features = self.backbone(images)
        if not self.training:
            proposals, _ = self.proposal_generator(features, sizes)
            return self.roi_heads.detect(features, proposals, sizes)
        targets: list[Any] = [
            {name: self._to_device(value) for name, value in record["target"].items()} for record in batch
        ]
        proposals, losses = self.proposal_generator(features, sizes, targets)
        return {**losses, **self.roi_heads.losses(features, proposals, targets)}

    def preprocess(self, images: list[Tensor]) -> tuple[Tensor, list[tuple[int, int]]]:
        """Normalize images and zero-pad them at the right and bottom to one size; return them and their (H, W)."""
        sizes = [(image.shape[-2], image.shape[-1]) for image in images]
        height = -(-max(h for h, _ in sizes) // _SIZE_MULTIPLE) * _SIZE_MULTIPLE
        width = -(-max(w for _, w in sizes) // _SIZE_MULTIPLE) * _SIZE_MULTIPLE
        batch = self.pixel_mean.new_zeros(len(images), 3, height, width)
        for slot, image, (h, w) in zip(batch, images, sizes, strict=True):
            slot[:, :h, :w] = (self._to_device(image) - self.pixel_mean) / self.pixel_std
        return batch, sizes

    def _to_device(self, value: Any) -> Any:
        """Move a tensor to the model's device; return anything else (polygons) unchanged."""
        return value.to(self.pixel_mean.device, non_blocking=True) if isinstance(value, Tensor) else value


def build_model(cfg: CfgNode, device: torch.device) -> GeneralizedRCNN:
    """Build the detector of ``cfg`` (checked by config.check_supported), randomly initialized as in Detectron2."""
    model = cfg.MODEL
    resnet = model.RESNETS
    norm = norm_layer(resnet.NORM, device)
    freeze_at = model.BACKBONE.FREEZE_AT
    bottom_up = BottomUp(f"resnet{resnet.DEPTH}", norm, stride_in_1x1=resnet.STRIDE_IN_1X1, freeze_at=freeze_at)
    backbone = FPN(bottom_up, model.FPN.OUT_CHANNELS, norm_layer(model.FPN.NORM, device))
    roi_heads = _build_roi_heads(cfg, device)  # before the RPN: the order of the random draws
    rpn = _build_rpn(model)
    return GeneralizedRCNN(backbone, rpn, roi_heads, model.PIXEL_MEAN, model.PIXEL_STD).to(device)


def _build_rpn(model: CfgNode) -> RPN:
    rpn = model.RPN
    anchors = Anchors(model.ANCHOR_GENERATOR.SIZES, model.ANCHOR_GENERATOR.ASPECT_RATIOS, _STRIDES)
    return RPN(
        anchors,
        RPNHead(model.FPN.OUT_CHANNELS, anchors.num_anchors_per_location()[0]),
        box_weights=rpn.BBOX_REG_WEIGHTS,
        iou_thresholds=rpn.IOU_THRESHOLDS,
        batch_size_per_image=rpn.BATCH_SIZE_PER_IMAGE,
        positive_fraction=rpn.POSITIVE_FRACTION,
        beta=rpn.SMOOTH_L1_BETA,
        min_size=model.PROPOSAL_GENERATOR.MIN_SIZE,
        nms_threshold=rpn.NMS_THRESH,
        pre_nms_top_n=(rpn.PRE_NMS_TOPK_TRAIN, rpn.PRE_NMS_TOPK_TEST),
        post_nms_top_n=(rpn.POST_NMS_TOPK_TRAIN, rpn.POST_NMS_TOPK_TEST),
    )


def _build_roi_heads(cfg: CfgNode, device: torch.device) -> RoIHeads:
    heads = cfg.MODEL.ROI_HEADS
    box = cfg.MODEL.ROI_BOX_HEAD
    channels = cfg.MODEL.FPN.OUT_CHANNELS
    conv_dims = [box.CONV_DIM] * box.NUM_CONV
    fc_dims = [box.FC_DIM] * box.NUM_FC
    box_head = BoxHead(_build_pooler(box), channels, conv_dims, fc_dims, norm_layer(box.NORM, device))
    box_predictor = BoxPredictor(
        box_head.out_features,
        heads.NUM_CLASSES,
        box_weights=box.BBOX_REG_WEIGHTS,
        beta=box.SMOOTH_L1_BETA,
        score_threshold=heads.SCORE_THRESH_TEST,
        nms_threshold=heads.NMS_THRESH_TEST,
        detections_per_image=cfg.TEST.DETECTIONS_PER_IMAGE,
    )
    mask_head = keypoint_head = None
    if cfg.MODEL.MASK_ON:
        mask = cfg.MODEL.ROI_MASK_HEAD
        norm = norm_layer(mask.NORM, device)
        mask_head = MaskHead(
            _build_pooler(mask), channels, heads.NUM_CLASSES, num_convs=mask.NUM_CONV, width=mask.CONV_DIM, norm=norm
        )
    if cfg.MODEL.KEYPOINT_ON:
        keypoint = cfg.MODEL.ROI_KEYPOINT_HEAD
        pooler = _build_pooler(keypoint)
        keypoint_head = KeypointHead(pooler, channels, keypoint.NUM_KEYPOINTS, conv_dims=keypoint.CONV_DIMS)
    return RoIHeads(
        box_head,
        box_predictor,
        mask_head,
        keypoint_head,
        iou_threshold=heads.IOU_THRESHOLDS[0],
        batch_size_per_image=heads.BATCH_SIZE_PER_IMAGE,
        positive_fraction=heads.POSITIVE_FRACTION,
    )


def _build_pooler(head: CfgNode) -> RoIPooler:
    return RoIPooler(head.POOLER_RESOLUTION, head.POOLER_SAMPLING_RATIO)
