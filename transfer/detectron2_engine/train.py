"""A run of the Detectron2 engine; what it adds to Detectron2 is listed in the package's docstring."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from detectron2.config import get_cfg
from detectron2.engine import AMPTrainer, DefaultTrainer, SimpleTrainer, TrainerBase, default_setup, hooks
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling import build_model
from detectron2.utils import comm
from detectron2.utils.events import CommonMetricPrinter
from fvcore.common.config import CfgNode
from fvcore.nn.precise_bn import get_bn_modules

from pretrain.common import checkpoint
from pretrain.common.errors import UserError
from pretrain.common.interrupt import Stopped
from pretrain.common.metrics import drop_metrics, writing_in
from pretrain.common.process_group import data_parallel
from pretrain.common.resnet_names import from_c4
from pretrain.common.run_folder import lose_lines_on_a_full_disk, write_environment

from .. import HOOKS, checkpoints, frozen_bn
from ..accumulate import Accumulated
from ..coco.results import Metrics, flat_sets
from ..distributed import check_not_beyond, check_same_start, settle_seed
from ..stream import mix
from ..weights import Weights, check_config, load_weights
from . import heads  # registers MoCo's
from .data import TrainingBatches, register
from .evaluation import evaluate
from .evaluators import refuse_machines
from .hooks import (
    PERIOD,
    Checkpointer,
    CountSkippedSteps,
    Evaluation,
    Events,
    MetricsFile,
    PreciseBatchNorm,
    SaveBeforeEvaluation,
    StopOnRequest,
    WriteBeforeCheckpoint,
)

log = logging.getLogger("detectron2.transfer")
_PLANNED = (Stopped, UserError, FloatingPointError)  # ends of a training
_NORMS = ("RESNETS", "FPN", "ROI_BOX_HEAD", "ROI_MASK_HEAD")


def run(
    cfg: CfgNode, *, weights: Weights | None, resume: bool = False, eval_only: bool = False, visualize: int = 0
) -> dict[str, Metrics]:
    """Trains and evaluates, or evaluates only, in each process of RANK and WORLD_SIZE (without them: in one process).

    Args:
        cfg: of transfer.config.load_config; its SEED is set to the one that is used.
        weights: what the run begins with; not needed where it resumes from a checkpoint.
        resume: continue from OUTPUT_DIR's newest good checkpoint (none: start with ``weights``).
        visualize: draw the predictions on that many test images, into OUTPUT_DIR/visualizations.

    Returns:
        The last evaluation's metrics, ``{data set: {"bbox": {"AP": ...}}}``, on rank 0; {} on other ranks.

    Raises:
        UserError: weights, data or keys that do not fit, a loss or weights that are not finite, ranks that do not see
            the same checkpoint.
        Stopped: a stop was requested; the checkpoint is written.
    """
    out, notes = Path(cfg.OUTPUT_DIR), []
    found = checkpoints.agreed(out, notes.append) if resume and not eval_only else None
    path, state = found or (out, None)
    if state:
        if not isinstance(state.get("trainer"), dict):
            raise UserError(f"{path} holds no state of Detectron2's trainer; resume with the engine that wrote it")
        checkpoints.refuse_damaged(path, state, state["trainer"].get("seed"))
        check_not_beyond(cfg, state["iteration"] + 1)
        weights = Weights(str(path), "", from_c4(state["model"]), {})
    else:
        assert weights
        check_config(weights, cfg, notes.append)
    settle_seed(cfg, state["trainer"].get("seed") if state else None, notes.append)
    own = detectron2_config(cfg, notes.append)
    if comm.get_world_size() > 1:
        comm.create_local_process_group(int(os.environ.get("LOCAL_WORLD_SIZE", str(comm.get_world_size()))))
    logging.getLogger("detectron2.engine.train_loop").addFilter(_is_unplanned)
    with writing_in(out):
        default_setup(own, argparse.Namespace(config_file="", resume=resume, eval_only=eval_only))
    lose_lines_on_a_full_disk("detectron2", "fvcore")
    if comm.is_main_process():
        write_environment(out)
    for note in notes:
        log.info(note)
    for name in (*own.DATASETS.TRAIN, *own.DATASETS.TEST):
        register(name)
    refuse_machines(own.DATASETS.TEST)
    if eval_only:
        model = build_model(own)
        load_weights(model.state_dict, weights, require_heads=True, log=log.info)
        return evaluate(own, model, visualize)
    last = state["iteration"] if state else -1
    repeats = path.name == checkpoints.EVALUATING  # the evaluation
    if comm.is_main_process():  # a resumed run would write these lines again
        drop_metrics(out, last + 1, lambda line: repeats and line["iteration"] == last and "total_loss" not in line)
    trainer = Trainer(own, visualize)
    with contextlib.closing(trainer):
        trainer.begin(weights, state, pending=path.name == checkpoints.EVALUATING)
        del found, state, weights  # the model and the optimizer hold them now
        try:
            trainer.train()
        except FloatingPointError as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"training diverged: {reason}; lower SOLVER.BASE_LR or lengthen SOLVER.WARMUP_ITERS"
            ) from error
    return trainer.results


def detectron2_config(cfg: CfgNode, log: Callable[[str], None]) -> CfgNode:
    """``cfg`` as Detectron2's own, with the device and the norms that this machine can run; logs what was changed.

    Raises:
        UserError: a key that cannot be honored.
    """
    own, world = get_cfg(), comm.get_world_size()
    own.set_new_allowed(True)  # this project's own keys, where they are set
    own.merge_from_other_cfg(cfg)
    if own.MODEL.DEVICE.startswith("cuda") and not torch.cuda.is_available():
        own.MODEL.DEVICE = "cpu"
        log("MODEL.DEVICE is cuda, but there is no CUDA device: running on the CPU")
    if own.MODEL.DEVICE == "cpu" and world > 1:
        for part in _NORMS:
            if own.MODEL[part].NORM == "SyncBN":  # PyTorch's needs CUDA as soon as there is a process group
                own.MODEL[part].NORM = "naiveSyncBN"
                log(f"MODEL.{part}.NORM is naiveSyncBN instead of SyncBN: several processes on a CPU")
    if own.SOLVER.AMP.ENABLED and own.MODEL.DEVICE == "cpu" and not own.SOLVER.get("BF16", False):
        raise UserError(
            "SOLVER.AMP.ENABLED is True, but float16 needs a CUDA device; set it False, or SOLVER.BF16 True"
        )
    own.freeze()
    return own


def _is_unplanned(record: logging.LogRecord) -> bool:
    """Detectron2 logs the traceback of everything that ends a training; a planned end has its one line."""
    return not (record.exc_info and isinstance(record.exc_info[1], _PLANNED))


class Trainer(DefaultTrainer):
    """Detectron2's default trainer with this engine's data, hooks and checkpoints.

    Attributes:
        results: the last evaluation's.
        pending: precise BN and the evaluation before the first iteration were not finished.
    """

    def __init__(self, cfg: CfgNode, visualize: int = 0) -> None:
        TrainerBase.__init__(self)  # DefaultTrainer's __init__ puts DDP on the GPU of the local rank, even on a CPU
        self.cfg, self._visualize = cfg, visualize
        self.results: dict[str, Metrics] = {}
        self.pending = False
        self.start_iter, self.max_iter, self.seed = 0, cfg.SOLVER.MAX_ITER, cfg.SEED
        model: Any = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        batches = TrainingBatches(cfg, self.seed, cfg.DATALOADER.NUM_WORKERS)
        self._parallel, parts = data_parallel(model, model.device), cfg.SOLVER.get("ACCUMULATE", 1)
        precision = torch.bfloat16 if cfg.SOLVER.get("BF16", False) else None  # which needs no scaler
        if precision:
            heads.keep_rois_in_float32(model)
        step = AMPTrainer if cfg.SOLVER.AMP.ENABLED and not precision else SimpleTrainer
        wraps = parts > 1 or precision
        trained = Accumulated(self._parallel, parts, self._scale, precision) if wraps else self._parallel
        self._trainer = step(trained, batches, optimizer, zero_grad_before_forward=parts > 1)
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)
        self._device: torch.device = model.device
        keep = cfg.SOLVER.get("CHECKPOINT_KEEP", 0)
        self.checkpointer = Checkpointer(model, cfg.OUTPUT_DIR, keep=keep, trainer=weakref.proxy(self))
        self.precise_bn: PreciseBatchNorm | None = None
        if cfg.TEST.PRECISE_BN.ENABLED and get_bn_modules(model):
            batches = TrainingBatches(cfg, self.seed, workers=0)
            self.precise_bn = PreciseBatchNorm(
                cfg.TEST.EVAL_PERIOD, self._parallel, batches, cfg.TEST.PRECISE_BN.NUM_ITER
            )
        self._writers = [MetricsFile(cfg.OUTPUT_DIR), Events(cfg.OUTPUT_DIR)] if comm.is_main_process() else []
        self.register_hooks(self.build_hooks())

    def close(self) -> None:
        """Closes metrics.json and the TensorBoard events; Detectron2 leaves them open if the last evaluation fails."""
        for writer in self._writers:
            writer.close()

    def build_hooks(self) -> list[Any]:
        """Detectron2's default hooks in their order, in this engine's form where it differs, and the user's own.

        Those come before whatever saves their state or writes their scalars.
        """
        cfg, is_main = self.cfg, comm.is_main_process()
        early = [CommonMetricPrinter(self.max_iter, PERIOD), *self._writers[:1]]
        return [
            CountSkippedSteps(self._trainer.grad_scaler) if isinstance(self._trainer, AMPTrainer) else None,
            hooks.IterationTimer(),
            hooks.LRScheduler(),
            *(HOOKS[name](cfg) for name in cfg.SOLVER.get("HOOKS", ())),
            WriteBeforeCheckpoint(early) if is_main else None,
            SaveBeforeEvaluation(),
            self.precise_bn,
            hooks.PeriodicCheckpointer(self.checkpointer, cfg.SOLVER.CHECKPOINT_PERIOD) if is_main else None,
            Evaluation(cfg.TEST.EVAL_PERIOD, self._evaluate, early[1:] if is_main else ()),
            hooks.PeriodicWriter(self._writers, PERIOD) if is_main else None,
            StopOnRequest(self._device),
        ]

    def begin(self, weights: Weights, state: Mapping[str, Any] | None, *, pending: bool = False) -> None:
        """Loads ``weights``; with the ``state`` of the checkpoint they are from, continues from its iteration."""
        model = self.checkpointer.model
        load_weights(model.state_dict, weights, require_heads=state is not None, log=log.info)
        if state:
            with checkpoint.restoring("the checkpoint", self._trainer.optimizer, "choose another OUTPUT_DIR"):
                self.load_state_dict(state["trainer"])
            self.start_iter, self.pending = state["iteration"] + 1, pending
            log.info(f"resuming from {weights.path}")
        check_same_start(self.start_iter, model.state_dict())
        if not state and (count := self.cfg.SOLVER.get("FROZEN_BN_ITER", 0)):
            self._settle_frozen_bn(model, count)
        batches: Any = self._trainer.data_loader
        batches.start = self.start_iter

    def _settle_frozen_bn(self, model: Any, count: int) -> None:
        """Takes the statistics of the frozen norms from the first batches of the training."""
        resnet = getattr(model.backbone, "bottom_up", model.backbone)  # C4 has no FPN around it
        frozen_bn.settle(
            model,
            [module for module in model.modules() if isinstance(module, FrozenBatchNorm2d)],
            lambda batch: resnet(model.preprocess_image(batch).tensor),
            TrainingBatches(self.cfg, self.seed, workers=0), count, log.info,
        )  # fmt: skip

    def run_step(self) -> None:
        # The sampling of anchors and proposals depends on the seed, the iteration and the rank, not on a history.
        torch.manual_seed(mix(self.seed, self.iter, comm.get_rank()))
        super().run_step()

    def _scale(self, loss: torch.Tensor) -> torch.Tensor:
        return self._trainer.grad_scaler.scale(loss) if isinstance(self._trainer, AMPTrainer) else loss

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seed": self.seed}

    def save(self, name: str) -> None:
        """Rank 0 writes a checkpoint."""
        self.checkpointer.save(name, iteration=min(self.iter, self.max_iter - 1))  # it ends at max_iter

    def _evaluate(self) -> dict[str, float]:
        self.results = evaluate(self.cfg, self._parallel, self._visualize)
        if comm.is_main_process():
            done = min(self.iter + 1, self.max_iter)
            checkpoints.keep_best(self.cfg, self.results, done, lambda name: self.save(Path(name).stem), log.info)
        several = len(self.results) != 1
        # TEST.EXPECTED_RESULTS, which Detectron2 compares with this, names no data set where there is only one.
        self._last_eval_results = self.results if several else next(iter(self.results.values()))
        return flat_sets(self.results) if comm.is_main_process() else {}
