"""Training iterations, paired.

`detection`: model and optimizer of the torchvision engine against Detectron2's, with equal weights, on noise.
`trainer`: this project's Detectron2 engine against Detectron2's default trainer, with data and hooks.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import logging
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from pretrain.common.errors import UserError
from tools.benchmarks.measure import peak_mib, timed_rounds
from transfer.config import check_supported, load_config
from transfer.torchvision_engine.model import build_model
from transfer.torchvision_engine.solver import build_optimizer


def detection(args: argparse.Namespace) -> None:
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
        "torchvision": _step(own.train(), build_optimizer(cfg.SOLVER, own), batch),
        "detectron2": _step(other.train(), build_their_optimizer(theirs, other), _for_detectron2(batch)),
    }
    for step in steps.values():  # fills caches and the momentum of the optimizers
        step()
    print(f"{args.config_file}: {args.images} images of {args.side} px, {device}, {args.rounds} rounds")
    compare(steps, args.rounds, device)


def trainer(args: argparse.Namespace) -> None:
    """The same figures for whole iterations of a run: reading images, hooks, step.

    Raises:
        UserError: Detectron2 is not installed, or the data does not exist.
    """
    try:
        from detectron2.engine import DefaultTrainer
        from detectron2.utils.events import EventStorage

        from transfer.detectron2_engine import engine
    except ImportError as error:
        raise UserError("Detectron2 is not installed; `make detectron2` installs it") from error
    cfg = engine.detectron2_config(load_config(args.config_file, args.opts), print)
    cfg.defrost()
    cfg.MODEL.DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
    cfg.TEST.EVAL_PERIOD, cfg.SOLVER.CHECKPOINT_PERIOD = 0, 10**6
    cfg.SOLVER.MAX_ITER += args.rounds + 4  # the last iteration, which evaluates, is never reached
    for name in cfg.DATASETS.TRAIN:
        engine.register(name)
    with tempfile.TemporaryDirectory() as folder:
        cfg.OUTPUT_DIR = folder
        steps = {
            "this project": _own_iteration(engine, cfg),
            "detectron2": _iteration(DefaultTrainer(cfg), EventStorage(0)),
        }
        for step in steps.values():
            step()
        size = f"{cfg.SOLVER.IMS_PER_BATCH} images per step"
        print(f"{args.config_file}: {size}, {cfg.MODEL.DEVICE}, {args.rounds} rounds")
        compare(steps, args.rounds, torch.device(cfg.MODEL.DEVICE))


def _own_iteration(engine: Any, cfg: Any) -> Callable[[], None]:
    from transfer.state import State
    from transfer.train import run_step

    device = torch.device(cfg.MODEL.DEVICE)
    state = State(engine, cfg, engine.build_model(cfg, device), device, 0, 1, logging.getLogger("transfer"))
    batches = state.batches(seed=1, start=0, workers=cfg.DATALOADER.NUM_WORKERS)
    state.model.train()
    counter = itertools.count()

    def step() -> None:
        with engine.storage(0) as state.storage:
            run_step(state, state.model, batches, next(counter))

    return step


def _iteration(trainer: Any, storage: Any) -> Callable[[], None]:
    """One iteration of a trainer, as its `train` runs it."""
    trainer.iter, trainer.storage = 0, storage
    storage.__enter__()
    trainer.before_train()
    storage.__exit__(None, None, None)

    def step() -> None:
        with storage:
            trainer.before_step()
            trainer.run_step()
            trainer.after_step()
            trainer.iter += 1

    return step


def compare(steps: dict[str, Callable[[], None]], rounds: int, device: torch.device) -> None:
    """Prints the medians of each form, and the median of the rounds' ratios of the first to the second."""
    seconds, rows = timed_rounds(steps, rounds), []
    for name, step in steps.items():
        gc.collect()
        rows.append([name, *np.median(seconds[name], axis=0), peak_mib(step, device)])
    first, second = (np.array(seconds[name]) for name in steps)
    rows.append(["ratio", *np.median(first / second, axis=0), rows[0][3] / rows[1][3]])
    print(tabulate(rows, ["", "wall s", "CPU s", "peak MiB"], floatfmt=".3f"))


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
