"""Model and optimizer of the torchvision engine compared with Detectron2's, with equal weights, on noise."""

from __future__ import annotations

import argparse
import copy
import functools
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode
from tabulate import tabulate
from torch import nn

from pretrain.common import distributed
from pretrain.common.errors import UserError
from tools.benchmarks.machine import describe_environment
from tools.benchmarks.measure import measure_peak_mib, time_rounds
from transfer.config import check_supported, load_config
from transfer.torchvision_engine.model import build_model
from transfer.torchvision_engine.solver import build_optimizer


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print both engines' median milliseconds, the median of the rounds' ratios, and peak memory.

    Raises:
        UserError: Detectron2 is not installed, or the torchvision engine does not support a key.
    """
    cfg = load_config(args.config_file, args.opts)
    device = distributed.init()
    cfg.MODEL.DEVICE = device.type
    batch = draw_batch(args.images, args.side, cfg)
    model, step = build_torchvision_step(cfg, batch)
    detectron2_model, detectron2_step = build_detectron2_step(cfg, batch)
    detectron2_model.load_state_dict(model.state_dict())
    steps = {"torchvision": step, "detectron2": detectron2_step}
    for step in steps.values():  # fill caches and the momentum of the optimizers before the timed rounds
        step()
    print(f"{args.config_file}: {args.images} images of {args.side} px, {device}, {args.rounds} rounds")
    milliseconds = time_rounds(steps, args.rounds)
    numbers: dict[str, dict[str, float]] = {}
    for name, step in steps.items():
        gc.collect()
        numbers[name] = {"ms": float(np.median(milliseconds[name])), "peak_mib": measure_peak_mib(step, device)}
    ratios = np.array(milliseconds["torchvision"]) / np.array(milliseconds["detectron2"])
    peak_ratio = numbers["torchvision"]["peak_mib"] / numbers["detectron2"]["peak_mib"]
    numbers["ratio"] = {"ms": float(np.median(ratios)), "peak_mib": peak_ratio}
    print(tabulate([[name, *row.values()] for name, row in numbers.items()], ["", "ms", "peak MiB"], floatfmt=".3f"))
    return {**describe_environment(["detectron2"], torch.get_num_threads()), **numbers}


def build_torchvision_step(cfg: CfgNode, batch: list[dict[str, Any]]) -> tuple[nn.Module, Callable[[], None]]:
    """Return the torchvision engine's model in training mode, and a step that trains it on ``batch``.

    Raises:
        UserError: the engine does not support a key.
    """
    check_supported(cfg)
    torch.manual_seed(0)
    model = build_model(cfg, torch.device(cfg.MODEL.DEVICE)).train()
    return model, functools.partial(_step, model, build_optimizer(cfg, model), batch)


def build_detectron2_step(cfg: CfgNode, batch: list[dict[str, Any]]) -> tuple[nn.Module, Callable[[], None]]:
    """Return the same of Detectron2.

    Raises:
        UserError: Detectron2 is not installed.
    """
    try:
        from detectron2.modeling import build_model
        from detectron2.solver import build_optimizer

        from transfer.detectron2_engine.engine import detectron2_config
    except ImportError as error:
        raise UserError("Detectron2 is not installed; `make detectron2` installs it") from error
    detectron2_cfg = detectron2_config(cfg)
    torch.manual_seed(0)
    model = build_model(detectron2_cfg).train()
    optimizer = build_optimizer(detectron2_cfg, model)
    return model, functools.partial(_step_with_storage, model, optimizer, _convert_to_detectron2(batch))


def draw_batch(images: int, side: int, cfg: Any) -> list[dict[str, Any]]:
    """Draw noise with ten boxes per image, diamonds in them as masks, keypoints inside, and random classes."""
    rng = np.random.default_rng(0)
    batch = []
    for _ in range(images):
        corner = rng.uniform(0, side / 2, (10, 2))
        size = rng.uniform(side / 8, side / 2, (10, 2))
        x, y = corner.T
        w, h = size.T
        diamonds = np.stack([x, y + h / 2, x + w / 2, y, x + w, y + h / 2, x + w / 2, y + h], 1)
        points = np.concatenate([corner[:, None] + size[:, None] * rng.random((10, 17, 2)), np.full((10, 17, 1), 2)], 2)
        target = {
            "boxes": torch.tensor(np.stack([x, y, x + w, y + h], 1), dtype=torch.float32),
            "labels": torch.tensor(rng.integers(0, cfg.MODEL.ROI_HEADS.NUM_CLASSES, 10)),
            "masks": [[polygon] for polygon in diamonds],
            "keypoints": torch.tensor(points, dtype=torch.float32),
        }
        image = torch.tensor(rng.integers(0, 256, (3, side, side)), dtype=torch.uint8)
        batch.append({"image": image, "height": side, "width": side, "target": target})
    return batch


def _convert_to_detectron2(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from detectron2.structures import Boxes, Instances, Keypoints, PolygonMasks

    converted = []
    for record in batch:
        target = record["target"]
        instances = Instances(record["image"].shape[-2:], gt_boxes=Boxes(target["boxes"]), gt_classes=target["labels"])
        instances.gt_masks = PolygonMasks(copy.deepcopy(target["masks"]))
        instances.gt_keypoints = Keypoints(target["keypoints"])
        converted.append({**record, "instances": instances})
    return converted


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    losses = model(batch)
    optimizer.zero_grad()
    values = torch.stack(list(losses.values()))
    values.sum().backward()
    values.tolist()  # as a training loop reads them
    optimizer.step()


def _step_with_storage(*arguments: Any) -> None:
    """Run a step where Detectron2's model finds the storage that it logs to."""
    from detectron2.utils.events import EventStorage

    with EventStorage():
        _step(*arguments)
