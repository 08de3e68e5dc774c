"""Which instances and cells count, against values by hand."""

from __future__ import annotations

import math

import pytest
import torch

from transfer.torchvision_engine.keypoint_head import decode_keypoints, visible_inside


def test_keypoints_come_from_the_best_cell_with_its_probability():
    maps = torch.zeros(1, 2, 4, 4)
    maps[0, 0, 1, 2] = 9.0
    maps[0, 1, 3, 0] = 9.0
    points = decode_keypoints(maps, torch.tensor([[10.0, 20.0, 14.0, 24.0]]))
    assert points[0, :, :2].tolist() == [[12.5, 21.5], [10.5, 23.5]]
    assert points[0, :, 2].tolist() == pytest.approx([1 / (1 + 15 * math.exp(-9))] * 2)


def test_an_instance_counts_if_a_labeled_keypoint_lies_in_its_box():
    keypoints = torch.tensor([[[1.0, 1, 2], [50, 50, 2]], [[1.0, 1, 0], [50, 50, 2]], [[10.0, 10, 1], [0, 0, 0]]])
    assert visible_inside(keypoints, torch.tensor([[0.0, 0, 10, 10]] * 3)).tolist() == [True, False, True]
