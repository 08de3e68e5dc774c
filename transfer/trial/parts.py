"""The parts of a run, built from its config and run once on a made-up image."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode
from PIL import Image
from torch import nn

from pretrain.common.config.yaml_io import get

from ..config import classes_key
from ..engine import Engine
from ..training.samplers import Record
from .recorded_config import Reads, record_reads

_SIDES = (96, 64)  # width and height of the image
SMALL = {  # amounts that cost nothing but time, whose limits are checked before; and the device
    "MODEL.RPN.PRE_NMS_TOPK_TRAIN": 8,
    "MODEL.RPN.PRE_NMS_TOPK_TEST": 8,
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": 8,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 8,
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 4,
    "TEST.DETECTIONS_PER_IMAGE": 4,
    "INPUT.MIN_SIZE_TEST": min(_SIDES),
    "MODEL.DEVICE": "cpu",
}


def run(engine_class: type[Engine], cfg: CfgNode, reads: Reads, *, eval_only: bool) -> None:
    """Build the model, optimizer and schedule; compute the losses of a made-up image, and detect objects in it.

    A user's own mapper is not called, since its records need not be images with boxes.
    """
    engine = engine_class(_shrink(cfg), {})
    engine.cfg = record_reads(engine.cfg, reads)
    model = engine.build_model(torch.device("cpu"))
    if not eval_only:
        schedule = engine.build_schedule(engine.build_optimizer(model))
        for iteration in (0, cfg.SOLVER.MAX_ITER - 1):
            schedule(iteration)
    if engine.cfg.INPUT.MAPPER:
        return
    with tempfile.TemporaryDirectory() as folder:
        record = _make_record(Path(folder) / "image.png", cfg)
        if not eval_only:
            model.train()
            _fix_statistics(model)
            with engine.storage(1):
                model([engine.map_example(record, is_train=True)])
        model.eval()
        image = engine.map_example(record, is_train=False)
        category_ids = list(range(get(cfg, classes_key(cfg))))
        with torch.no_grad():
            for detector in filter(None, (model, engine.build_augmented(model))):
                engine.detect(detector, [image], category_ids)


def _shrink(cfg: CfgNode) -> CfgNode:
    """Return a config with amounts that take little time."""
    cfg = cfg.clone()
    cfg.defrost()
    for key, value in SMALL.items():
        section, _, leaf = key.rpartition(".")
        get(cfg, section)[leaf] = value
    cfg.INPUT.MIN_SIZE_TRAIN = [min(_SIDES)] * len(cfg.INPUT.MIN_SIZE_TRAIN)
    cfg.TEST.AUG.MIN_SIZES = [min(_SIDES)] * len(cfg.TEST.AUG.MIN_SIZES[:1])
    return cfg


def _fix_statistics(model: nn.Module) -> None:
    """Let batch norms use their statistics: those of one small image may be computed over one value."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


def _make_record(path: Path, cfg: CfgNode) -> Record:
    """Write a gray image, and return its record, with two objects, whose annotations are COCO's."""
    width, height = _SIDES
    Image.fromarray(np.full((height, width, 3), 127, np.uint8)).save(path)
    annotations: list[dict[str, Any]] = []
    for left in (4, 52):
        right = left + 40
        outline = [left, 8, right, 8, right, 56, left, 56]
        points = [left + 10, 20, 2] * cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS
        annotation = {"bbox": [left, 8, 40, 48], "segmentation": [outline], "keypoints": points, "iscrowd": 0}
        annotations.append(annotation | {"category_id": 0})
    return {"file_name": str(path), "image_id": 1, "height": height, "width": width, "annotations": annotations}
