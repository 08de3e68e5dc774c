"""Metrics of data sets that are not COCO's, by Detectron2's own evaluators."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
from detectron2.data import MetadataCatalog
from detectron2.evaluation import DatasetEvaluator, LVISEvaluator, PascalVOCDetectionEvaluator


def build_evaluator(name: str) -> DatasetEvaluator | None:
    """The evaluator of a set of DATASETS.TEST by its ``evaluator_type``; None: COCO's metrics.

    - pascal_voc: AP, AP50 and AP75 of boxes, where AP is the mean over IoU from 0.5 to 0.95, as in MoCo's tables.
    - lvis: AP of boxes and masks, also of rare, common and frequent categories (APr, APc, APf).
    """
    kinds = {"pascal_voc": PascalVOCDetectionEvaluator, "lvis": _LVISEvaluator}
    kind = kinds.get(MetadataCatalog.get(name).get("evaluator_type", "coco"))
    return kind(name) if kind else None


class _LVISEvaluator(LVISEvaluator):
    """Detectron2's, for a package that reads ``numpy.float``, which NumPy no longer has."""

    def evaluate(self) -> Any:
        with mock.patch.object(np, "float", float, create=True):
            return super().evaluate()
