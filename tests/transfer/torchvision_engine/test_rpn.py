"""Anchors, against values by hand."""

from __future__ import annotations

import math

import pytest
import torch

from transfer.torchvision_engine.rpn import Anchors


def test_anchors_are_not_rounded_and_lie_at_fixed_strides():
    anchors = Anchors([[32], [64]], [[0.5, 2.0]], (4, 8), 0.5)([torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 1, 1)])
    assert [a.shape for a in anchors] == [(12, 4), (2, 4)]
    w, h = 32 * math.sqrt(2), 32 / math.sqrt(2)
    assert anchors[0][0].tolist() == pytest.approx([2 - w / 2, 2 - h / 2, 2 + w / 2, 2 + h / 2])
    assert anchors[0][3].tolist() == pytest.approx([6 - h / 2, 2 - w / 2, 6 + h / 2, 2 + w / 2])
    centers = (anchors[0][:, :2] + anchors[0][:, 2:]) / 2
    assert centers[10].tolist() == pytest.approx([10, 6])
