"""Fine-tuning with either engine, read from top to bottom: config -> run folder.

An `Engine` supplies a model, a solver, data and an evaluation; everything else is here and in `trainer`, once.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import nn

from pretrain.common import distributed
from pretrain.common.device import describe, set_float32_precision
from pretrain.common.distributed import AgreedStop, data_parallel, on_first_rank
from pretrain.common.errors import UserError, count_noun, one_line
from pretrain.common.files import atomic_write, remove
from pretrain.common.interrupt import Stopped, StopRequest, save_before_stop
from pretrain.common.logs import setup_logging
from pretrain.common.run.folder import write_environment
from pretrain.common.run.skipped_steps import describe_skipped_steps
from pretrain.common.weights.file import compute_tensor_digest
from pretrain.common.weights.resnet_names import from_c4

from . import checkpoints
from .batch_norm import estimate_frozen_bn, precise_bn
from .coco.data import DataSet
from .coco.results import Metrics, flatten_metrics
from .config import dump
from .engine import Engine
from .step import run_step
from .trainer import LOG_PERIOD, Trainer
from .weights.load import Weights, check_weights_fit, load_weights

log = logging.getLogger(__name__)


def load_engine(name: str) -> type[Engine]:
    """Import an engine: detectron2 or torchvision."""
    if name == "detectron2":
        from .detectron2_engine.engine import Detectron2Engine

        return Detectron2Engine
    from .torchvision_engine.engine import TorchvisionEngine

    return TorchvisionEngine


def run(
    engine_class: type[Engine],
    cfg: CfgNode,
    device: torch.device,
    data_sets: Mapping[str, DataSet],
    request: StopRequest | None = None,
    *,
    weights: Weights | None,
    resume: bool = False,
    eval_only: bool = False,
    visualize: int = 0,
) -> dict[str, Metrics]:
    """Train and evaluate, or evaluate only, in each process of the process group, which was joined before.

    Args:
        cfg: the config as `api.prepare` returns it; its SEED is set to the one that is used.
        data_sets: those of DATASETS.TRAIN (which an evaluation does not need) and DATASETS.TEST, by name.
        request: a request to stop (default: none comes).
        weights: initial weights; cleared once loaded; not needed where the run resumes from a checkpoint.
        resume: continue from OUTPUT_DIR's newest undamaged checkpoint, or start with ``weights`` if there is none.
        visualize: number of test images per data set on which to draw the predictions.

    Returns:
        The last evaluation's metrics, ``{data set: {"bbox": {"AP": ...}}}``, on rank 0; {} on other ranks.

    Raises:
        UserError: weights or data that do not fit, a loss or weights that are not finite, ranks that do not see the
            same checkpoint.
        Stopped: a stop was requested; the checkpoint is written.
    """
    output_dir = Path(cfg.OUTPUT_DIR)
    setup_logging(output_dir, distributed.rank())
    set_float32_precision(cfg.FLOAT32_PRECISION)
    log.info(describe(device))
    checkpoint = _load_checkpoint(cfg, engine_class.name) if resume and not eval_only else None
    path, content = checkpoint or (None, {})
    start = content["iteration"] + 1 if checkpoint else 0
    cfg.SEED = _choose_seed(cfg.SEED, content.get("seed"))
    if distributed.is_main():
        atomic_write(output_dir / "config.yaml", dump(cfg))
        write_environment(output_dir)
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK and not eval_only
    if checkpoint:
        weights = Weights(str(path), "", from_c4(content.pop("model")), None)
    else:
        assert weights
        check_weights_fit(weights, cfg)
    engine = engine_class(cfg, data_sets, AgreedStop(request or StopRequest(), device))
    model = build_model(engine, device, weights, require_heads=eval_only or start > 0)
    if distributed.world_size() > 1:
        digest = compute_tensor_digest(*model.state_dict().values())
        distributed.check_agreement((start, digest), "the start (iteration, digest of the weights)")
    if eval_only:
        return engine.evaluate(model, visualize, final=True)
    trainer = Trainer(engine, model, device)
    if checkpoint:
        trainer.restore(content)
    elif cfg.SOLVER.FROZEN_BN_ITER:
        estimate_frozen_bn(trainer, cfg.SOLVER.FROZEN_BN_ITER)
    resume_evaluation = path is not None and path.name == checkpoints.EVALUATING
    try:
        return train(trainer, start, visualize, resume_evaluation=resume_evaluation)
    except Stopped as stop:
        if checkpoints.list_checkpoints(output_dir, evaluating=True):  # none where not even the first batch arrived
            stop.remedy = "a checkpoint is written; run the same command with --resume"
        raise


def build_model(engine: Engine, device: torch.device, weights: Weights, *, require_heads: bool = True) -> nn.Module:
    """Build the model with ``weights``, which are cleared.

    Args:
        require_heads: the weights are a detector's, not only a backbone's.
    """
    torch.manual_seed(engine.cfg.SEED)
    model = engine.build_model(device)
    load_weights(model.state_dict, weights, require_heads=require_heads)
    weights.state.clear()  # the model has them now
    return model


def _load_checkpoint(cfg: CfgNode, engine: str) -> tuple[Path, dict[str, Any]] | None:
    """Load the newest undamaged checkpoint in OUTPUT_DIR on every rank; return None for a new run.

    Raises:
        UserError: it is another engine's, or beyond SOLVER.MAX_ITER.
    """
    checkpoint = checkpoints.load_newest_on_all_ranks(cfg.OUTPUT_DIR)
    if checkpoint is None:
        return None
    path, content = checkpoint
    if content.get("engine") != engine:
        raise UserError(f"{path} was not written by the {engine} engine; resume with the engine that wrote it")
    iterations_done = content["iteration"] + 1
    if iterations_done > cfg.SOLVER.MAX_ITER:
        problem = f"but {cfg.OUTPUT_DIR} completed {count_noun(iterations_done, 'iteration')}"
        raise UserError(f"SOLVER.MAX_ITER is {cfg.SOLVER.MAX_ITER}, {problem}; raise it, or choose another OUTPUT_DIR")
    log.info(f"resuming from {path}")
    return checkpoint


def _choose_seed(configured: int, resumed: int | None) -> int:
    """Return the seed of the resumed run, the configured one, or a random one shared by all ranks."""
    if resumed is None:
        return configured if configured >= 0 else int.from_bytes(on_first_rank(os.urandom, 4), "little") >> 1
    if configured not in (resumed, -1):
        log.info(f"SEED is {configured}, but the run was started with {resumed} and keeps it")
    return resumed


def train(trainer: Trainer, start: int, visualize: int, *, resume_evaluation: bool) -> dict[str, Metrics]:
    """Run the iterations from ``start`` to the last; return the metrics of the last evaluation.

    Args:
        resume_evaluation: the run stopped during precise BN or the evaluation after iteration ``start - 1``.
    """
    results: dict[str, Metrics] = {}
    evaluates_first = resume_evaluation or start >= trainer.max_iter  # its line in metrics.json is replaced
    trainer.model.train()
    with trainer.open_logs(start, first_line=start - evaluates_first):
        if evaluates_first:
            log.info(f"evaluating after iteration {start - 1}, the last of {start} done")
            results = _evaluate_and_save(trainer, start - 1, visualize, is_saved=not resume_evaluation)
        if start < trainer.max_iter:
            results = _train_steps(trainer, start, visualize)
    return results


def _train_steps(trainer: Trainer, start: int, visualize: int) -> dict[str, Metrics]:
    """Run the iterations from ``start`` to the last; return the metrics of the last evaluation."""
    cfg = trainer.cfg
    end = trainer.max_iter
    if trainer.rank == 0:
        remove(Path(cfg.OUTPUT_DIR) / "results.json")  # stale: the run is being extended
    results: dict[str, Metrics] = {}
    stop = trainer.engine.stop
    ddp_model = data_parallel(trainer.model)
    batches = trainer.data.batches(seed=cfg.SEED, start=start, workers=cfg.DATALOADER.NUM_WORKERS, stop=stop.request)
    batches = save_before_stop(batches, lambda steps: _save(trainer, start + steps - 1), trainer.world_size)
    trainer.call_hooks("before_train")
    try:
        for iteration in range(start, end):
            run_step(trainer, ddp_model, batches, iteration)
            trainer.progress.advance()
            iterations_done = iteration + 1
            reason = stop.poll()
            is_due = cfg.TEST.EVAL_PERIOD > 0 and iterations_done % cfg.TEST.EVAL_PERIOD == 0
            if is_due or iterations_done == end:
                results = _evaluate_and_save(trainer, iteration, visualize, stop_reason=reason)
                continue
            if iterations_done % cfg.SOLVER.CHECKPOINT_PERIOD == 0 or reason:
                _save(trainer, iteration)
            if iterations_done % LOG_PERIOD == 0:
                trainer.write_metrics(iteration, trainer.summarize(iteration))
            if reason:
                raise Stopped(reason)
        trainer.iter = end
    except FloatingPointError as error:  # raised by Detectron2's proposal generator
        raise checkpoints.build_divergence_error(f": {one_line(error)}") from error
    finally:
        trainer.call_hooks("after_train")
    num_skipped = trainer.skipped.total_after(trainer.scaler.get_scale())
    if num_skipped:
        log.info(describe_skipped_steps(num_skipped, end))
    return results


def _save(trainer: Trainer, iteration: int) -> None:
    trainer.save(f"model_{iteration:07d}.pth", iteration)


def _evaluate_and_save(
    trainer: Trainer, iteration: int, visualize: int, *, stop_reason: str = "", is_saved: bool = False
) -> dict[str, Metrics]:
    """Run precise BN, save the checkpoints that are due, and evaluate after ``iteration``; return the metrics.

    A checkpoint is saved first, so that a resumed run begins with whatever was not finished.

    Args:
        stop_reason: why to stop once that first checkpoint is saved; empty to continue.
        is_saved: precise BN and the checkpoints are already complete.
    """
    cfg = trainer.cfg
    iterations_done = iteration + 1
    is_final = iterations_done >= trainer.max_iter
    pending = Path(cfg.OUTPUT_DIR) / checkpoints.EVALUATING
    if not is_saved:
        trainer.save(pending.name, iteration)
        if stop_reason:
            raise Stopped(stop_reason)
        precise_bn(trainer, iteration)
        if iterations_done % cfg.SOLVER.CHECKPOINT_PERIOD == 0:
            _save(trainer, iteration)
        if is_final:
            trainer.save("model_final.pth", iteration)
            if trainer.rank == 0:
                remove(pending)  # the final checkpoint contains the same: only the evaluation is due
    results = trainer.engine.evaluate(trainer.model, visualize if is_final else 0, final=is_final)
    on_first_rank(trainer.save_best, results, iteration)
    line = trainer.summarize(iteration) if is_final or iterations_done % LOG_PERIOD == 0 else {}
    trainer.write_metrics(iteration, flatten_metrics(results) | line)
    if trainer.rank == 0:
        remove(pending)
    return results
