"""Metrics of a test set from the Detectron2 model's predictions: COCO's, or by the evaluator that the set names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np
import torch
from detectron2.data import MetadataCatalog
from detectron2.evaluation import DatasetEvaluator, LVISEvaluator, PascalVOCDetectionEvaluator, inference_on_dataset
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.modeling import GeneralizedRCNNWithTTA
from detectron2.utils import comm
from fvcore.common.config import CfgNode

from ..coco.data import read, resolve
from ..coco.results import Metrics, score, table
from ..distributed import raise_if_stopped
from .data import TestBatches

log = logging.getLogger("transfer")


class CocoPredictions(DatasetEvaluator):
    """Gathers every rank's detections in COCO's result format, under the annotation file's category ids."""

    def __init__(self, category_ids: Mapping[int, int]) -> None:
        self._category_ids = category_ids

    def reset(self) -> None:
        self._found: list[dict[str, Any]] = []

    def process(self, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> None:
        self._found += _to_coco(inputs, outputs, self._category_ids)

    def evaluate(self) -> dict[str, Any]:
        gathered: list[list[dict[str, Any]]] = comm.gather(self._found, dst=0)  # type: ignore[assignment]
        return {"predictions": [record for part in gathered for record in part]}


def results(model: Any, batch: list[dict[str, Any]], category_ids: list[int]) -> list[dict[str, Any]]:
    """The model's detections on all images of a batch in COCO's result format."""
    return _to_coco(batch, model(batch), dict(enumerate(category_ids)))


def _to_coco(
    inputs: list[dict[str, Any]], outputs: list[dict[str, Any]], category_ids: Mapping[int, int]
) -> list[dict[str, Any]]:
    return [
        {**record, "category_id": category_ids[record["category_id"]]}
        for image, output in zip(inputs, outputs, strict=True)
        for record in instances_to_coco_json(output["instances"].to("cpu"), image["image_id"])
    ]


def build_evaluator(name: str) -> DatasetEvaluator | None:
    """Detectron2's evaluator of a set of DATASETS.TEST by its ``evaluator_type``; None: COCO's metrics.

    - pascal_voc: AP, AP50 and AP75 of boxes, where AP is the mean over IoU from 0.5 to 0.95, as in MoCo's tables.
    - lvis: AP of boxes and masks, also of rare, common and frequent categories (APr, APc, APf).
    """
    kind = MetadataCatalog.get(name).get("evaluator_type", "coco")
    if kind == "lvis":
        np.float = float  # type: ignore[attr-defined]  # lvis 0.5.3, the newest, is older than NumPy 1.24
        return LVISEvaluator(name)
    return PascalVOCDetectionEvaluator(name) if kind == "pascal_voc" else None


def evaluate(
    cfg: CfgNode, model: torch.nn.Module, pictures: int = 0, *, augmented: bool = False
) -> dict[str, Metrics]:  # fmt: skip
    """Data set -> its metrics, on rank 0; {} on other ranks.

    Args:
        augmented: add those with test-time augmentation (TEST.AUG), as tasks that end in _TTA.
    """
    results = {name: _evaluate(cfg, model, name, pictures) for name in cfg.DATASETS.TEST}
    for name in cfg.DATASETS.TEST if augmented else ():
        log.info(f"{name}: with test-time augmentation")
        metrics = _evaluate(cfg, GeneralizedRCNNWithTTA(cfg, model), name, 0, keep=False)
        results[name] |= {f"{task}_TTA": row for task, row in metrics.items()}
    return results if comm.is_main_process() else {}


def _evaluate(cfg: CfgNode, model: torch.nn.Module, name: str, pictures: int, *, keep: bool = True) -> Metrics:
    """The metrics on one data set, on rank 0; {} on other ranks. ``keep`` writes the predictions."""
    loader: Any = TestBatches(cfg, name)  # reads the file, which gives the metadata its ids
    if own := build_evaluator(name):
        found = inference_on_dataset(model, loader, own)
        raise_if_stopped()
        if not comm.is_main_process():
            return {}
        # Below 0: LVIS's value for a kind of category that the data set does not have.
        metrics: Metrics = {task: {k: float(v) if isfinite(v) and v >= 0 else None for k, v in one.items()}
                            for task, one in found.items()}  # fmt: skip
        log.info(f"{name}\n{table(metrics)}")
        if pictures:
            log.info(f"no pictures of {name}: they are drawn where COCO's metrics are computed")
        return metrics
    labels = MetadataCatalog.get(name).get("thing_dataset_id_to_contiguous_id")
    if not labels:  # they are in the order of the file's ids
        categories = read(resolve(name, cfg.OUTPUT_DIR)[0])["categories"]
        labels = {own: label for label, own in enumerate(sorted(category["id"] for category in categories))}
    ids = {label: own for own, label in labels.items()}
    found = inference_on_dataset(model, loader, CocoPredictions(ids))
    raise_if_stopped()
    if not comm.is_main_process():
        return {}
    return score(cfg, name, found["predictions"], log.info, pictures, keep=keep)
