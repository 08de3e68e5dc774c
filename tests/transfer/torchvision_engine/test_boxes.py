"""Coding and pooling of boxes are compared with values computed by hand; test_parity covers matching and sampling."""

import math
from typing import Any

import pytest
import torch
from torchvision.models.detection._utils import encode_boxes

from transfer.torchvision_engine.boxes import RoIPooler, decode


def test_decoding_undoes_encoding_up_to_the_largest_growth():
    anchors = torch.tensor([[0.0, 0, 10, 20], [5, 5, 6, 6]])
    boxes = torch.tensor([[2.0, 3, 50, 9], [-4, 0, 8, 5]])
    weights: Any = (10.0, 10.0, 5.0, 5.0)
    deltas = encode_boxes(boxes, anchors, weights)
    assert deltas[0].tolist() == pytest.approx([21, -2, 5 * math.log(4.8), 5 * math.log(0.3)])
    assert torch.allclose(decode(deltas, anchors, weights), boxes, atol=1e-5)
    (x0, y0, x1, y1) = decode(torch.full((1, 4), 100.0), anchors[1:], (1.0, 1.0, 1.0, 1.0))[0].tolist()
    assert (x1 - x0, y1 - y0) == pytest.approx((62.5, 62.5))


def test_a_roi_is_pooled_from_the_level_of_its_size():
    features = [torch.full((1, 1, 256 // 2**i, 256 // 2**i), float(i)) for i in range(4)]
    sides = [10.0, 111.9, 112.0, 224.0, 447.0, 448.0, 1000.0]
    boxes = torch.tensor([[0.0, 0.0, s, s] for s in sides])
    pooled = RoIPooler(2, 2)(features, [boxes])
    inner = pooled[:, 0, 0, 0].tolist()
    assert inner == [0.0, 0.0, 1.0, 2.0, 2.0, 3.0, 3.0]
