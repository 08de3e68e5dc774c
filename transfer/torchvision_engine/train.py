"""The embedded engine: trains and evaluates torchvision's detectors under Detectron2's config, names and files."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from logging import Logger
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fvcore.common.config import CfgNode
from fvcore.nn.precise_bn import get_bn_modules, update_bn_stats
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from pretrain.common.config_io import dump
from pretrain.common.errors import UserError
from pretrain.common.interrupt import Stopped, stop_requested
from pretrain.common.process_group import data_parallel, on_first_rank
from pretrain.common.run_folder import MetricsWriter, atomic_write, setup_logging, write_environment

from .. import checkpoints
from ..coco import results as coco_results
from ..config import check_supported
from ..distributed import check_not_beyond, check_same_start, join, pool_batch_norm, settle_seed, until_stopped
from ..skipped_steps import SkippedSteps
from ..stream import mix
from ..weights import Weights, check_config, load_weights, read_weights
from .data import training_records
from .evaluation import evaluate
from .loader import training_loader
from .model import Detector, build_model, detectron2_state
from .solver import build_optimizer, clip_gradients, learning_rate, set_learning_rate

LOG_PERIOD = 20  # iterations between two lines of metrics.json, and those a line's medians are taken over
_TO_RESUME = ("model", "optimizer", "scaler", "iteration", "seed", "window")  # of a checkpoint


def run(cfg: CfgNode, *, resume: bool = False, eval_only: bool = False, visualize: int = 0) -> dict[str, Any]:
    """Trains and evaluates, or evaluates only, in each process of RANK and WORLD_SIZE (none: a single process).

    Args:
        cfg: of config.load_config, written for this number of processes; its SEED is set to the one that is used.
        resume: go on from OUTPUT_DIR's newest good checkpoint (none: start with MODEL.WEIGHTS).
        visualize: draw the predictions on that many test images.

    Returns:
        The last evaluation's metrics, ``{"bbox": {"AP": ...}}``, on rank 0 (under the data set's name if there are
        several); {} elsewhere or without DATASETS.TEST.

    Raises:
        UserError: a key that cannot be honoured, weights or data that do not fit, a loss or weights that are not
            finite, ranks that do not see the same checkpoint.
        Stopped: a stop was requested; the checkpoint is written.
    """
    check_supported(cfg)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = join(cfg.MODEL.DEVICE)
    out = Path(cfg.OUTPUT_DIR)
    logger = setup_logging(out, rank, "transfer")
    found = checkpoints.agreed(out, logger.warning) if resume and not eval_only else None
    state = found[1] if found else None
    if found and state:
        if state.get("engine") != "torchvision":
            raise UserError(
                f"{found[0]} was not written by the torchvision engine; resume with the engine that wrote it"
            )
        if missing := [key for key in _TO_RESUME if key not in state]:
            raise UserError(f"{found[0]} lacks {', '.join(missing)}: it cannot be resumed, only be MODEL.WEIGHTS")
        check_not_beyond(cfg, state["iteration"] + 1)
        logger.info(f"resuming from {found[0]}")
    settle_seed(cfg, state["seed"] if state else None, logger.info)
    if rank == 0:
        atomic_write(out / "config.yaml", dump(cfg))
        write_environment(out)
    if cfg.MODEL.DEVICE == "cuda" and device.type == "cpu":
        logger.info("MODEL.DEVICE is cuda, but there is no CUDA device: running on the CPU")
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK and not eval_only
    if cfg.FLOAT32_PRECISION:
        torch.set_float32_matmul_precision(cfg.FLOAT32_PRECISION)
        torch.backends.cudnn.allow_tf32 = cfg.FLOAT32_PRECISION != "highest"  # Detectron2 couples the two

    torch.manual_seed(cfg.SEED)
    model = build_model(cfg, device)
    if found and state:
        source = Weights(str(found[0]), "", state["model"], {})
    else:
        source = read_weights(cfg.MODEL.WEIGHTS)
        check_config(source, cfg, logger.info)
    load_weights(lambda: detectron2_state(model), source, whole=eval_only or state is not None, log=logger.info)
    del source  # weights are in the model now; they would stay in memory to the end
    check_same_start(state["iteration"] + 1 if state else 0, detectron2_state(model))
    if eval_only:
        metrics = evaluate(cfg, model, rank, world, visualize)
    else:
        training = _Training(cfg, model, device, rank, world, logger)
        start = training.restore(state) if state else 0
        pending = found is not None and found[0].name == checkpoints.EVALUATING
        del found, state
        metrics = training.run(start, visualize, pending=pending)
    return next(iter(metrics.values())) if len(metrics) == 1 else metrics


class _Training:
    """What the iterations of one run share; `run` is the loop."""

    def __init__(
        self,
        cfg: CfgNode,
        model: Detector,
        device: torch.device,
        rank: int,
        world: int,
        logger: Logger,
    ) -> None:
        if cfg.SOLVER.AMP.ENABLED and device.type != "cuda":
            raise UserError("SOLVER.AMP.ENABLED is True, but half precision needs a CUDA device; set it False")
        self.cfg, self.model, self.device, self.logger = cfg, model, device, logger
        self.rank, self.world, self.seed = rank, world, cfg.SEED
        self.records, self.info = training_records(cfg)
        self.optimizer = build_optimizer(cfg.SOLVER, model)
        self.scaler = torch.amp.GradScaler(device.type, enabled=cfg.SOLVER.AMP.ENABLED)  # type: ignore[attr-defined]
        self.wrapped = data_parallel(model, device)
        self.skipped = SkippedSteps()
        self.rate = learning_rate(cfg.SOLVER)
        self.window: deque[dict[str, float]] = deque(maxlen=LOG_PERIOD)
        self.writer: MetricsWriter | None = None  # rank 0's
        self.reason = ""

    def run(self, start: int, visualize: int, *, pending: bool) -> dict[str, Any]:
        """Iterations from ``start`` to the last; returns the last evaluation.

        Args:
            pending: precise BN and the evaluation after iteration ``start - 1`` were not finished.
        """
        solver, period = self.cfg.SOLVER, self.cfg.TEST.EVAL_PERIOD
        complete = start >= solver.MAX_ITER
        if self.rank == 0:  # an evaluation that is repeated replaces its line
            self.writer = MetricsWriter(self.cfg.OUTPUT_DIR, start - 1 if pending or complete else start)
        if not complete:
            self.logger.info(
                f"training on {len(self.records)} images from iteration {start} to {solver.MAX_ITER}: {self.world} "
                f"process(es), {solver.IMS_PER_BATCH} images per step, {self.device}, seed {self.seed}"
            )
        batches = self._batches(start, self.seed, self.cfg.DATALOADER.NUM_WORKERS)
        self.model.train()
        results: dict[str, Any] = {}
        if pending or complete:
            self.logger.info(f"evaluating after iteration {start - 1}, the last of {start} done")
            results = self._evaluate(start - 1, visualize, saved=not pending)
        with self._bar(start) as bar:
            for iteration in range(start, solver.MAX_ITER):
                set_learning_rate(self.optimizer, self.rate(iteration))
                self.window.append(self._step(iteration, batches))
                bar.update()
                done = iteration + 1
                if done == solver.MAX_ITER or (period > 0 and done % period == 0):
                    results = self._evaluate(iteration, visualize)
                    continue
                if done % solver.CHECKPOINT_PERIOD == 0 or self.reason:
                    self._save(f"model_{iteration:07d}.pth", iteration)
                if done % LOG_PERIOD == 0:
                    self._write(iteration, self._summary(iteration))
                if self.reason:
                    raise Stopped(self.reason)
        if skipped := self.skipped.up_to(self.scaler.get_scale()):
            self.logger.info(f"fp16: {skipped} of {solver.MAX_ITER} steps were skipped, as their gradients overflowed")
        if self.writer:
            self.writer.close()
        return results

    def _evaluate(self, iteration: int, visualize: int, *, saved: bool = False) -> dict[str, Any]:
        """Precise BN, the checkpoints that are due, and the evaluation after ``iteration``; hears a request to stop.

        The checkpoint saved before them makes a resumed run begin with what was not finished.

        Args:
            saved: precise BN and the checkpoints are done already.
        """
        done, final = iteration + 1, iteration + 1 >= self.cfg.SOLVER.MAX_ITER
        pending = Path(self.cfg.OUTPUT_DIR) / checkpoints.EVALUATING
        if not saved:
            self._save(pending.name, iteration)
            if self.reason:
                raise Stopped(self.reason)
            self._precise_bn(iteration)
            if done % self.cfg.SOLVER.CHECKPOINT_PERIOD == 0:
                self._save(f"model_{iteration:07d}.pth", iteration)
            if final:
                self._save("model_final.pth", iteration)
                if self.rank == 0:
                    pending.unlink(missing_ok=True)  # the final checkpoint says the same: only evaluation is due
        results = evaluate(self.cfg, self.model, self.rank, self.world, visualize if final else 0)
        summary = self._summary(iteration) if final or done % LOG_PERIOD == 0 else {}
        self._write(iteration, coco_results.flat_sets(results) | summary)
        if self.rank == 0:
            pending.unlink(missing_ok=True)
        return results

    def _write(self, iteration: int, values: dict[str, float]) -> None:
        if self.writer and values:
            self.writer.write(iteration, values | (self.skipped.values() if self.scaler.is_enabled() else {}))

    def _step(self, iteration: int, batches: Iterator[list[Any]]) -> dict[str, float]:
        """One optimiser step; the mean over processes of its losses, and its times in seconds."""
        began = time.perf_counter()
        batch = next(batches)
        waited = time.perf_counter() - began
        # The sampling of anchors and proposals depends on the seed, the iteration and the rank, not on history.
        torch.manual_seed(mix(self.seed, iteration, self.rank))
        with torch.autocast(self.device.type, enabled=self.cfg.SOLVER.AMP.ENABLED, dtype=torch.float16):
            losses = self._forward(batch, iteration)
            total = torch.stack(list(losses.values())).sum()
        self.optimizer.zero_grad()
        self.scaler.scale(total).backward()
        scale = self.scaler.scale(torch.ones_like(total, dtype=torch.float32))
        *values, scale = self._agree(torch.stack([*(loss.detach().float() for loss in losses.values()), scale]))
        if not all(map(math.isfinite, values)):
            shown = ", ".join(f"{k} {v:.3g}" for k, v in zip(losses, values, strict=True))
            self._not_finite(iteration, shown, batch)
        self.skipped.see(scale, iteration)
        if self.cfg.SOLVER.CLIP_GRADIENTS.ENABLED:
            self.scaler.unscale_(self.optimizer)
            clip_gradients(self.cfg.SOLVER.CLIP_GRADIENTS, (p for p in self.model.parameters() if p.grad is not None))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        out = {"total_loss": sum(values), **dict(zip(losses, values, strict=True))}
        return out | {"time": time.perf_counter() - began, "data_time": waited}

    def _forward(self, batch: list[Any], iteration: int) -> dict[str, torch.Tensor]:
        try:
            return self.wrapped(batch)
        except FloatingPointError as error:
            self._not_finite(iteration, str(error), batch)
            raise AssertionError from error  # not reached

    def _not_finite(self, iteration: int, what: str, batch: list[Any]) -> None:
        rate, names = self.optimizer.param_groups[0]["lr"], ", ".join(record["file_name"] for record in batch)
        raise UserError(
            f"training diverged at iteration {iteration} (learning rate {rate:.3g}): {what}; images: {names}; lower "
            "SOLVER.BASE_LR or lengthen SOLVER.WARMUP_ITERS"
        )

    def _agree(self, shared: torch.Tensor) -> list[float]:
        """The mean over processes; all processes learn of a request to stop in the same iteration.

        Args:
            shared: the losses, and the loss scale.
        """
        reason = stop_requested()
        if self.world == 1:
            self.reason = reason
            return shared.tolist()
        both = torch.cat([shared, shared.new_tensor([float(bool(reason))])])
        dist.all_reduce(both)
        *sums, stopping = both.tolist()
        self.reason = (reason or "another process was asked to stop") if stopping else ""
        return [value / self.world for value in sums]

    def _batches(self, start: int, seed: int, workers: int) -> Iterator[list[Any]]:
        """Endless batches from number ``start`` on; raises the UserError of a record that cannot be made."""
        for batch in training_loader(
            self.cfg, self.records, self.info, seed=seed, rank=self.rank, world=self.world, start=start, workers=workers
        ):
            for record in batch:
                if isinstance(record, UserError):
                    raise record
            yield batch

    def _precise_bn(self, iteration: int) -> None:
        """Replaces the running statistics by the true averages over NUM_ITER batches, the same in every process."""
        if not self.cfg.TEST.PRECISE_BN.ENABLED or not get_bn_modules(self.model):
            return
        count = self.cfg.TEST.PRECISE_BN.NUM_ITER
        self.logger.info(f"precise BN over {count} batches")
        torch.manual_seed(mix(self.seed, iteration, self.rank))
        update_bn_stats(self.model, until_stopped(self._batches(0, mix(self.seed, iteration, 0), 0)), count)
        if self.world > 1:
            pool_batch_norm(get_bn_modules(self.model))

    def _summary(self, iteration: int) -> dict[str, float]:
        """Medians of the window, for metrics.json; logs them, the time left and the share spent waiting for data.

        All processes take part: a step waits for the one whose data come last.
        """
        line = {key: statistics.median(step[key] for step in self.window) for key in self.window[-1]}
        waited, rate = [step["data_time"] for step in self.window], self.rate(iteration)
        if self.world > 1:
            longest = torch.tensor(waited, device=self.device)
            dist.all_reduce(longest, dist.ReduceOp.MAX)
            waited = longest.tolist()
        line |= {"data_time": statistics.median(waited), "lr": rate}
        line |= {"eta_seconds": line["time"] * (self.cfg.SOLVER.MAX_ITER - iteration - 1)}
        share = sum(waited) / sum(step["time"] for step in self.window)
        verdict = "loader-bound: raise DATALOADER.NUM_WORKERS" if share > 0.2 else "compute-bound"
        losses = "  ".join(f"{key}: {value:.4g}" for key, value in line.items() if "loss" in key)
        memory = f"  max_mem: {torch.cuda.max_memory_allocated() / 2**20:.0f}M" if self.device.type == "cuda" else ""
        self.logger.info(
            f"eta: {datetime.timedelta(seconds=int(line['eta_seconds']))}  iter: {iteration}  {losses}  "
            f"time: {line['time']:.4f}  data_time: {line['data_time']:.4f}  lr: {rate:.5g}{memory}  "
            f"{self.cfg.SOLVER.IMS_PER_BATCH / line['time']:.1f} images/s, {share:.0%} waiting for data ({verdict})"
        )
        return line

    @contextlib.contextmanager
    def _bar(self, start: int) -> Iterator[Any]:
        shown = self.rank == 0 and sys.stderr.isatty()
        redirect = logging_redirect_tqdm([self.logger]) if shown else contextlib.nullcontext()
        with tqdm(total=self.cfg.SOLVER.MAX_ITER, initial=start, unit="it", disable=not shown) as bar, redirect:
            yield bar

    def _save(self, name: str, iteration: int) -> None:
        """Rank 0 writes the checkpoint; the others wait until it is written, and learn of an error."""
        out = Path(self.cfg.OUTPUT_DIR)

        def write() -> None:
            content = {
                "model": detectron2_state(self.model),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "iteration": iteration,
                "seed": self.seed,
                "window": list(self.window),
                "skipped_steps": self.skipped.up_to(self.scaler.get_scale()),
                "engine": "torchvision",
                "config": dump(self.cfg),
            }
            checkpoints.save(out / name, content)
            if name != checkpoints.EVALUATING:  # which does not stay
                atomic_write(out / "last_checkpoint", name)
            self.logger.info(f"saved {out / name}")

        on_first_rank(write)

    def restore(self, state: dict[str, Any]) -> int:
        """Takes up optimiser, scaler and window; returns the iteration to go on with."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.window.extend(state["window"])
        self.skipped.total = state.get("skipped_steps", 0)
        return state["iteration"] + 1
