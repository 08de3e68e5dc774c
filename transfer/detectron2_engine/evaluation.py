"""Metrics of a test set from the Detectron2 model's predictions: COCO's, or by the evaluator that the set names."""

from __future__ import annotations

import logging
from functools import partial
from math import isfinite
from typing import Any

import numpy as np
import torch
from detectron2.data import MetadataCatalog
from detectron2.evaluation import DatasetEvaluator, LVISEvaluator, PascalVOCDetectionEvaluator, verify_results
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.modeling import GeneralizedRCNNWithTTA
from detectron2.utils import comm
from fvcore.common.config import CfgNode

from ..coco.data import read, resolve
from ..coco.results import Metrics, score, table
from ..distributed import predict
from .data import test_batches

log = logging.getLogger("transfer")


def results(model: Any, batch: list[dict[str, Any]], category_ids: list[int]) -> list[dict[str, Any]]:
    """The model's detections on all images of a batch in COCO's result format."""
    return [
        {**record, "category_id": category_ids[record["category_id"]]}
        for image, output in zip(batch, model(batch), strict=True)
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


def evaluate(cfg: CfgNode, model: Any, pictures: int, *, final: bool) -> dict[str, Metrics]:
    """Data set -> its metrics, on rank 0; {} on other ranks.

    Args:
        final: add those with test-time augmentation (TEST.AUG), as tasks that end in _TTA; compare with
            TEST.EXPECTED_RESULTS.
    """
    results = {name: _evaluate(cfg, model, name, pictures) for name in cfg.DATASETS.TEST}
    for name in cfg.DATASETS.TEST if final and cfg.TEST.AUG.ENABLED else ():
        log.info(f"{name}: with test-time augmentation")
        metrics = _evaluate(cfg, GeneralizedRCNNWithTTA(cfg, model), name, 0, keep=False)
        results[name] |= {f"{task}_TTA": row for task, row in metrics.items()}
    if not comm.is_main_process():
        return {}
    if final and cfg.TEST.EXPECTED_RESULTS:  # where there is one data set, unnamed
        verify_results(cfg, results if len(results) != 1 else next(iter(results.values())))
    return results


def _evaluate(cfg: CfgNode, model: torch.nn.Module, name: str, pictures: int, *, keep: bool = True) -> Metrics:
    """The metrics on one data set, on rank 0; {} on other ranks. ``keep`` writes the predictions."""
    batches, total = test_batches(cfg, name)  # reads the file, which gives the metadata its ids
    if evaluator := build_evaluator(name):

        def process(batch: list[dict[str, Any]]) -> list[Any]:
            evaluator.process(batch, model(batch))
            return []

        evaluator.reset()
        predict(model, batches, total, process, log.info)
        tasks: Any = evaluator.evaluate()
        if not comm.is_main_process():
            return {}
        # Below 0: LVIS's value for a kind of category that the data set does not have.
        metrics: Metrics = {task: {k: float(v) if isfinite(v) and v >= 0 else None for k, v in values.items()}
                            for task, values in tasks.items()}  # fmt: skip
        log.info(f"{name}\n{table(metrics)}")
        if pictures:
            log.info(f"no pictures of {name}: they are drawn where COCO's metrics are computed")
        return metrics
    labels = MetadataCatalog.get(name).get("thing_dataset_id_to_contiguous_id")
    if not labels:  # they are in the order of the file's ids
        categories = read(resolve(name, cfg.OUTPUT_DIR).annotations)["categories"]
        labels = {category["id"]: category["id"] for category in categories}
    detect = partial(results, model, category_ids=sorted(labels, key=labels.__getitem__))
    predictions = predict(model, batches, total, detect, log.info)
    return score(cfg, name, predictions, pictures, keep=keep) if comm.is_main_process() else {}
