"""What a training reads, changes, saves and reports; `train` is the loop around it."""

from __future__ import annotations

import contextlib
import datetime
import statistics
import sys
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from logging import Logger
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from fvcore.common.config import CfgNode
from fvcore.nn.precise_bn import get_bn_modules
from torch import nn
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from pretrain.common import distributed
from pretrain.common.distributed import on_first_rank
from pretrain.common.errors import UserError
from pretrain.common.files import atomic_write, read_json, write_json
from pretrain.common.run.metrics import MetricsWriter
from pretrain.common.run.skipped_steps import SkippedSteps
from pretrain.common.run.workers import verdict
from pretrain.common.weights import checkpoint

from . import HOOKS, checkpoints
from .batch_norm import pool_batch_norm
from .coco.results import Metrics
from .config import dump

LOG_PERIOD = 20  # iterations between two lines of metrics.json, and those that a line's medians are taken over


class Engine(Protocol):
    """What differs between the engines: the modules `detectron2_engine.engine` and `torchvision_engine.engine`."""

    NAME: str  # in checkpoints and results
    FROZEN_NORM: type[nn.Module]  # of batch norms whose statistics are fixed
    # (config, log) -> the engine's own config.
    prepare: Callable[[CfgNode, Callable[[str], None]], CfgNode]
    # A detector that maps a list of records to losses by name (in training) or detections.
    build_model: Callable[[CfgNode, torch.device], Any]
    # (model, batch) runs the ResNet alone on the images of a batch.
    backbone_features: Callable[[Any, list[dict[str, Any]]], Any]
    # Its step clips gradients as SOLVER.CLIP_GRADIENTS says.
    build_optimizer: Callable[[CfgNode, nn.Module], torch.optim.Optimizer]
    # Iteration (from 0) -> learning rate, which it sets in all groups of the optimizer.
    build_schedule: Callable[[CfgNode, torch.optim.Optimizer], Callable[[int], float]]
    # A function of (seed, start, workers) to an iterator of this rank's batches; the number of images.
    training_data: Callable[[CfgNode], tuple[Callable[..., Any], int]]
    # Takes scalars and images of the model and of hooks while it is entered, as Detectron2's EventStorage.
    storage: Callable[[int], AbstractContextManager[Any]]
    # (config, model, pictures, final) -> the metrics of each set of DATASETS.TEST on rank 0, {} on others; draws
    # predictions on ``pictures`` images; ``final``: not one of a training's intermediate evaluations.
    evaluate: Callable[..., dict[str, Metrics]]
    # (config, records) -> a `samplers.MappedRecords` of the records as an evaluation gives them to the model.
    test_images: Callable[[CfgNode, list[dict[str, Any]]], Any]
    # (model, batch, category ids by label) -> the detections in COCO's result format.
    results: Callable[[Any, list[dict[str, Any]], list[int]], list[dict[str, Any]]]


class State(contextlib.ExitStack):
    """A training; leaving the context closes its writer of metrics.json and its progress bar.

    Hooks see it as Detectron2's hooks see their trainer: ``iter``, ``start_iter``, ``max_iter``, ``model``,
    ``optimizer``, ``storage``, ``cfg``.

    Attributes:
        schedule: iteration -> learning rate, which it sets.
        precision: of the forward pass; None: float32.
        window: the losses and times of the last LOG_PERIOD iterations.
    """

    def __init__(self, engine: Engine, cfg: CfgNode, model: Any, device: torch.device, log: Logger) -> None:
        super().__init__()
        is_half, is_bf16 = cfg.SOLVER.AMP.ENABLED, cfg.SOLVER.get("BF16", False)
        if is_half and not is_bf16 and device.type != "cuda":
            raise UserError(
                "SOLVER.AMP.ENABLED is True, but float16 needs a CUDA device; set it False, or SOLVER.BF16 True"
            )
        self.precision = (torch.bfloat16 if is_bf16 else torch.float16) if is_half else None
        self.engine, self.cfg, self.model, self.device, self.log = engine, cfg, model, device, log
        self.rank, self.world = distributed.rank(), distributed.world_size()
        self.iter, self.start_iter, self.max_iter = 0, 0, cfg.SOLVER.MAX_ITER
        self.batches, self.images = engine.training_data(cfg)
        self.optimizer = engine.build_optimizer(cfg, model)
        self.schedule = engine.build_schedule(cfg, self.optimizer)
        self.scaler = torch.amp.grad_scaler.GradScaler(device.type, enabled=self.precision == torch.float16)
        self.skipped = SkippedSteps("set SOLVER.AMP.ENABLED False")
        self.window: deque[dict[str, float]] = deque(maxlen=LOG_PERIOD)
        self.writer: MetricsWriter | None = None  # rank 0's
        self.hooks: dict[str, Any] = {name: HOOKS[name](cfg) for name in cfg.SOLVER.get("HOOKS", ())}
        for hook in self.hooks.values():
            hook.trainer = weakref.proxy(self)

    def report_from(self, start: int, first_line: int) -> tqdm:
        """Opens metrics.json, without its lines from ``first_line`` on, and the progress bar, which is returned."""
        self.iter = self.start_iter = start
        self.storage = self.enter_context(self.engine.storage(start))
        if start < self.max_iter:
            self.log.info(
                f"training on {self.images} images from iteration {start} to {self.max_iter}: {self.world} "
                f"process(es), {self.cfg.SOLVER.IMS_PER_BATCH} images per step, {self.device}, seed {self.cfg.SEED}"
            )
        shown = self.rank == 0 and sys.stderr.isatty()
        if self.rank == 0:
            self.writer = self.enter_context(contextlib.closing(MetricsWriter(self.cfg.OUTPUT_DIR, first_line)))
        if shown:
            self.enter_context(logging_redirect_tqdm([self.log]))
        return self.enter_context(tqdm(total=self.max_iter, initial=start, unit="it", disable=not shown))

    def call_hooks(self, name: str) -> None:
        """Calls this method of the hooks that have it, on every rank."""
        for hook in self.hooks.values():
            getattr(hook, name, lambda: None)()

    def write_images(self) -> None:
        """Writes the model's pictures of training (VIS_PERIOD) for TensorBoard."""
        for name, image, iteration in self.storage.take_images():
            if self.writer:
                self.writer.add_image(name, image, iteration)

    def write(self, iteration: int, values: dict[str, float]) -> None:
        """Writes a line of metrics.json if there are any values."""
        if self.writer and values:
            self.writer.write(iteration, values | (self.skipped.values() if self.scaler.is_enabled() else {}))

    def summary(self, iteration: int) -> dict[str, float]:
        """Returns medians of the window for metrics.json; logs them, the ETA and the share of time waiting for data.

        All ranks take part: a step waits for the rank whose data arrive last.
        """
        line = {key: statistics.median(step[key] for step in self.window if key in step) for key in self.window[-1]}
        waited = [step["data_time"] for step in self.window]
        if self.world > 1:
            longest = torch.tensor(waited, device=self.device)
            dist.all_reduce(longest, dist.ReduceOp.MAX)
            waited = longest.tolist()
        line |= {"data_time": statistics.median(waited), "lr": self.schedule(iteration)}
        line |= {"eta_seconds": line["time"] * (self.max_iter - iteration - 1), **self.storage.scalars()}
        share = sum(waited) / sum(step["time"] for step in self.window)
        losses = "  ".join(f"{key}: {value:.4g}" for key, value in line.items() if "loss" in key)
        if self.device.type == "cuda":
            line["max_memory_mib"] = torch.cuda.max_memory_allocated() / 2**20
        memory = f"  max_mem: {line['max_memory_mib']:.0f}M" if "max_memory_mib" in line else ""
        self.log.info(
            f"eta: {datetime.timedelta(seconds=int(line['eta_seconds']))}  iter: {iteration}  {losses}  "
            f"time: {line['time']:.4f}  data_time: {line['data_time']:.4f}  lr: {line['lr']:.5g}{memory}  "
            f"{self.cfg.SOLVER.IMS_PER_BATCH / line['time']:.1f} images/s, {share:.0%} waiting for data "
            f"({verdict(share, 0.2)})"
        )
        return line

    def save(self, name: str, iteration: int) -> None:
        """Writes a checkpoint on rank 0; the other ranks wait for it, and fail with it.

        Statistics that batch norm has for each rank are pooled before, so that all ranks evaluate what is saved.
        """
        if self.world > 1:
            pool_batch_norm(norm for norm in get_bn_modules(self.model) if "Sync" not in type(norm).__name__)
        on_first_rank(lambda: self.write_file(name, iteration))

    def write_file(self, name: str, iteration: int) -> None:
        """Writes a checkpoint on this rank."""
        out = Path(self.cfg.OUTPUT_DIR)
        content = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "iteration": iteration,
            "seed": self.cfg.SEED,
            "window": list(self.window),
            "skipped_steps": self.skipped.total_after(self.scaler.get_scale()),
            "hooks": {name: hook.state_dict() for name, hook in self.hooks.items() if hasattr(hook, "state_dict")},
            "engine": self.engine.NAME,
            "config": dump(self.cfg),
        }
        checkpoints.save(out / name, content)
        if name not in (checkpoints.EVALUATING, checkpoints.BEST):
            atomic_write(out / "last_checkpoint", name)
            if keep := self.cfg.SOLVER.get("CHECKPOINT_KEEP", 0):
                checkpoint.prune(out, keep, out / name, "model_[0-9]*.pth")
        self.log.info(f"saved {out / name}")

    def keep_best(self, results: dict[str, Metrics], iteration: int) -> None:
        """Writes model_best.pth, then best.json, on rank 0 if the evaluation (of the first set) is the best so far."""
        out, metric = Path(self.cfg.OUTPUT_DIR), self.cfg.TEST.get("BEST", "")
        if not metric or not results:
            return
        (data, tasks), (task, _, part) = next(iter(results.items())), metric.partition("/")
        value, record = tasks.get(task, {}).get(part), out / "best.json"
        best = read_json(record) if record.is_file() and (out / checkpoints.BEST).is_file() else {}
        if value is None:
            self.log.info(f"this evaluation has no {metric}, by which TEST.BEST chooses")
        elif (best.get("metric"), best.get("data")) != (metric, data) or value > best["value"]:
            self.write_file(checkpoints.BEST, iteration)
            write_json(record, {"metric": metric, "data": data, "value": value, "done": iteration + 1})
            self.log.info(f"best so far: {metric} {value:.2f}, kept in {checkpoints.BEST}")

    def restore(self, content: dict[str, Any]) -> None:
        """Restores everything but the weights from a checkpoint's ``content``, which is then cleared."""
        with checkpoint.check_restoring("the checkpoint", self.optimizer, "choose another OUTPUT_DIR"):
            self.optimizer.load_state_dict(content["optimizer"])
            self.scaler.load_state_dict(content["scaler"])
            self.window.extend(content["window"])
            self.skipped.total = int(content.get("skipped_steps", 0))
            for name, hook_state in content.get("hooks", {}).items():
                if hook_state:
                    self.hooks[name].load_state_dict(hook_state)
        content.clear()  # it would stay in memory to the end


def find_checkpoint(cfg: CfgNode, engine: str, log: Logger) -> tuple[Path, dict[str, Any]] | None:
    """The newest good checkpoint in OUTPUT_DIR, the same on every rank, and its content; None: a fresh start.

    Raises:
        UserError: it is another engine's, or beyond SOLVER.MAX_ITER.
    """
    newest = checkpoints.agreed(cfg.OUTPUT_DIR)
    if newest:
        path, content = newest
        if content.get("engine") != engine:
            raise UserError(f"{path} was not written by the {engine} engine; resume with the engine that wrote it")
        if (done := content["iteration"] + 1) > cfg.SOLVER.MAX_ITER:
            raise UserError(
                f"SOLVER.MAX_ITER is {cfg.SOLVER.MAX_ITER}, but {cfg.OUTPUT_DIR} has done {done} iterations; raise it, "
                "or choose another OUTPUT_DIR"
            )
        log.info(f"resuming from {path}")
    return newest
