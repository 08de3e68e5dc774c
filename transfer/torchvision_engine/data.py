"""Data sets as records in the engine's form, computed with the same arithmetic as Detectron2's."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from fvcore.common.config import CfgNode
from pycocotools import mask as coco_mask

from ..coco.checks.masks import select_outlines
from ..coco.keypoints import flip_indices
from ..coco.records import DataSet
from ..training.samplers import Record

CocoAnnotations = Sequence[Mapping[str, Any]]  # an image's, in COCO's format


class Records(Sequence[Record]):
    """Images of data sets in this engine's form, which each access makes of the packed ones."""

    def __init__(self, data_sets: Sequence[DataSet], keep: Callable[[CocoAnnotations], bool] | None = None) -> None:
        """Select the images of which ``keep`` accepts the annotations (default: all)."""
        self._data_sets = data_sets
        self._labels = [
            {category["id"]: label for label, category in enumerate(data_set.categories)} for data_set in data_sets
        ]
        selected: list[tuple[int, int]] = []
        for number, data_set in enumerate(data_sets):
            images = data_set.images or ()
            numbers = (
                range(len(images)) if keep is None else [i for i, (_, records) in enumerate(images) if keep(records)]
            )
            selected += [(number, index) for index in numbers]
        self._selected = np.array(selected, np.int64).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self._selected)

    def list_wide(self) -> list[bool]:
        """Return whether each image is wider than high, which needs no access."""
        sizes = np.array([self._data_sets[number].image_sizes[index] for number, index in self._selected])
        height, width = sizes.reshape(-1, 2).T
        return (width > height).tolist()

    def __getitem__(self, index: Any) -> Any:
        number, position = self._selected[index]
        data_set = self._data_sets[number]
        assert data_set.images is not None
        image, annotations = data_set.images[position]
        return {
            "file_name": str(data_set.source.images / image["file_name"]),
            "image_id": image["id"],
            "height": image["height"],
            "width": image["width"],
            "annotations": [convert_annotation(annotation, self._labels[number]) for annotation in annotations],
        }


def load_coco(data_set: DataSet) -> tuple[Records, list[int]]:
    """Return the records of a data set, and its category ids in the order of the labels.

    An annotation has ``box`` (x0, y0, x1, y1), ``label`` in [0, K), ``crowd``, ``segmentation`` (polygons or compressed
    RLE) and ``keypoints`` (P, 3), moved by half a pixel to the pixels' centers.
    """
    return Records([data_set]), [category["id"] for category in data_set.categories]


def convert_annotation(annotation: dict[str, Any], labels: dict[int, int]) -> dict[str, Any]:
    x, y, w, h = np.asarray(annotation["bbox"], np.float32)  # Detectron2 adds in float32, then continues in float64
    converted: dict[str, Any] = {
        "box": np.array([x, y, x + w, y + h], np.float64),
        "label": labels[annotation["category_id"]],
        "crowd": bool(annotation.get("iscrowd", 0)),
    }
    segmentation = annotation.get("segmentation")
    if isinstance(segmentation, dict):
        if isinstance(segmentation["counts"], list):
            uncompressed: Any = segmentation  # which pycocotools' stubs lack
            segmentation = coco_mask.frPyObjects(uncompressed, *segmentation["size"])
        converted["segmentation"] = segmentation
    elif polygons := select_outlines(segmentation or ()):
        converted["segmentation"] = [np.asarray(polygon, np.float64) for polygon in polygons]
    if annotation.get("keypoints"):
        keypoints = np.asarray(annotation["keypoints"], np.float64).reshape(-1, 3)
        keypoints[:, :2] += 0.5
        converted["keypoints"] = keypoints
    return converted


def load_training_records(cfg: CfgNode, data_sets: Mapping[str, DataSet]) -> tuple[Records, list[int]]:
    """Return the records of DATASETS.TRAIN that training uses, and the index of every keypoint's mirror image."""
    train_sets = [data_sets[name] for name in cfg.DATASETS.TRAIN]
    mirror: list[int] = []
    if cfg.MODEL.KEYPOINT_ON:
        names, pairs = train_sets[0].find_keypoints()
        mirror = flip_indices(names, pairs)
    return Records(train_sets, partial(_is_used, cfg)), mirror


def _is_used(cfg: CfgNode, annotations: CocoAnnotations) -> bool:
    """Return whether an image has an object and enough labeled keypoints, where the config requires them."""
    if cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS and all(annotation.get("iscrowd", 0) for annotation in annotations):
        return False
    num_labeled = sum(value > 0 for annotation in annotations for value in (annotation.get("keypoints") or ())[2::3])
    return not cfg.MODEL.KEYPOINT_ON or num_labeled >= cfg.MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE
