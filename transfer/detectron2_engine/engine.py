"""The Detectron2 engine."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any

import numpy as np
import torch
from detectron2 import modeling
from detectron2.config import CfgNode as Detectron2Config
from detectron2.config import get_cfg
from detectron2.data import MetadataCatalog
from detectron2.evaluation import DatasetEvaluator, LVISEvaluator, PascalVOCDetectionEvaluator
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling import GeneralizedRCNNWithTTA
from detectron2.solver import build_lr_scheduler, build_optimizer
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from fvcore.common.config import CfgNode
from torch import nn

from pretrain.common.ranks.agreement import AgreedStop, on_first_rank
from pretrain.common.ranks.environment import read_local_world_size

from ..coco.records import DataSet
from ..coco.results import Detection, Metrics, format_table
from ..config import select_steps
from ..engine import Engine
from ..training.samplers import Mapper, ModelInput, Record
from . import heads
from .data import (
    adapt_detectron2,
    build_mapper,
    compute_repeat_factors,
    convert_annotation,
    example_config,
    load_test_records,
    load_training_records,
    read_category_ids,
    register,
)

log = logging.getLogger(__name__)
_NORMS = ("RESNETS", "FPN", "ROI_BOX_HEAD", "ROI_MASK_HEAD")
_SMOOTHED = 20  # iterations over which Detectron2 takes medians


class Detectron2Storage(EventStorage):
    """EventStorage with the methods that the trainer calls."""

    def scalars(self) -> dict[str, float]:
        """Return this iteration's scalars, smoothed as Detectron2's writers do."""
        latest = self.latest_with_smoothing_hint(_SMOOTHED).items()
        return {name: float(value) for name, (value, iteration) in latest if iteration == self.iter}

    def take_images(self) -> Iterator[tuple[str, Any, int]]:
        """Yield the model's figures (name, image, iteration) since the last call."""
        yield from self._vis_data
        self.clear_images()
        self.clear_histograms()


class Detectron2Engine(Engine):
    """Builds Detectron2's models, solvers, mappers and evaluators."""

    name = "detectron2"
    frozen_norm = FrozenBatchNorm2d
    cfg: Detectron2Config

    def __init__(self, cfg: CfgNode, data_sets: Mapping[str, DataSet], stop: AgreedStop | None = None) -> None:
        """Derive Detectron2's config; set up its log, process group and data sets."""
        super().__init__(detectron2_config(cfg), data_sets, stop)
        adapt_detectron2()
        if comm.get_world_size() > 1:
            comm.create_local_process_group(read_local_world_size(comm.get_world_size()))
        for name in ("detectron2", "fvcore"):  # this run's log has their warnings
            logging.getLogger(name).handlers = logging.getLogger("transfer").handlers
            logging.getLogger(name).setLevel(logging.WARNING)
        for data_set in data_sets.values():
            register(data_set, self.cfg)

    def build_model(self, device: torch.device) -> nn.Module:
        model = modeling.build_model(self.cfg)
        if self.cfg.SOLVER.BF16:
            heads.keep_rois_in_float32(model)
        return model

    def run_backbone(self, model: Any, batch: list[ModelInput]) -> None:
        resnet = getattr(model.backbone, "bottom_up", model.backbone)  # C4 has no FPN around it
        resnet(model.preprocess_image(batch).tensor)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(self.cfg, model)

    def build_schedule(self, optimizer: torch.optim.Optimizer) -> Callable[[int], float]:
        cfg = self.cfg.clone()
        cfg.defrost()
        cfg.SOLVER.STEPS = select_steps(cfg)
        return partial(_set_rate, build_lr_scheduler(cfg, optimizer))

    def storage(self, start: int) -> Detectron2Storage:
        return Detectron2Storage(start)

    def load_training_set(self) -> tuple[Sequence[Record], Sequence[float], Sequence[bool] | None, Mapper]:
        return *load_training_records(self.cfg, self.data_sets), build_mapper(self.cfg, True)

    def load_test_set(self, name: str) -> tuple[Sequence[Record], list[int]]:
        data_set = self.data_sets[name]
        return load_test_records(data_set), read_category_ids(data_set)

    def build_test_mapper(self) -> Mapper:
        return build_mapper(self.cfg, False)

    def map_example(self, record: Record, *, is_train: bool) -> ModelInput:
        annotations = [convert_annotation(annotation, {0: 0}) for annotation in record["annotations"]]
        example: Record = {**record, "annotations": annotations}
        if is_train:
            compute_repeat_factors(self.cfg, [example])
        return build_mapper(example_config(self.cfg), is_train)(example, (0, 0))

    def build_augmented(self, model: Any) -> Any:
        return GeneralizedRCNNWithTTA(self.cfg, model) if self.cfg.TEST.AUG.ENABLED else None

    def detect(self, model: Any, batch: list[ModelInput], category_ids: list[int]) -> list[Detection]:
        detections: list[Any] = []
        for image, output in zip(batch, model(batch), strict=True):
            detections += instances_to_coco_json(output["instances"].to("cpu"), image["image_id"])
        for detection in detections:
            detection["category_id"] = category_ids[detection["category_id"]]
        return detections

    def complete_evaluation(
        self, model: nn.Module, metrics: Mapping[str, Metrics], visualize: int
    ) -> dict[str, Metrics]:
        """Return metrics as the base class does; with TEST.AUG, also of tasks whose names end in _TTA."""
        completed = super().complete_evaluation(model, metrics, visualize)
        augmented_sets = self.cfg.DATASETS.TEST if self.cfg.TEST.AUG.ENABLED else ()
        for name in augmented_sets:
            log.info(f"{name}: with test-time augmentation")
            augmented = self.evaluate_set(self.build_augmented(model), name, keep=False)
            completed[name] |= {f"{task}_TTA": row for task, row in augmented.items()}
        return completed

    def evaluate_set(self, model: Any, name: str, *, keep: bool = True) -> Metrics:
        """Return metrics as the base class does, or by the set's own evaluator (`build_evaluator`)."""
        data_set = self.data_sets[name]
        if data_set.evaluator == "coco":
            return super().evaluate_set(model, name, keep=keep)
        evaluator = build_evaluator(name)
        evaluator.reset()
        self.run_on_test_set(model, load_test_records(data_set), partial(_process, evaluator, model))
        tasks: Any = evaluator.evaluate()  # rank 0 scores
        metrics = on_first_rank(lambda: {task: _to_metrics(row) for task, row in tasks.items()})
        log.info(f"{name}\n{format_table(metrics)}")
        return metrics


def _quote(cfg: CfgNode) -> CfgNode:
    """Return ``cfg`` with its text in quotes, because merging evaluates text: an OUTPUT_DIR 2024 would be a number."""
    quoted = CfgNode()
    for key, value in cfg.items():
        quoted[key] = _quote(value) if isinstance(value, CfgNode) else repr(value) if isinstance(value, str) else value
    return quoted


def detectron2_config(cfg: CfgNode) -> Detectron2Config:
    """Return ``cfg`` as Detectron2's own, with the device and the norms that this machine can run."""
    merged = get_cfg()  # whose tuples stay tuples
    merged.set_new_allowed(True)  # for keys of this project and of the user's modules
    merged.merge_from_other_cfg(_quote(cfg))
    if merged.MODEL.DEVICE.startswith("cuda") and not torch.cuda.is_available():
        merged.MODEL.DEVICE = "cpu"
    if merged.MODEL.DEVICE == "cpu" and comm.get_world_size() > 1:
        for section in _NORMS:
            if merged.MODEL[section].NORM == "SyncBN":  # PyTorch's needs CUDA as soon as there is a process group
                merged.MODEL[section].NORM = "naiveSyncBN"
                log.info(f"MODEL.{section}.NORM is naiveSyncBN instead of SyncBN: several processes on a CPU")
    merged.freeze()
    return merged


def build_evaluator(name: str) -> DatasetEvaluator:
    """Build Detectron2's evaluator of a set of DATASETS.TEST.

    - pascal_voc: AP, AP50 and AP75 of boxes, where AP is the mean over IoU from 0.5 to 0.95, as in MoCo's tables.
    - lvis: AP of boxes and masks, also of rare, common and frequent categories (APr, APc, APf).
    """
    if MetadataCatalog.get(name).evaluator_type == "pascal_voc":
        return PascalVOCDetectionEvaluator(name)
    np.float = float  # type: ignore[attr-defined]  # lvis 0.5.3, the newest, is older than NumPy 1.24
    return LVISEvaluator(name)


def _process(evaluator: DatasetEvaluator, model: Any, batch: list[ModelInput]) -> list[Any]:
    evaluator.process(batch, model(batch))
    return []


def _to_metrics(row: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics; None for LVIS's negative value for a kind of category that the data set does not have."""
    return {name: float(value) if isfinite(value) and value >= 0 else None for name, value in row.items()}


def _set_rate(scheduler: Any, iteration: int) -> float:
    """Set the learning rates of ``iteration`` and return the one that Detectron2 logs."""
    groups = scheduler.optimizer.param_groups
    scheduler.last_epoch = iteration
    for group, rate in zip(groups, scheduler.get_lr(), strict=True):
        group["lr"] = rate
    return max(groups, key=lambda group: len(group["params"]))["lr"]
