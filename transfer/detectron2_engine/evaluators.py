"""Metrics of data sets that are not COCO's, by Detectron2's own evaluators."""

from __future__ import annotations

from detectron2.data import MetadataCatalog
from detectron2.evaluation import DatasetEvaluator, PascalVOCDetectionEvaluator


def build_evaluator(name: str) -> DatasetEvaluator | None:
    """The evaluator of a set of DATASETS.TEST by its ``evaluator_type``; None: COCO's metrics.

    - pascal_voc: AP, AP50 and AP75 of boxes, where AP is the mean over IoU from 0.5 to 0.95, as in MoCo's tables.
    """
    kind = MetadataCatalog.get(name).get("evaluator_type", "coco")
    return PascalVOCDetectionEvaluator(name) if kind == "pascal_voc" else None
