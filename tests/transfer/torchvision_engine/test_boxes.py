"""Coding, matching, sampling and pooling of boxes, against values by hand."""

from __future__ import annotations

import math

import pytest
import torch

from transfer.torchvision_engine.boxes import RoIPooler, decode, encode, match, subsample


def test_decoding_undoes_encoding_up_to_the_largest_growth():
    anchors = torch.tensor([[0.0, 0, 10, 20], [5, 5, 6, 6]])
    boxes = torch.tensor([[2.0, 3, 50, 9], [-4, 0, 8, 5]])
    weights = (10.0, 10.0, 5.0, 5.0)
    deltas = encode(boxes, anchors, weights)
    assert deltas[0].tolist() == pytest.approx([21, -2, 5 * math.log(4.8), 5 * math.log(0.3)])
    assert torch.allclose(decode(deltas, anchors, weights), boxes, atol=1e-5)
    (x0, y0, x1, y1) = decode(torch.full((1, 4), 100.0), anchors[1:], (1.0, 1.0, 1.0, 1.0))[0].tolist()
    assert (x1 - x0, y1 - y0) == pytest.approx((62.5, 62.5))


def test_matching_takes_the_highest_overlap_and_the_thresholds():
    gt = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 20]])
    boxes = torch.tensor([[0.0, 0, 10, 5], [0, 0, 10, 18], [0, 0, 10, 4], [50, 50, 60, 60]])
    index, label = match(gt, boxes, 0.3, 0.7, keep_best=False)
    assert (index[:3].tolist(), label.tolist()) == ([0, 1, 0], [-1, 1, -1, 0])
    assert match(gt, boxes[[0, 2, 3]], 0.3, 0.7, keep_best=True)[1].tolist() == [1, -1, 0]
    index, label = match(torch.zeros(0, 4), gt, 0.5, 0.5, keep_best=False)
    assert (index.tolist(), label.tolist()) == ([0, 0], [0, 0])


def test_subsampling_takes_positives_first_and_fills_up_with_negatives():
    labels = torch.tensor([1, 0, -1, 1, 0, 0, 1, 0, 0])
    for size, fraction, positives, negatives in ((4, 0.5, 2, 2), (6, 1.0, 3, 3), (100, 0.5, 3, 5), (2, 0.25, 0, 2)):
        positive, negative = subsample(labels, size, fraction)
        assert (len(positive), len(negative)) == (positives, negatives)
        assert len({*positive.tolist(), *negative.tolist()}) == positives + negatives
        assert (labels[positive] == 1).all() and (labels[negative] == 0).all()
    seen = {int(subsample(labels, 1, 1.0)[0][0]) for _ in range(50)}
    assert seen == {0, 3, 6}


def test_a_roi_is_pooled_from_the_level_of_its_size():
    features = [torch.full((1, 1, 256 // 2**i, 256 // 2**i), float(i)) for i in range(4)]
    sides = [10.0, 111.9, 112.0, 224.0, 447.0, 448.0, 1000.0]
    boxes = torch.tensor([[0.0, 0.0, s, s] for s in sides])
    pooled = RoIPooler(2, 2)(features, [boxes])
    inner = pooled[:, 0, 0, 0].tolist()
    assert inner == [0.0, 0.0, 1.0, 2.0, 2.0, 3.0, 3.0]
