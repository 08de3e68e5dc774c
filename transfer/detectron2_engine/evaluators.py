"""Metrics of data sets that are not COCO's, by Detectron2's own evaluators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
from detectron2.data import MetadataCatalog
from detectron2.evaluation import (
    CityscapesInstanceEvaluator,
    DatasetEvaluator,
    LVISEvaluator,
    PascalVOCDetectionEvaluator,
)
from detectron2.utils import comm

from pretrain.common.errors import UserError

from ..distributed import raise_if_stopped


def build_evaluator(name: str) -> DatasetEvaluator | None:
    """The evaluator of a set of DATASETS.TEST by its ``evaluator_type``; None: COCO's metrics.

    - pascal_voc: AP, AP50 and AP75 of boxes, where AP is the mean over IoU from 0.5 to 0.95, as in MoCo's tables.
    - cityscapes_instance: AP and AP50 of masks, by Cityscapes' own scripts, on one machine.
    - lvis: AP of boxes and masks, also of rare, common and frequent categories (APr, APc, APf).
    """
    kinds = {
        "pascal_voc": PascalVOCDetectionEvaluator, "lvis": _LVISEvaluator,
        "cityscapes_instance": _CityscapesEvaluator,
    }  # fmt: skip
    kind = kinds.get(MetadataCatalog.get(name).get("evaluator_type", "coco"))
    return kind(name) if kind else None


def refuse_machines(names: Sequence[str]) -> None:
    """Raises UserError for a data set whose evaluator works on one machine only, where there are several."""
    for name in names:
        kind = MetadataCatalog.get(name).get("evaluator_type", "")
        if kind == "cityscapes_instance" and comm.get_local_size() != comm.get_world_size():
            raise UserError(
                f"Cityscapes' metrics of {name} can be computed on one machine only; start one, or leave it out"
            )


@contextlib.contextmanager
def _older_numpy() -> Iterator[None]:
    """Names that the packages behind the evaluators use, and that NumPy no longer has."""
    with mock.patch.multiple(np, create=True, float=float, in1d=np.isin):
        yield


class _LVISEvaluator(LVISEvaluator):
    def evaluate(self) -> Any:
        with _older_numpy():
            return super().evaluate()


class _CityscapesEvaluator(CityscapesInstanceEvaluator):
    def evaluate(self) -> Any:
        raise_if_stopped()  # images without predictions would end the process
        # It would write all matches into the working directory, which fails on NumPy's numbers.
        unwritten = "cityscapesscripts.evaluation.evalInstanceLevelSemanticLabeling.writeDict2JSON"
        with _older_numpy(), mock.patch(unwritten):
            return super().evaluate()
