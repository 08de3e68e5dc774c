"""Reads COCO annotation files into records, with the same arithmetic as Detectron2, and loads them in batches.

A record's random choices are a function of (seed, position), the position being its place in the infinite training
stream: the same whatever the number of ranks and workers, and where a resumed run begins.
"""

from __future__ import annotations

import itertools
import pickle
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode
from pycocotools import mask as coco_mask

from pretrain.common.distributed import rank, world_size
from pretrain.common.errors import UserError

from ..coco import data as coco_data
from ..coco.check import select_outlines
from ..coco.keypoints import flip_indices, flip_pairs, keypoint_names
from ..samplers import MappedRecords, index_batches, load
from .mapper import Mapper, build_mapper


class Records(Sequence[dict[str, Any]]):
    """Records as one block of bytes, which forked workers share: Python objects take several times the memory."""

    def __init__(self, records: Iterable[dict[str, Any]]) -> None:
        packed, ends = bytearray(), array("q", [0])
        for record in records:
            packed += pickle.dumps(record, -1)
            ends.append(len(packed))
        self._bytes, self._ends = np.frombuffer(packed, np.uint8), np.frombuffer(ends, np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return pickle.loads(self._bytes[self._ends[index] : self._ends[index + 1]].data)


def load_coco(
    name: str, output_dir: str, keep: Callable[[dict[str, Any]], bool] = lambda _: True
) -> tuple[Records, list[int], list[int]]:
    """Reads a data set of DATASETS.TRAIN or DATASETS.TEST into records ordered by image id.

    Args:
        keep: says whether a record is kept.

    Returns:
        Records of ``file_name, height, width, image_id, annotations``; an annotation has ``box`` (x0, y0, x1, y1),
        ``label`` in [0, K), ``crowd``, ``segmentation`` (polygons or compressed RLE) and ``keypoints`` (P, 3), moved by
        half a pixel to the pixels' centers. The file's category ids in the order of the labels. The index of every
        keypoint's mirror image.

    Raises:
        UserError: unknown name or missing files; `coco_data.prepare` checks the records.
    """
    data_set = coco_data.resolve(name, output_dir)
    data = coco_data.read(data_set.annotations)
    flip = flip_indices(keypoint_names(data), flip_pairs(data) or ())
    categories = sorted(data["categories"], key=lambda c: c["id"])
    images = sorted(data["images"], key=lambda i: i["id"])
    labels = {category["id"]: label for label, category in enumerate(categories)}
    by_image: dict[Any, list[dict[str, Any]]] = {image["id"]: [] for image in images}
    for annotation in data.pop("annotations"):
        by_image[annotation["image_id"]].append(annotation)

    def record(image: dict[str, Any]) -> dict[str, Any]:
        annotations = by_image.pop(image["id"])  # frees what is packed
        return {
            "file_name": str(data_set.images / image["file_name"]),
            "height": image["height"],
            "width": image["width"],
            "image_id": image["id"],
            "annotations": [_annotation(annotation, labels) for annotation in annotations],
        }

    records = Records(filter(keep, map(record, images)))
    return records, [c["id"] for c in categories], flip


def _annotation(annotation: dict[str, Any], labels: dict[int, int]) -> dict[str, Any]:
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


def training_records(cfg: CfgNode) -> tuple[Records, list[int]]:
    """The records of DATASETS.TRAIN that training uses, and the index of every keypoint's mirror image.

    Raises:
        UserError: no image is left.
    """
    least = cfg.MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE if cfg.MODEL.KEYPOINT_ON else 0
    drops_empty = cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS

    def is_used(record: dict[str, Any]) -> bool:
        has_objects = any(not annotation["crowd"] for annotation in record["annotations"])
        return (has_objects or not drops_empty) and (not least or _visible(record) >= least)

    loaded = [load_coco(name, cfg.OUTPUT_DIR, is_used) for name in cfg.DATASETS.TRAIN]
    records, _, flip = loaded[0]
    if len(loaded) > 1:
        records = Records(itertools.chain.from_iterable(part for part, *_ in loaded))
    if not records:
        raise UserError(f"no image of {', '.join(cfg.DATASETS.TRAIN)} has annotations to train on")
    return records, flip


def _visible(record: dict[str, Any]) -> int:
    return sum(int((a["keypoints"][:, 2] > 0).sum()) for a in record["annotations"] if "keypoints" in a)


def training_data(cfg: CfgNode) -> tuple[Callable[..., Iterator[list[dict[str, Any]]]], int]:
    """A function of (seed, start, workers) to this rank's endless batches from number ``start`` on; the images' number.

    SOLVER.IMS_PER_BATCH counts all ranks' images. The batches raise the UserError of a bad record.
    """
    records, flip = training_records(cfg)
    wide = [r["width"] > r["height"] for r in records] if cfg.DATALOADER.ASPECT_RATIO_GROUPING else None
    mapper = build_mapper(cfg, True, flip)

    def batches(*, seed: int, start: int, workers: int) -> Iterator[list[dict[str, Any]]]:
        size = cfg.SOLVER.IMS_PER_BATCH // world_size()
        stream = index_batches([1.0] * len(records), wide, size, seed, rank(), world_size(), start)
        return load(MappedRecords(records, partial(_map, mapper, seed)), stream, workers, pin=_pin(cfg))

    return batches, len(records)


def evaluation_batches(cfg: CfgNode, records: Records, share: range) -> Iterator[list[dict[str, Any]]]:
    """The test images at the positions ``share``, one at a time; raises the UserError of a bad record."""
    batches = [[(index, index)] for index in share]
    return load(test_images(cfg, records), batches, cfg.DATALOADER.NUM_WORKERS, pin=_pin(cfg))


def test_images(cfg: CfgNode, records: Sequence[dict[str, Any]]) -> MappedRecords:
    """Records as the model takes them in an evaluation."""
    return MappedRecords(records, partial(_map, build_mapper(cfg, False, ()), None))


def _map(mapper: Mapper, seed: int | None, record: dict[str, Any], position: int) -> dict[str, Any]:
    return mapper(record, None if seed is None else np.random.default_rng([seed, position]))


def _pin(cfg: CfgNode) -> bool:
    return cfg.MODEL.DEVICE == "cuda" and torch.cuda.is_available()  # copies from other memory would block
