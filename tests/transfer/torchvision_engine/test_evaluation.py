"""Detections are mapped to the original image and written in COCO's format."""

from typing import Any, cast

import pytest
import torch
from pycocotools import mask as coco_mask

from transfer.torchvision_engine.evaluation import encode, to_coco


@pytest.mark.parametrize("at_once", [1, 2])
def test_masks_are_encoded_where_their_boxes_are(at_once: int):
    boxes = torch.tensor([[0.0, 0, 7, 9], [2, 0, 4, 9], [5, 6, 7, 9]])
    encoded = encode(torch.ones(3, 4, 4), boxes, (9, 7), at_once)
    assert coco_mask.toBbox(cast(Any, encoded)).tolist() == [[0, 0, 7, 9], [2, 0, 2, 9], [5, 6, 2, 3]]


def test_an_image_without_detections_has_no_results():
    nothing = {
        "boxes": torch.zeros(0, 4),
        "scores": torch.zeros(0),
        "labels": torch.zeros(0, dtype=torch.long),
        "masks": torch.zeros(0, 28, 28),
    }
    record: Any = {"image": torch.zeros(3, 8, 8), "height": 8, "width": 8, "image_id": 1}
    assert to_coco(nothing, record, [1]) == []


def test_results_are_in_the_original_image_and_cocos_format():
    detections = {
        "boxes": torch.tensor([[10.0, 20, 30, 60], [90, 90, 95, 95]]),
        "scores": torch.tensor([0.9, 0.8]),
        "labels": torch.tensor([1, 0]),
        "keypoints": torch.tensor([[[20.0, 40.0, 0.7]], [[0.0, 0, 0]]]),
    }
    record: Any = {"image": torch.zeros(3, 80, 40), "height": 160, "width": 80, "image_id": 5}
    result: Any
    (result,) = to_coco(detections, record, [3, 9])  # the second box lies outside
    assert result["bbox"] == [20, 40, 40, 80]
    assert (result["category_id"], result["image_id"]) == (9, 5)
    assert result["keypoints"] == pytest.approx([39.5, 79.5, 0.7])
