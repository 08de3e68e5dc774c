"""Detections in the original image, in COCO's format."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from pycocotools import mask as coco_mask

from transfer.torchvision_engine.evaluation import encode, paste, to_coco


def test_pasting_a_mask_fills_its_box_and_clips_at_the_border():
    pasted, left = paste(torch.ones(1, 4, 4), torch.tensor([[2.0, 3.0, 6.0, 20.0]]), (10, 8))
    expected = torch.zeros(10, 8, dtype=torch.bool)
    expected[3:10, 2:6] = True
    assert (left, pasted.shape) == (1, (1, 10, 6)) and torch.equal(pasted[0], expected[:, 1:7])


@pytest.mark.parametrize("at_once", [1, 4])
def test_run_lengths_are_pycocotools_own(at_once: int):
    """Among the masks: one of nothing, of everything, of whole columns, and at each border of the image."""
    size, generator = (9, 7), torch.Generator().manual_seed(0)
    boxes = torch.tensor([[0.0, 0, 7, 9], [0, 0, 7, 9], [2, 0, 4, 9], [0, 0, 3, 2], [5, 6, 7, 9], [1.3, 2.2, 5.9, 6.4]])
    masks = torch.rand(len(boxes), 4, 4, generator=generator)
    masks[0], masks[1], masks[2] = 0, 1, 1
    found = encode(masks, boxes, size, at_once)
    for one, mask, box in zip(found, masks, boxes, strict=True):
        pasted, left = paste(mask[None], box[None], size)
        whole = np.zeros(size, np.uint8, order="F")
        whole[:, left : left + pasted.shape[2]] = pasted[0].numpy()
        expected: Any = coco_mask.encode(whole)
        assert one == {"size": list(size), "counts": expected["counts"].decode()}
    areas = [int(coco_mask.area(cast(Any, one))) for one in found]
    assert areas[:3] == [0, 63, 18] and min(areas[3:]) > 0


def test_an_image_without_detections_has_no_results():
    nothing = {"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.long),
               "masks": torch.zeros(0, 28, 28)}  # fmt: skip
    assert to_coco(nothing, {"image": torch.zeros(3, 8, 8), "height": 8, "width": 8, "image_id": 1}, [1]) == []


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
