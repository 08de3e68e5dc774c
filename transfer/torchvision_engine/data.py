"""COCO annotation files as records, read with the same arithmetic as Detectron2."""

import itertools
import pickle
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from fvcore.common.config import CfgNode
from pycocotools import mask as coco_mask

from ..coco.data import CocoSet, read_annotations
from ..coco.keypoints import flip_indices, flip_pairs, keypoint_names
from ..coco.masks import select_outlines
from ..samplers import Record


class Records(Sequence[Record]):
    """Records as one block of bytes, which forked workers share: Python objects take several times the memory."""

    def __init__(self, records: Iterable[Record]) -> None:
        packed = bytearray()
        ends = array("q", [0])
        for record in records:
            packed += pickle.dumps(record, -1)
            ends.append(len(packed))
        self._bytes = np.frombuffer(packed, np.uint8)
        self._ends = np.frombuffer(ends, np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        return pickle.loads(self._bytes[self._ends[index] : self._ends[index + 1]].data)


def load_coco(data_set: CocoSet, keep: Callable[[Record], bool] | None = None) -> tuple[Records, list[int], list[int]]:
    """Read a data set, whose records `coco.data.prepare_data_sets` has checked, into records ordered by image id.

    Args:
        keep: selects records (default: all).

    Returns:
        The records. An annotation has ``box`` (x0, y0, x1, y1), ``label`` in [0, K), ``crowd``, ``segmentation``
        (polygons or compressed RLE) and ``keypoints`` (P, 3), moved by half a pixel to the pixels' centers.
        The file's category ids in the order of the labels.
        The index of every keypoint's mirror image.
    """
    content = read_annotations(data_set.annotations)
    mirror = flip_indices(keypoint_names(content), flip_pairs(content) or ())
    category_ids = sorted(category["id"] for category in content["categories"])
    labels = {category_id: label for label, category_id in enumerate(category_ids)}
    images = sorted(content["images"], key=lambda image: image["id"])
    by_image: dict[Any, list[dict[str, Any]]] = {image["id"]: [] for image in images}
    for annotation in content.pop("annotations"):
        by_image[annotation["image_id"]].append(annotation)
    # Annotations are popped, which frees what is packed.
    records: Iterable[Record] = (
        {
            "file_name": str(data_set.images / image["file_name"]),
            "image_id": image["id"],
            "height": image["height"],
            "width": image["width"],
            "annotations": [_convert_annotation(annotation, labels) for annotation in by_image.pop(image["id"])],
        }
        for image in images
    )
    return Records(filter(keep, records)), category_ids, mirror


def _convert_annotation(annotation: dict[str, Any], labels: dict[int, int]) -> dict[str, Any]:
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


def load_training_records(cfg: CfgNode, data_sets: Mapping[str, CocoSet]) -> tuple[Records, list[int]]:
    """Load the records of DATASETS.TRAIN that training uses, and the index of every keypoint's mirror image."""
    loaded = [load_coco(data_sets[name], partial(_is_used, cfg)) for name in cfg.DATASETS.TRAIN]
    records, _, mirror = loaded[0]
    if len(loaded) > 1:
        records = Records(itertools.chain.from_iterable(records for records, *_ in loaded))
    return records, mirror


def _is_used(cfg: CfgNode, record: Record) -> bool:
    """Return whether an image has an object and enough labeled keypoints, where the config requires them."""
    annotations = record["annotations"]
    if cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS and all(annotation["crowd"] for annotation in annotations):
        return False
    keypoints = [annotation["keypoints"] for annotation in annotations if "keypoints" in annotation]
    num_labeled = sum(int((points[:, 2] > 0).sum()) for points in keypoints)
    return not cfg.MODEL.KEYPOINT_ON or num_labeled >= cfg.MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE
