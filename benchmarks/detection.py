"""Model and optimizer of the torchvision engine compared with Detectron2's, with equal weights, on noise."""

import argparse
import copy
import functools
import gc
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
from fvcore.common.config import CfgNode
from tabulate import tabulate
from torch import nn
from torch.utils.data._utils.pin_memory import pin_memory

from benchmarks.measure import measure_peak_mib, time_rounds
from pretrain.common.device import AsyncHostCopy
from pretrain.common.ranks import process_group
from transfer.config import load_config
from transfer.engine import Engine
from transfer.preflight import check_supported, choose_engine
from transfer.step import accumulate_losses
from transfer.train import load_engine
from transfer.trainer import choose_precision

ENGINES = ("torchvision", "detectron2")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print both engines' median milliseconds, the median of the rounds' ratios, and peak memory.

    Raises:
        UserError: Detectron2 is not installed, or an engine does not support a key.
    """
    cfg = load_config(args.config_file, args.opts)
    device = process_group.init_process_group()
    cfg.MODEL.DEVICE = device.type
    batch = draw_batch(args.images, args.side, args.side, cfg)
    built = {name: build_step(name, cfg, [batch]) for name in ENGINES}
    built["detectron2"][0].load_state_dict(built["torchvision"][0].state_dict())
    steps = {name: step for name, (_, step) in built.items()}
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
    return numbers


def build_step(
    engine_name: str, cfg: CfgNode, batches: list[list[dict[str, Any]]]
) -> tuple[nn.Module, Callable[[], None]]:
    """Return an engine's model in training mode, and a step that trains it on the next of ``batches``, which repeat.

    Raises:
        UserError: the engine is not installed, or does not support a key.
    """
    cfg = cfg.clone()
    cfg.defrost()
    cfg.DATASETS.TEST = ()  # the images are noise
    if choose_engine(engine_name) == "torchvision":
        check_supported(cfg)
    engine = load_engine(engine_name)(cfg, {})
    torch.manual_seed(0)
    model = engine.build_model(torch.device(cfg.MODEL.DEVICE)).train()
    if engine_name == "detectron2":
        batches = [_convert_to_detectron2(batch) for batch in batches]
    if engine.pin_memory:
        batches = cast(Any, pin_memory(batches))
    precision = choose_precision(cfg, torch.device(cfg.MODEL.DEVICE))
    cycle = itertools.cycle(batches)
    unread: deque[AsyncHostCopy] = deque()
    return model, functools.partial(_step, engine, model, engine.build_optimizer(model), cycle, precision, unread)


def draw_batch(images: int, height: int, width: int, cfg: Any) -> list[dict[str, Any]]:
    """Draw noise with ten boxes per image, diamonds in them as masks, keypoints inside, and random classes."""
    rng = np.random.default_rng(0)
    batch = []
    for _ in range(images):
        corner = rng.uniform(0, (width / 2, height / 2), (10, 2))
        size = rng.uniform((width / 8, height / 8), (width / 2, height / 2), (10, 2))
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
        image = torch.tensor(rng.integers(0, 256, (3, height, width)), dtype=torch.uint8)
        batch.append({"image": image, "height": height, "width": width, "target": target})
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


def _step(
    engine: Engine,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[list[dict[str, Any]]],
    precision: torch.dtype | None,
    unread: deque[AsyncHostCopy],
) -> None:
    """Train on the next batch; read the losses of the one before, as training does."""
    torch.manual_seed(0)
    optimizer.zero_grad()
    with engine.storage(0):  # that Detectron2's model logs to
        losses = accumulate_losses(model, next(batches), 1, lambda loss: loss, precision)
    values = torch.stack(list(losses.values()))
    values.sum().backward()
    unread.append(AsyncHostCopy(values.detach()))
    optimizer.step()
    if len(unread) > 1:
        unread.popleft().read()
