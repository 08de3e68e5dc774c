"""The Detectron2 engine as `transfer.train` uses it (see `transfer.state.Engine`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from detectron2 import modeling
from detectron2.config import get_cfg
from detectron2.layers import FrozenBatchNorm2d
from detectron2.solver import build_lr_scheduler, build_optimizer
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from fvcore.common.config import CfgNode
from torch import nn

from . import heads
from .data import register, test_images, training_data
from .evaluation import evaluate, results

__all__ = ["FROZEN_NORM", "NAME", "build_optimizer", "evaluate", "results", "test_images", "training_data"]
NAME: str = "detectron2"
FROZEN_NORM: type[nn.Module] = FrozenBatchNorm2d
_NORMS = ("RESNETS", "FPN", "ROI_BOX_HEAD", "ROI_MASK_HEAD")
_SMOOTHED = 20  # iterations over which Detectron2 takes medians


class Storage(EventStorage):
    """Detectron2's, with what this project writes of it."""

    def scalars(self) -> dict[str, float]:
        """Those of this iteration, smoothed as Detectron2's writers do."""
        latest = self.latest_with_smoothing_hint(_SMOOTHED).items()
        return {name: float(value) for name, (value, iteration) in latest if iteration == self.iter}

    def take_images(self) -> Iterator[tuple[str, Any, int]]:
        """The pictures (name, image, iteration) that have come since the last call."""
        yield from self._vis_data
        self.clear_images()
        self.clear_histograms()


storage = Storage


def prepare(cfg: CfgNode, log: Callable[[str], None]) -> CfgNode:
    """Detectron2's own config, its log, process group and test sets."""
    cfg = detectron2_config(cfg, log)
    if comm.get_world_size() > 1:
        comm.create_local_process_group(int(os.environ.get("LOCAL_WORLD_SIZE", str(comm.get_world_size()))))
    for name in ("detectron2", "fvcore"):  # this run's log has their warnings
        logging.getLogger(name).handlers = logging.getLogger("transfer").handlers
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in cfg.DATASETS.TEST:
        register(name, cfg)
    return cfg


def detectron2_config(cfg: CfgNode, log: Callable[[str], None]) -> CfgNode:
    """``cfg`` as Detectron2's own, with the device and the norms that this machine can run; logs what was changed."""
    merged, world = get_cfg(), comm.get_world_size()
    merged.set_new_allowed(True)  # this project's own keys, where they are set
    merged.merge_from_other_cfg(cfg)
    if merged.MODEL.DEVICE.startswith("cuda") and not torch.cuda.is_available():
        merged.MODEL.DEVICE = "cpu"
    if merged.MODEL.DEVICE == "cpu" and world > 1:
        for part in _NORMS:
            if merged.MODEL[part].NORM == "SyncBN":  # PyTorch's needs CUDA as soon as there is a process group
                merged.MODEL[part].NORM = "naiveSyncBN"
                log(f"MODEL.{part}.NORM is naiveSyncBN instead of SyncBN: several processes on a CPU")
    merged.freeze()
    return merged


def build_model(cfg: CfgNode, device: torch.device) -> Any:
    model = modeling.build_model(cfg)
    if cfg.SOLVER.get("BF16", False):
        heads.keep_rois_in_float32(model)
    return model


def backbone_features(model: Any, batch: list[dict[str, Any]]) -> Any:
    resnet = getattr(model.backbone, "bottom_up", model.backbone)  # C4 has no FPN around it
    return resnet(model.preprocess_image(batch).tensor)


def build_schedule(cfg: Any, optimizer: torch.optim.Optimizer) -> Callable[[int], float]:
    scheduler: Any = build_lr_scheduler(cfg, optimizer)

    def schedule(iteration: int) -> float:
        scheduler.last_epoch = iteration
        for group, rate in zip(optimizer.param_groups, scheduler.get_lr(), strict=True):
            group["lr"] = rate
        return max(optimizer.param_groups, key=lambda group: len(group["params"]))["lr"]  # as Detectron2 logs it

    return schedule
