"""The torchvision engine."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import nn

from pretrain.common.ranks.agreement import AgreedStop

from ..coco.records import DataSet
from ..coco.results import Detection
from ..engine import Engine
from ..training.samplers import Mapper, ModelInput, Record
from .data import Records, convert_annotation, load_coco, load_training_records
from .evaluation import to_coco
from .layers import FrozenBatchNorm
from .mapper import build_mapper
from .model import GeneralizedRCNN, build_model
from .solver import build_optimizer, build_schedule


class TorchvisionEngine(Engine):
    """Builds this project's detectors, whose numbers are Detectron2's."""

    name = "torchvision"
    frozen_norm = FrozenBatchNorm

    def __init__(self, cfg: CfgNode, data_sets: Mapping[str, DataSet], stop: AgreedStop | None = None) -> None:
        super().__init__(cfg, data_sets, stop)
        self.pin_memory = cfg.MODEL.DEVICE == "cuda" and torch.cuda.is_available()  # copies from other memory block

    def build_model(self, device: torch.device) -> GeneralizedRCNN:
        return build_model(self.cfg, device)

    def run_backbone(self, model: GeneralizedRCNN, batch: list[ModelInput]) -> None:
        images, _ = model.preprocess([record["image"] for record in batch])
        model.backbone.bottom_up(images)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(self.cfg, model)

    def build_schedule(self, optimizer: torch.optim.Optimizer) -> Callable[[int], float]:
        return build_schedule(self.cfg, optimizer)

    def load_training_set(self) -> tuple[Records, Sequence[float], Sequence[bool] | None, Mapper]:
        records, flip_indices = load_training_records(self.cfg, self.data_sets)
        wide = records.list_wide() if self.cfg.DATALOADER.ASPECT_RATIO_GROUPING else None
        return records, [1.0] * len(records), wide, build_mapper(self.cfg, True, flip_indices)

    def load_test_set(self, name: str) -> tuple[Records, list[int]]:
        return load_coco(self.data_sets[name])

    def build_test_mapper(self) -> Mapper:
        return build_mapper(self.cfg, False)

    def map_example(self, record: Record, *, is_train: bool) -> ModelInput:
        annotations = [convert_annotation(annotation, {0: 0}) for annotation in record["annotations"]]
        mapper = build_mapper(self.cfg, is_train, range(self.cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS))
        return mapper({**record, "annotations": annotations}, (0, 0))

    def detect(self, model: Any, batch: list[ModelInput], category_ids: list[int]) -> list[Detection]:
        pairs = zip(model(batch), batch, strict=True)
        return [result for detections, image in pairs for result in to_coco(detections, image, category_ids)]
