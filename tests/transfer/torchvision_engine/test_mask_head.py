"""Mask targets, against values by hand."""

from __future__ import annotations

import numpy as np
import torch

from transfer.torchvision_engine.boxes import Sample
from transfer.torchvision_engine.mask_head import crop_masks, rasterize


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
