"""The state of a fine-tuning run; `train` is the loop around it."""

import logging
import statistics
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from fvcore.nn.precise_bn import get_bn_modules

from pretrain.common import distributed
from pretrain.common.distributed import on_first_rank
from pretrain.common.errors import UserError, count_noun
from pretrain.common.files import atomic_write, read_json, write_json
from pretrain.common.run.metrics import MetricsWriter
from pretrain.common.run.progress import Progress, take_memory_peaks
from pretrain.common.run.skipped_steps import SkippedSteps
from pretrain.common.weights import checkpoint

from . import checkpoints
from .batch_norm import pool_batch_norm
from .coco.results import Metrics
from .config import dump
from .engine import Engine, Storage
from .registries import HOOKS

log = logging.getLogger(__name__)
LOG_PERIOD = 20  # iterations between two lines of metrics.json, and those that a line's medians are taken over


class Trainer:
    """The model, optimizer, data and logs of a run, which it saves and restores.

    Hooks see it as Detectron2's hooks see their trainer: ``iter``, ``start_iter``, ``max_iter``, ``model``,
    ``optimizer``, ``storage``, ``cfg``.

    Attributes:
        schedule: a function of the iteration that sets the learning rate and returns it.
        precision: data type of the forward pass; None for float32.
        window: the losses and times of the last LOG_PERIOD iterations.
    """

    storage: Storage
    progress: Progress

    def __init__(self, engine: Engine, model: Any, device: torch.device) -> None:
        cfg = engine.cfg
        self.engine, self.cfg, self.model, self.device = engine, cfg, model, device
        self.precision = _choose_precision(cfg, device)
        self.rank = distributed.rank()
        self.world_size = distributed.world_size()
        self.iter = self.start_iter = 0
        self.max_iter: int = cfg.SOLVER.MAX_ITER
        self.data = engine.load_training_data()
        self.optimizer = engine.build_optimizer(model)
        self.schedule = engine.build_schedule(self.optimizer)
        self.scaler = torch.amp.grad_scaler.GradScaler(device.type, enabled=self.precision == torch.float16)
        self.skipped = SkippedSteps("set SOLVER.AMP.ENABLED False")
        self.window: deque[dict[str, float]] = deque(maxlen=LOG_PERIOD)
        self.writer: MetricsWriter | None = None  # only on rank 0
        self.hooks: dict[str, Any] = {name: HOOKS[name](cfg) for name in cfg.SOLVER.HOOKS}
        for hook in self.hooks.values():
            hook.trainer = weakref.proxy(self)

    @contextmanager
    def open_logs(self, start: int, first_line: int) -> Iterator[None]:
        """Open metrics.json, without its lines from ``first_line`` on, and start to report the progress."""
        self.iter = self.start_iter = start
        if start < self.max_iter:
            work = f"{count_noun(len(self.data.records), 'image')} from iteration {start} to {self.max_iter}"
            batch = count_noun(self.world_size, "process", "processes")
            batch += f", {count_noun(self.cfg.SOLVER.IMS_PER_BATCH, 'image')} per step"
            log.info(f"training on {work}: {batch}, {self.device}, seed {self.cfg.SEED}")
        with ExitStack() as logs:
            self.storage = logs.enter_context(self.engine.storage(start))
            if self.rank == 0:
                self.writer = logs.enter_context(closing(MetricsWriter(self.cfg.OUTPUT_DIR, first_line)))
            progress = Progress(self.max_iter, start, self.cfg.SOLVER.IMS_PER_BATCH, "fine-tuning")
            self.progress = logs.enter_context(closing(progress))
            yield

    def call_hooks(self, name: str) -> None:
        """Call this method of the hooks that have it, on every rank."""
        for hook in self.hooks.values():
            if hasattr(hook, name):
                getattr(hook, name)()

    def write_images(self) -> None:
        """Write the model's figures of training (VIS_PERIOD) for TensorBoard."""
        for name, image, iteration in self.storage.take_images():
            if self.writer:
                self.writer.add_image(name, image, iteration)

    def write_metrics(self, iteration: int, values: dict[str, float]) -> None:
        """Write a line of metrics.json if there are any values."""
        if self.writer and values:
            self.writer.write(iteration, values | (self.skipped.metrics() if self.scaler.is_enabled() else {}))

    def summarize(self, iteration: int) -> dict[str, float]:
        """Return medians of the window and rates for metrics.json; log them.

        All ranks take part: a step waits for the rank whose data arrive last.
        """
        line = {key: statistics.median(step[key] for step in self.window if key in step) for key in self.window[-1]}
        peaks = take_memory_peaks()
        maxima = torch.tensor([*(step["data_time"] for step in self.window), *peaks.values()], device=self.device)
        maxima = distributed.gather(maxima[None]).amax(0).tolist()
        waited = maxima[: len(self.window)]
        line["data_time"] = statistics.median(waited)
        line["lr"] = self.schedule(iteration)
        rates = self.progress.rates_at(line["time"], sum(waited) / sum(step["time"] for step in self.window))
        rates |= dict(zip(peaks, maxima[len(self.window) :], strict=True))
        losses = "  ".join(f"{key} {value:.4g}" for key, value in line.items() if "loss" in key)
        self.progress.report(f"{losses}  lr {line['lr']:.3g}", rates, force=True)
        return line | rates | self.storage.scalars()

    def save(self, name: str, iteration: int) -> None:
        """Write a checkpoint on rank 0; the other ranks wait for it, and fail with it.

        Statistics that batch norm has for each rank are pooled before, so that all ranks evaluate what is saved.
        """
        if self.world_size > 1:
            pool_batch_norm(norm for norm in get_bn_modules(self.model) if "Sync" not in type(norm).__name__)
        on_first_rank(self.write_checkpoint, name, iteration)

    def write_checkpoint(self, name: str, iteration: int) -> None:
        """Write a checkpoint on this rank."""
        output_dir = Path(self.cfg.OUTPUT_DIR)
        content = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "iteration": iteration,
            "seed": self.cfg.SEED,
            "window": list(self.window),
            "skipped_steps": self.skipped.total_after(self.scaler.get_scale()),
            "hooks": {name: hook.state_dict() for name, hook in self.hooks.items() if hasattr(hook, "state_dict")},
            "engine": self.engine.name,
            "config": dump(self.cfg),
        }
        checkpoints.save(output_dir / name, content)
        if name not in (checkpoints.EVALUATING, checkpoints.BEST):
            atomic_write(output_dir / "last_checkpoint", name)
            if self.cfg.SOLVER.CHECKPOINT_KEEP:
                checkpoint.prune(output_dir, self.cfg.SOLVER.CHECKPOINT_KEEP, output_dir / name, "model_[0-9]*.pth")
        log.info(f"saved {output_dir / name}")

    def save_best(self, results: dict[str, Metrics], iteration: int) -> None:
        """Write model_best.pth, then best.json, on rank 0 if the evaluation (of the first set) is the best so far."""
        metric = self.cfg.TEST.BEST
        if not metric or not results:
            return
        data, tasks = next(iter(results.items()))
        task, _, key = metric.partition("/")
        value = tasks.get(task, {}).get(key)
        if value is None:
            log.info(f"TEST.BEST {metric} is missing from this evaluation")
            return
        record = Path(self.cfg.OUTPUT_DIR) / "best.json"
        has_best = record.is_file() and record.with_name(checkpoints.BEST).is_file()
        best = read_json(record) if has_best else {}
        if (best.get("metric"), best.get("data")) == (metric, data) and value <= best["value"]:
            return
        self.write_checkpoint(checkpoints.BEST, iteration)
        write_json(record, {"metric": metric, "data": data, "value": value, "done": iteration + 1})
        log.info(f"best so far: {metric} {value:.2f}, saved in {checkpoints.BEST}")

    def restore(self, content: dict[str, Any]) -> None:
        """Restore everything but the weights from a checkpoint's ``content``, which is then cleared."""
        with checkpoint.translate_restore_errors("the checkpoint", self.optimizer, "choose another OUTPUT_DIR"):
            self.optimizer.load_state_dict(content["optimizer"])
            self.scaler.load_state_dict(content["scaler"])
            self.window.extend(content["window"])
            self.skipped.total = int(content.get("skipped_steps", 0))
            for name, hook_state in content.get("hooks", {}).items():
                if hook_state:
                    self.hooks[name].load_state_dict(hook_state)
        content.clear()  # it would stay in memory to the end


def _choose_precision(cfg: Any, device: torch.device) -> torch.dtype | None:
    if not cfg.SOLVER.AMP.ENABLED:
        return None
    if cfg.SOLVER.BF16:
        return torch.bfloat16
    if device.type != "cuda":
        problem = "SOLVER.AMP.ENABLED is True, but float16 needs a CUDA device"
        raise UserError(f"{problem}; set it False, or SOLVER.BF16 True")
    return torch.float16
