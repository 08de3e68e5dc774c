"""The model's parts against values by hand, without Detectron2."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from tests.transfer import tiny_coco
from transfer.torchvision_engine.data import training_records
from transfer.torchvision_engine.evaluation import paste_mask, to_coco
from transfer.torchvision_engine.loader import training_loader
from transfer.torchvision_engine.model import build_model, detectron2_names
from transfer.torchvision_engine.roi_heads import crop_masks, decode_keypoints, rasterise, visible_inside
from transfer.torchvision_engine.rpn import Anchors, RoIPooler, match, subsample


def build(tmp_path, **keys):
    return build_model(tiny_coco.config(tmp_path, "x", **keys), torch.device("cpu"))


@pytest.mark.parametrize("kind", ["", "mask", "keypoint"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_in_half_precision_are_near_those_in_full(tmp_path, kind, dtype):
    keys = {f"MODEL__{kind.upper()}_ON": True} if kind else {}
    name = tiny_coco.write(tmp_path / "data", keypoints=kind == "keypoint")
    cfg = tiny_coco.config(tmp_path, name, MODEL__ROI_HEADS__NUM_CLASSES=1 if kind == "keypoint" else 3, **keys)
    records, info = training_records(cfg)
    batch = next(iter(training_loader(cfg, records, info, seed=0, rank=0, world=1, start=0, workers=0)))
    torch.manual_seed(0)
    model = build_model(cfg, torch.device("cpu")).train()
    values = {}
    for half in (False, True):
        torch.manual_seed(1)
        model.zero_grad()
        with torch.autocast("cpu", dtype, enabled=half):
            losses = model(batch)
            torch.stack(list(losses.values())).sum().backward()
        values[half] = {key: loss.item() for key, loss in losses.items()}
        assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in model.parameters())
    assert values[True] == pytest.approx(values[False], rel=0.02)


def test_frozen_batch_norm_keeps_the_type_of_its_input(tmp_path):
    norm = build(tmp_path, MODEL__RESNETS__NORM="FrozenBN").body.bn1
    x = torch.randn(2, 64, 3, 3)
    norm.weight.uniform_(0.5, 2), norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2)
    assert torch.allclose(norm(x), FrozenBatchNorm2d.forward(norm, x), atol=1e-6)
    half = norm(x.half())
    assert half.dtype == torch.float16 and torch.allclose(half.float(), norm(x), atol=0.02)


def test_subsampling_takes_positives_first_and_fills_up_with_negatives():
    labels = torch.tensor([1, 0, -1, 1, 0, 0, 1, 0, 0])
    for size, fraction, positives, negatives in ((4, 0.5, 2, 2), (6, 1.0, 3, 3), (100, 0.5, 3, 5), (2, 0.25, 0, 2)):
        drawn, others = subsample(labels, size, fraction)
        assert (len(drawn), len(others)) == (positives, negatives)
        assert len({*drawn.tolist(), *others.tolist()}) == positives + negatives
        assert (labels[drawn] == 1).all() and (labels[others] == 0).all()
    seen = {int(subsample(labels, 1, 1.0)[0][0]) for _ in range(50)}
    assert seen == {0, 3, 6}


def test_anchors_are_not_rounded_and_stand_at_fixed_strides():
    anchors = Anchors([[32], [64]], [[0.5, 2.0]], (4, 8), 0.5).per_level(
        [torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 1, 1)]
    )
    assert [a.shape for a in anchors] == [(12, 4), (2, 4)]
    w, h = 32 * math.sqrt(2), 32 / math.sqrt(2)
    assert anchors[0][0].tolist() == pytest.approx([2 - w / 2, 2 - h / 2, 2 + w / 2, 2 + h / 2])
    assert anchors[0][3].tolist() == pytest.approx([6 - h / 2, 2 - w / 2, 6 + h / 2, 2 + w / 2])
    centres = (anchors[0][:, :2] + anchors[0][:, 2:]) / 2
    assert centres[10].tolist() == pytest.approx([10, 6])


def test_a_roi_is_pooled_from_the_level_of_its_size():
    features = [torch.full((1, 1, 256 // 2**i, 256 // 2**i), float(i)) for i in range(4)]
    sides = [10.0, 111.9, 112.0, 224.0, 447.0, 448.0, 1000.0]
    boxes = torch.tensor([[0.0, 0.0, s, s] for s in sides])
    pooled = RoIPooler(2, 2)(features, [boxes])
    inner = pooled[:, 0, 0, 0].tolist()
    assert inner == [0.0, 0.0, 1.0, 2.0, 2.0, 3.0, 3.0]


def test_matching_takes_the_highest_overlap_and_the_threshold():
    gt = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 20]])
    index, positive = match(gt, torch.tensor([[0.0, 0, 10, 5], [0, 0, 10, 18], [50, 50, 60, 60]]), 0.5)
    assert index[:2].tolist() == [0, 1]
    assert positive.tolist() == [True, True, False]
    index, positive = match(torch.zeros(0, 4), gt, 0.5)
    assert (index.tolist(), positive.tolist()) == ([0, 0], [False, False])


def test_mask_targets_of_polygons_and_bit_maps_agree():
    square = np.array([8.0, 8, 24, 8, 24, 24, 8, 24])
    box = torch.tensor([[0.0, 0, 32, 32]])
    polygon = crop_masks([[[square]]], [box], [torch.tensor([0])], 8)
    bitmap = torch.zeros(1, 32, 32, dtype=torch.bool)
    bitmap[:, 8:24, 8:24] = True
    assert torch.equal(polygon, crop_masks([bitmap], [box], [torch.tensor([0])], 8))
    expected = torch.zeros(8, 8, dtype=torch.bool)
    expected[2:6, 2:6] = True
    assert torch.equal(polygon[0], expected)
    assert rasterise([square], np.array([16, 16, 16, 16], np.float32), 4).shape == (4, 4)  # a box without area


def test_pasting_a_mask_fills_its_box_and_clips_at_the_border():
    pasted = paste_mask(torch.ones(4, 4), torch.tensor([2.0, 3.0, 6.0, 20.0]), (10, 8))
    expected = torch.zeros(10, 8, dtype=torch.bool)
    expected[3:10, 2:6] = True
    assert torch.equal(pasted, expected)


def test_keypoints_come_from_the_best_cell_with_its_probability():
    maps = torch.zeros(1, 2, 4, 4)
    maps[0, 0, 1, 2] = 9.0
    maps[0, 1, 3, 0] = 9.0
    points = decode_keypoints(maps, torch.tensor([[10.0, 20.0, 14.0, 24.0]]))
    assert points[0, :, :2].tolist() == [[12.5, 21.5], [10.5, 23.5]]
    assert points[0, :, 2].tolist() == pytest.approx([1 / (1 + 15 * math.exp(-9))] * 2)


def test_an_instance_counts_if_a_labelled_keypoint_lies_in_its_box():
    keypoints = torch.tensor([[[1.0, 1, 2], [50, 50, 2]], [[1.0, 1, 0], [50, 50, 2]], [[10.0, 10, 1], [0, 0, 0]]])
    assert visible_inside(keypoints, torch.tensor([[0.0, 0, 10, 10]] * 3)).tolist() == [True, False, True]


def test_results_are_in_the_original_image_and_cocos_format():
    detections = {
        "boxes": torch.tensor([[10.0, 20, 30, 60], [90, 90, 95, 95]]),
        "scores": torch.tensor([0.9, 0.8]),
        "labels": torch.tensor([1, 0]),
        "keypoints": torch.tensor([[[20.0, 40.0, 0.7]], [[0.0, 0, 0]]]),
    }
    record = {"image": torch.zeros(3, 80, 40), "height": 160, "width": 80, "image_id": 5}
    (result,) = to_coco(detections, record, [3, 9])  # the second box lies outside
    assert result["bbox"] == [20, 40, 40, 80]
    assert (result["category_id"], result["image_id"]) == (9, 5)
    assert result["keypoints"] == pytest.approx([39.5, 79.5, 0.7])


def test_freezing_leaves_constants_without_gradients(tmp_path):
    model = build(tmp_path, MODEL__BACKBONE__FREEZE_AT=2, MODEL__RESNETS__NORM="BN")
    frozen = {name.split(".")[1] for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"conv1", "layer1"}
    kept = {
        name.split(".")[1]
        for name, m in model.named_modules()
        if name.startswith("body") and isinstance(m, nn.BatchNorm2d)
    }
    assert kept == {"layer2", "layer3", "layer4"}


@pytest.mark.parametrize("depth", [18, 34, 50, 101])
def test_names_are_detectron2s_one_to_one(tmp_path, depth):
    keys = {"MODEL__RESNETS__DEPTH": depth, "MODEL__RESNETS__RES2_OUT_CHANNELS": 64 if depth < 50 else 256}
    names = detectron2_names(build(tmp_path, MODEL__MASK_ON=True, MODEL__KEYPOINT_ON=True, **keys))
    assert len(set(names.values())) == len(names)
    assert names["body.layer4.0.downsample.1.running_var"] == "backbone.bottom_up.res5.0.shortcut.norm.running_var"
    assert names["fpn.layer_blocks.3.0.weight"] == "backbone.fpn_output5.weight"
    assert names["roi_heads.box_head.3.bias"] == "roi_heads.box_head.fc2.bias"
