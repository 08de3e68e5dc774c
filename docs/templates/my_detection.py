"""Your own detection data set, with a mapper and a hook: boxes of drawn squares, and a log of the weights' norm.

    python transfer/train_net.py --import docs/templates/my_detection.py --engine detectron2 \
        --config-file configs/examples/own_faster_R18_FPN.yaml \
        DATASETS.TRAIN "('squares_train',)" DATASETS.TEST "('squares_val',)" MODEL.ROI_HEADS.NUM_CLASSES 3 \
        INPUT.MAPPER squares SOLVER.HOOKS "('weight_norm',)"
"""

from typing import Any

import numpy as np
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog, detection_utils
from detectron2.data import transforms as T
from detectron2.engine import HookBase
from detectron2.structures import BoxMode

from pretrain import register
from transfer import HOOKS, MAPPERS

SIZE = 96
SIDES = (12, 20, 32)
CLASSES = ["small", "middle", "large"]


def records(count: int, seed: int) -> list[dict[str, Any]]:
    """Return Detectron2's records, the same at every call; if images are files, file_name is the path of one."""
    rng = np.random.default_rng(seed)
    dataset = []
    for number in range(count):
        label = number % 3
        left, top = map(int, rng.integers(0, SIZE - SIDES[label], 2))
        box = [left, top, SIDES[label], SIDES[label]]
        square = {"bbox": box, "bbox_mode": BoxMode.XYWH_ABS, "category_id": label}
        name = f"square {seed}-{number}"
        dataset.append({"file_name": name, "image_id": number, "height": SIZE, "width": SIZE, "annotations": [square]})
    return dataset


for split, count, seed in (("train", 60, 1), ("val", 12, 2)):
    DatasetCatalog.register(f"squares_{split}", lambda count=count, seed=seed: records(count, seed))
    MetadataCatalog.get(f"squares_{split}").set(thing_classes=CLASSES, evaluator_type="coco")


class SquaresMapper:
    """Draws the image of a record and flips it at random; `DatasetMapper` is Detectron2's, for files."""

    def __init__(self, cfg: Any, is_train: bool) -> None:
        self._is_train = is_train
        self._augmentations = T.AugmentationList([T.RandomFlip()] if is_train else [])

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        objects = record.pop("annotations")
        image = np.zeros((SIZE, SIZE, 3), np.uint8)
        for left, top, width, height in (item["bbox"] for item in objects):
            image[top : top + height, left : left + width] = 160
        drawn = T.AugInput(image)
        flips = self._augmentations(drawn)  # draws from NumPy's global generator, as Detectron2's augmentations do
        record["image"] = torch.as_tensor(np.ascontiguousarray(drawn.image.transpose(2, 0, 1)))
        if self._is_train:
            moved = [detection_utils.transform_instance_annotations(item, flips, image.shape[:2]) for item in objects]
            record["instances"] = detection_utils.annotations_to_instances(moved, image.shape[:2])
        return record


class WeightNorm(HookBase):
    """Adds the norm of the box classifier's weights to metrics.json."""

    def after_step(self) -> None:
        weight = self.trainer.model.roi_heads.box_predictor.cls_score.weight
        self.trainer.storage.put_scalar("weight_norm", weight.detach().norm().item(), smoothing_hint=False)


register(MAPPERS, "squares", SquaresMapper)
register(HOOKS, "weight_norm", lambda cfg: WeightNorm())
