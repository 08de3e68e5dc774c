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
from pretrain.common.config import extensions
from pretrain.common.device import check_bfloat16
from pretrain.common.errors import UserError, count_noun
from pretrain.common.files import atomic_write, remove
from pretrain.common.ranks.agreement import on_first_rank
from pretrain.common.ranks.meeting import meet
from pretrain.common.run.metrics import MetricsWriter
from pretrain.common.run.progress import Progress, take_memory_peaks
from pretrain.common.run.skipped_steps import SkippedSteps
from pretrain.common.weights import checkpoint

from .config import dump
from .engine import Engine, Storage
from .preflight import FINAL
from .registries import HOOKS
from .training import checkpoints
from .training.batch_norm import pool_batch_norm
from .training.losses import SentLosses
from .training.samplers import TrainingData
from .training.scores import Scores

log = logging.getLogger(__name__)
_LOG_PERIOD = 20  # iterations between two lines of metrics.json, and those that a line's medians are taken over


class Trainer:
    """The model, optimizer, data and logs of a run, which it saves and restores.

    Hooks see it as Detectron2's hooks see their trainer: ``iter``, ``start_iter``, ``max_iter``, ``model``,
    ``optimizer``, ``storage``, ``cfg``.

    Attributes:
        done: number of completed iterations.
        pending: what is due after them before the next one: precise BN, the evaluation, or nothing; see `checkpoints`.
        scores: those of the evaluations, if TEST.BEST is set.
        max_iter: number of iterations of the run: SOLVER.MAX_ITER, or less once TEST.PATIENCE has ended it.
        schedule: a function of the iteration that sets the learning rate and returns it.
        precision: data type of the forward pass; None for float32.
        window: the losses and times of the last 20 iterations.
        unread: the losses and times of the last iteration until `read_losses`.
    """

    storage: Storage
    progress: Progress

    def __init__(self, engine: Engine, model: Any, data: TrainingData, device: torch.device) -> None:
        cfg = engine.cfg
        self.engine, self.cfg, self.model, self.device = engine, cfg, model, device
        self.precision = choose_precision(cfg, device)
        self.rank = distributed.rank()
        self.world_size = distributed.world_size()
        self.iter = self.start_iter = self.done = 0
        self.max_iter: int = cfg.SOLVER.MAX_ITER
        self.pending = ""
        self.scores = Scores()
        self._saved: tuple[str, dict[str, Any]] | None = None  # the newest checkpoint's entries of these two
        self._imported = extensions.digest() if extensions.options() else ""
        self._announced = {checkpoints.BEST}  # checkpoints that the log has named; the scores name this one
        self.data = data
        self.optimizer = engine.build_optimizer(model)
        self.schedule = engine.build_schedule(self.optimizer)
        self.scaler = torch.amp.grad_scaler.GradScaler(device.type, enabled=self.precision == torch.float16)
        self.skipped = SkippedSteps("set SOLVER.AMP.ENABLED False")
        self.window: deque[dict[str, float]] = deque(maxlen=_LOG_PERIOD)
        self.unread: tuple[SentLosses, dict[str, float]] | None = None
        self.writer: MetricsWriter | None = None  # only on rank 0
        self.hooks: dict[str, Any] = {name: HOOKS[name](cfg) for name in cfg.SOLVER.HOOKS}
        for hook in self.hooks.values():
            hook.trainer = weakref.proxy(self)

    @property
    def is_over(self) -> bool:
        """Whether all iterations are completed."""
        return self.done >= self.max_iter

    @contextmanager
    def open_logs(self) -> Iterator[None]:
        """Open metrics.json, without the lines that this run writes again, and start to report the progress."""
        start = self.start_iter
        first_line = start
        if self.pending or self.is_over:
            log.info(f"evaluating after iteration {start - 1}, the last of {start} done")
            first_line = start - 1  # the line of this evaluation
        if not self.is_over:
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

    @contextmanager
    def surround_by_hooks(self) -> Iterator[None]:
        """Call the hooks before and after the training in this block, as Detectron2's trainers do."""
        try:
            self.call_hooks("before_train")
            yield
            self.iter = self.done
        finally:
            self.call_hooks("after_train")

    def call_hooks(self, name: str) -> None:
        """Call this method of the hooks that have it, on every rank."""
        methods = [getattr(hook, name) for hook in self.hooks.values() if hasattr(hook, name)]
        for method in methods:
            method()
        if methods and self.world_size > 1:
            meet()  # a hook may work long on one rank alone

    def write_images(self) -> None:
        """Write the model's figures of training (VIS_PERIOD) for TensorBoard."""
        for name, image, iteration in self.storage.take_images():
            if self.writer:
                self.writer.add_image(name, image, iteration)

    def write_metrics(self, values: dict[str, float]) -> None:
        """Write a line of metrics.json for the last iteration if there are any values."""
        if self.writer and values:
            self.writer.write(self.done - 1, values | (self.skipped.metrics() if self.scaler.is_enabled() else {}))

    def read_losses(self) -> None:
        """Add the losses of the last iteration to the window, unless this has been done.

        Raises:
            UserError: a loss was not finite on some rank, or too many steps in a row were skipped.
        """
        if self.unread:
            sent, seconds = self.unread
            self.unread = None
            losses, loss_scale = sent.read()
            self.skipped.update(loss_scale, sent.iteration)
            self.window.append(losses | seconds)

    def summarize(self) -> dict[str, float]:
        """Return medians of the window and rates for metrics.json; log them.

        All ranks take part: a step waits for the rank whose data arrive last.
        """
        self.read_losses()
        line = {key: statistics.median(step[key] for step in self.window if key in step) for key in self.window[-1]}
        peaks = take_memory_peaks(self.device)
        maxima = torch.tensor([*(step["data_time"] for step in self.window), *peaks.values()], device=self.device)
        maxima = distributed.gather(maxima[None]).amax(0).tolist()
        waited = maxima[: len(self.window)]
        line["data_time"] = statistics.median(waited)
        line["lr"] = self.schedule(self.done - 1)
        rates = self.progress.rates_at(line["time"], sum(waited) / sum(step["time"] for step in self.window))
        rates |= dict(zip(peaks, maxima[len(self.window) :], strict=True))
        losses = "  ".join(f"{key} {value:.4g}" for key, value in line.items() if "loss" in key)
        self.progress.report(f"{losses}  lr {line['lr']:.3g}", rates, force=True)
        return line | rates | self.storage.scalars()

    def advance(self) -> None:
        """Count one iteration, after which an evaluation may be due."""
        self.done += 1
        self.progress.advance()
        period = self.cfg.TEST.EVAL_PERIOD
        is_due = self.is_over or (period > 0 and self.done % period == 0)
        self.pending = checkpoints.PRECISE_BN if is_due else ""

    def log(self) -> None:
        """Write the line of metrics.json that is due every 20 iterations, unless an evaluation writes it."""
        if self.done % _LOG_PERIOD == 0 and not self.pending:
            self.write_metrics(self.summarize())

    def save_if_due(self, reason: str) -> None:
        """Save a checkpoint every SOLVER.CHECKPOINT_PERIOD iterations, before what is pending, and to stop.

        Args:
            reason: why to stop; empty to continue.
        """
        if self._is_kept() or self.pending or reason:
            self.save()

    def settle(self) -> None:
        """Record that nothing is pending: in the last checkpoint, and in that of this iteration if it is kept."""
        self.pending = ""
        if self._saved == ("", self.scores.to_json()):  # a complete run was evaluated again
            return
        if self._is_kept():
            self.save()
        if self.is_over:
            self.save_final()
        self._remove_unless_kept()

    def save_final(self) -> None:
        """Write model_final.pth, which replaces a checkpoint of this iteration that is not kept."""
        self.save(FINAL)
        self._remove_unless_kept()

    def save(self, name: str = "") -> None:
        """Write a checkpoint (default: model_NNNNNNN.pth) on rank 0; the other ranks wait for it, and fail with it.

        Statistics that batch norm has for each rank are pooled before, so that all ranks evaluate what is saved.

        Raises:
            UserError: training has diverged, or the disk is full.
        """
        self.read_losses()  # on every rank: no checkpoint, and no evaluation, which follows one, has diverged weights
        name = name or checkpoints.path_after(self.cfg.OUTPUT_DIR, self.done).name
        if self.world_size > 1:
            pool_batch_norm(norm for norm in get_bn_modules(self.model) if "Sync" not in type(norm).__name__)
        on_first_rank(self.write_checkpoint, name)
        self._saved = (self.pending, self.scores.to_json())

    def _is_kept(self) -> bool:
        """Return whether the checkpoint of this iteration is kept once nothing is pending."""
        return self.done % self.cfg.SOLVER.CHECKPOINT_PERIOD == 0

    def _remove_unless_kept(self) -> None:
        if self.rank == 0 and not self._is_kept():
            remove(checkpoints.path_after(self.cfg.OUTPUT_DIR, self.done))

    def write_checkpoint(self, name: str) -> None:
        """Write a checkpoint on this rank."""
        output_dir = Path(self.cfg.OUTPUT_DIR)
        content = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "iteration": self.done - 1,
            "pending": self.pending,
            "scores": self.scores.to_json(),
            "seed": self.cfg.SEED,
            "imported": self._imported,
            "window": list(self.window),
            "skipped_steps": self.skipped.total_after(self.scaler.get_scale()),
            "hooks": {name: hook.state_dict() for name, hook in self.hooks.items() if hasattr(hook, "state_dict")},
            "engine": self.engine.name,
            "config": dump(self.cfg),
        }
        checkpoints.save(output_dir / name, content)
        if name == FINAL or (name != checkpoints.BEST and (self._is_kept() or not self.pending)):
            atomic_write(output_dir / "last_checkpoint", name)
            if self.cfg.SOLVER.CHECKPOINT_KEEP:
                checkpoint.prune(output_dir, self.cfg.SOLVER.CHECKPOINT_KEEP, output_dir / name, "model_[0-9]*.pth")
        if name not in self._announced:
            log.info(f"saved {output_dir / name}")
        self._announced.add(name)

    def restore(self, content: dict[str, Any]) -> None:
        """Restore everything but the weights from a checkpoint's ``content``, which is then cleared."""
        with checkpoint.translate_restore_errors("the checkpoint", self.optimizer, "choose another OUTPUT_DIR"):
            self.optimizer.load_state_dict(content["optimizer"])
            self.scaler.load_state_dict(content["scaler"])
            self.window.extend(content["window"])
            self.iter = self.start_iter = self.done = content["iteration"] + 1
            self.pending = content["pending"]
            self.scores = Scores.from_json(content["scores"])
            self._saved = (self.pending, self.scores.to_json())
            self.skipped.total = int(content.get("skipped_steps", 0))
            for name, hook_state in content.get("hooks", {}).items():
                if hook_state:
                    self.hooks[name].load_state_dict(hook_state)
        content.clear()  # it would stay in memory to the end


def choose_precision(cfg: Any, device: torch.device) -> torch.dtype | None:
    """Return the data type of the forward pass; None for float32.

    Raises:
        UserError: the device cannot compute in it.
    """
    if not cfg.SOLVER.AMP.ENABLED:
        return None
    if cfg.SOLVER.BF16:
        check_bfloat16(device.type, "set SOLVER.BF16 False or SOLVER.AMP.ENABLED False")
        return torch.bfloat16
    if device.type != "cuda":
        problem = "SOLVER.AMP.ENABLED is True, but float16 needs a CUDA device"
        raise UserError(f"{problem}; set it False, or SOLVER.BF16 True")
    return torch.float16
