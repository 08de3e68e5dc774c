"""What the Detectron2 engine does around an iteration: precise BN, checkpoints, evaluation, skipped steps, stops."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.engine import HookBase, hooks
from detectron2.utils import comm
from detectron2.utils.events import EventWriter, TensorboardXWriter, get_event_storage
from fvcore.nn.precise_bn import get_bn_modules

from pretrain.common import loggers
from pretrain.common.copies import AsyncHostCopy
from pretrain.common.interrupt import Stopped
from pretrain.common.metrics import append, writing_in
from pretrain.common.process_group import AgreedStop
from pretrain.common.run_folder import atomic_write, remove
from pretrain.common.skipped_steps import SkippedSteps, summary

from .. import checkpoints
from ..config import precise_bn_batches
from ..distributed import pool_batch_norm, reported, until_stopped
from ..stream import mix

log = logging.getLogger("detectron2.transfer")
PERIOD = 20  # iterations per line, and over which Detectron2 takes medians


class MetricsFile(EventWriter):
    """metrics.json.

    Detectron2's writer writes no scalar of an iteration of which it has written another, so it has to wait for the
    evaluation, and a kill during that costs the losses.
    """

    def __init__(self, output_dir: str) -> None:
        self._path = Path(output_dir) / "metrics.json"
        self._written: dict[str, int] = {}  # name -> iteration

    def write(self) -> None:
        lines: dict[int, dict[str, float]] = {}
        for name, (value, iteration) in get_event_storage().latest_with_smoothing_hint(PERIOD).items():
            if iteration > self._written.get(name, -1):
                lines.setdefault(iteration, {})[name] = value
                self._written[name] = iteration
        for iteration in sorted(lines):
            append(self._path, iteration, dict(sorted(lines[iteration].items())))


class Events(TensorboardXWriter):
    """Detectron2's TensorBoard writer, whose errors are one line."""

    def __init__(self, output_dir: str) -> None:
        self._end_logging = loggers.start(output_dir)
        super().__init__(output_dir, PERIOD)
        self._folder = output_dir

    def write(self) -> None:
        with writing_in(self._folder):
            super().write()

    def close(self) -> None:
        with writing_in(self._folder):
            super().close()
        self._end_logging()


class WriteBeforeCheckpoint(HookBase):
    """Writes what was measured before a checkpoint may be written, from which a run resumes behind these iterations."""

    trainer: Any

    def __init__(self, writers: Sequence[EventWriter]) -> None:
        self._writers = writers

    def after_step(self) -> None:
        if (self.trainer.iter + 1) % PERIOD == 0 or _evaluation_is_due(self.trainer):
            for writer in self._writers:
                writer.write()


class CountSkippedSteps(HookBase):
    """Counts the steps that fp16 skips, for metrics.json and the log, and ends a run that skips all of them."""

    trainer: Any  # this engine's Trainer, which registers these hooks: importing it would be a cycle

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler, self._skipped = scaler, SkippedSteps("set SOLVER.AMP.ENABLED False")

    def before_step(self) -> None:
        device = next(self.trainer._trainer.model.parameters()).device
        self._scale = AsyncHostCopy(self._scaler.scale(torch.ones((), device=device)))

    def after_step(self) -> None:
        # The copy is complete: the losses, which were read after it was queued, had to wait for it.
        self._skipped.see(self._scale.read().item(), self.trainer.iter)
        self.trainer.storage.put_scalars(**self._skipped.values(), smoothing_hint=False)

    def after_train(self) -> None:
        if self.trainer.iter < self.trainer.max_iter:  # it failed or was stopped
            return
        if skipped := self._skipped.up_to(self._scaler.get_scale()):
            log.info(summary(skipped, self.trainer.iter))

    def state_dict(self) -> dict[str, int]:
        return {"skipped_steps": self._skipped.up_to(self._scaler.get_scale())}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._skipped.total = int(state["skipped_steps"])


class PreciseBatchNorm(hooks.PreciseBN):
    """Detectron2's hook, with images that are a function of (seed, iteration), and its statistics pooled over ranks.

    Detectron2 leaves each rank with the statistics of its own images.
    """

    trainer: Any

    def update_stats(self) -> None:
        seed = self.trainer.seed
        torch.manual_seed(mix(seed, self.trainer.iter, comm.get_rank()))
        self._data_loader.seed = mix(seed, self.trainer.iter, 0)
        self._num_iter = precise_bn_batches(self.trainer.cfg, self.trainer.iter + 1)
        self._data_iter = reported(until_stopped(self._data_loader), self._num_iter, "precise BN", log.info)
        super().update_stats()
        if comm.get_world_size() > 1:
            pool_batch_norm(get_bn_modules(self._model))


class SaveBeforeEvaluation(HookBase):
    """Keeps the finished iterations in a checkpoint during precise BN and evaluation, which may be stopped."""

    trainer: Any

    def after_step(self) -> None:
        if _evaluation_is_due(self.trainer) and comm.is_main_process():
            self.trainer.save(Path(checkpoints.EVALUATING).stem)


class Evaluation(hooks.EvalHook):
    """Detectron2's hook, which also first completes what a stop interrupted, and does not evaluate a failed run.

    Detectron2's own evaluates even after a failure in the last iteration.
    """

    trainer: Any

    def __init__(self, period: int, evaluate: Callable[[], Any], writers: Sequence[EventWriter]) -> None:
        super().__init__(period, evaluate)
        self._writers = writers

    def before_train(self) -> None:
        trainer, complete = self.trainer, self.trainer.start_iter >= self.trainer.max_iter
        if trainer.pending or complete:  # the metrics belong to the previous iteration
            trainer.iter = trainer.storage.iter = trainer.start_iter - 1
        if trainer.pending:
            if trainer.precise_bn:
                trainer.precise_bn.update_stats()
            if comm.is_main_process():  # the checkpoints that come between precise BN and evaluation
                if trainer.start_iter % trainer.cfg.SOLVER.CHECKPOINT_PERIOD == 0:
                    trainer.save(f"model_{trainer.iter:07d}")
                if complete:
                    trainer.save("model_final")
        if trainer.pending and not complete:
            self._do_eval()
            self._finish()
        elif trainer.pending:
            self._forget_checkpoint()

    def after_step(self) -> None:
        super().after_step()
        if self.trainer.iter + 1 == self.trainer.max_iter:  # the evaluation comes in after_train
            self._forget_checkpoint()  # the final one is written already
        elif _evaluation_is_due(self.trainer):
            self._finish()

    def after_train(self) -> None:
        if self.trainer.iter >= self.trainer.max_iter:
            self._do_eval()
        del self._func  # it holds the trainer, which holds this hook

    def _finish(self) -> None:
        """Writes the evaluation that is complete.

        A run that is killed before the checkpoint of the evaluation is gone repeats all of it.
        """
        for writer in self._writers:
            writer.write()
        self._forget_checkpoint()

    def _forget_checkpoint(self) -> None:
        if comm.is_main_process():
            remove(Path(self.trainer.cfg.OUTPUT_DIR) / checkpoints.EVALUATING)


def _evaluation_is_due(trainer: Any) -> bool:
    period, done = trainer.cfg.TEST.EVAL_PERIOD, trainer.iter + 1
    return done == trainer.max_iter or (period > 0 and done % period == 0)


class StopOnRequest(HookBase):
    """Ends the run after the current step, with a checkpoint, when a stop was requested on any rank."""

    trainer: Any

    def __init__(self, device: torch.device) -> None:
        self._stop = AgreedStop(device)

    def after_step(self) -> None:
        if self.trainer.iter + 1 == self.trainer.max_iter:
            return  # the last checkpoint and the evaluation come next
        if reason := self._stop.poll():
            if comm.is_main_process():
                self.trainer.save(f"model_{self.trainer.iter:07d}")
            comm.synchronize()
            raise Stopped(reason)


class Checkpointer(DetectionCheckpointer):
    """Detectron2's checkpointer, except that a file is complete and its weights are finite, or it is not written.

    Args:
        keep: as in `checkpoints.prune`.
    """

    def __init__(self, model: torch.nn.Module, save_dir: str, *, keep: int, **checkpointables: Any) -> None:
        super().__init__(model, save_dir, **checkpointables)
        self._keep = keep

    def save(self, name: str, **kwargs: Any) -> None:
        if not self.save_dir or not self.save_to_disk:
            return
        parts = {key: part.state_dict() for key, part in self.checkpointables.items()}
        path = Path(self.save_dir) / f"{name}.pth"
        checkpoints.save(path, {"model": self.model.state_dict(), **parts, **kwargs})
        self.logger.info(f"saved {path}")
        if path.name not in checkpoints.TEMPORARY_OR_BEST:
            self.tag_last_checkpoint(path.name)
            checkpoints.prune(self.save_dir, self._keep, path)

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        atomic_write(Path(self.save_dir) / "last_checkpoint", last_filename_basename)
