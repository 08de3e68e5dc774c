"""Mask targets and keypoints, against values by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from transfer.torchvision_engine.boxes import Sample
from transfer.torchvision_engine.heads import crop_masks, decode_keypoints, rasterize, visible_inside


def test_mask_targets_of_polygons_and_bit_maps_agree():
    square = np.array([8.0, 8, 24, 8, 24, 24, 8, 24])
    bitmap = torch.zeros(1, 32, 32, dtype=torch.bool)
    bitmap[:, 8:24, 8:24] = True
    box, first = torch.tensor([[0.0, 0, 32, 32]]), torch.tensor([0])
    of_polygon, of_bitmap = (
        crop_masks([Sample(box, first, first, {"masks": masks})], 8) for masks in ([[square]], bitmap)
    )
    expected = torch.zeros(8, 8, dtype=torch.bool)
    expected[2:6, 2:6] = True
    assert torch.equal(of_polygon, of_bitmap) and torch.equal(of_polygon[0], expected)
    assert rasterize([square], np.array([16, 16, 16, 16], np.float32), 4).shape == (4, 4)  # a box without area


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
