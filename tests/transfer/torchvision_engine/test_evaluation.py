"""Detections in the original image, in COCO's format."""

from __future__ import annotations

import pytest
import torch

from transfer.torchvision_engine.evaluation import paste_mask, to_coco


def test_pasting_a_mask_fills_its_box_and_clips_at_the_border():
    pasted = paste_mask(torch.ones(4, 4), torch.tensor([2.0, 3.0, 6.0, 20.0]), (10, 8))
    expected = torch.zeros(10, 8, dtype=torch.bool)
    expected[3:10, 2:6] = True
    assert torch.equal(pasted, expected)


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
