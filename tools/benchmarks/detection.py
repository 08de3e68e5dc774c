"""Model and optimizer of the torchvision engine against Detectron2's, with equal weights, on noise."""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from pretrain.common.errors import UserError
from tools.benchmarks.machine import about
from tools.benchmarks.measure import peak_mib, timed_rounds
from transfer.config import check_supported, load_config
from transfer.torchvision_engine.model import build_model
from transfer.torchvision_engine.solver import build_optimizer


def detection(args: argparse.Namespace) -> dict[str, Any]:
    """Prints both engines' median wall and processor seconds, the median of the rounds' ratios, and peak memory.

    Raises:
        UserError: Detectron2 is not installed, or a key that the torchvision engine does not support.
    """
    try:
        from detectron2.config import get_cfg
        from detectron2.modeling import build_model as build_theirs
        from detectron2.solver import build_optimizer as build_their_optimizer
    except ImportError as error:
        raise UserError("Detectron2 is not installed; `make detectron2` installs it") from error
    cfg, theirs = load_config(args.config_file, args.opts), get_cfg()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cfg.MODEL.DEVICE = device.type
    check_supported(cfg)
    theirs.merge_from_other_cfg(cfg)
    torch.manual_seed(0)
    own, other = build_model(cfg, device), build_theirs(theirs)
    other.load_state_dict(own.state_dict())
    batch = random_batch(args.images, args.side, cfg)
    steps = {
        "torchvision": _step(own.train(), build_optimizer(cfg, own), batch),
        "detectron2": _step(other.train(), build_their_optimizer(theirs, other), _for_detectron2(batch)),
    }
    for step in steps.values():  # fills caches and the momentum of the optimizers
        step()
    print(f"{args.config_file}: {args.images} images of {args.side} px, {device}, {args.rounds} rounds")
    seconds, rows = timed_rounds(steps, args.rounds), []
    for name, step in steps.items():
        gc.collect()
        rows.append([name, *np.median(seconds[name], axis=0), peak_mib(step, device)])
    first, second = (np.array(seconds[name]) for name in steps)
    rows.append(["ratio", *np.median(first / second, axis=0), rows[0][3] / rows[1][3]])
    print(tabulate(rows, ["", "wall s", "CPU s", "peak MiB"], floatfmt=".3f"))
    names = ("wall_seconds", "cpu_seconds", "peak_mib")
    return {
        **about(["detectron2"], torch.get_num_threads()),
        **{r[0]: dict(zip(names, r[1:], strict=True)) for r in rows},
    }


def random_batch(images: int, side: int, cfg: Any) -> list[dict[str, Any]]:
    """Noise with ten boxes per image, diamonds in them as masks, keypoints inside, random classes."""
    rng = np.random.default_rng(0)
    batch = []
    for _ in range(images):
        corner, size = rng.uniform(0, side / 2, (10, 2)), rng.uniform(side / 8, side / 2, (10, 2))
        x, y, w, h = *corner.T, *size.T
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


def _for_detectron2(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from detectron2.structures import Boxes, Instances, Keypoints, PolygonMasks

    out = []
    for record in batch:
        target = record["target"]
        instances = Instances(record["image"].shape[-2:], gt_boxes=Boxes(target["boxes"]), gt_classes=target["labels"])
        instances.gt_masks = PolygonMasks(copy.deepcopy(target["masks"]))
        instances.gt_keypoints = Keypoints(target["keypoints"])
        out.append({**record, "instances": instances})
    return out


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: list[dict[str, Any]]) -> Callable[[], None]:
    from detectron2.utils.events import EventStorage

    def step() -> None:
        torch.manual_seed(0)
        with EventStorage():
            losses = model(batch)
        optimizer.zero_grad()
        values = torch.stack(list(losses.values()))
        values.sum().backward()
        values.tolist()  # as a training loop reads them
        optimizer.step()

    return step
