"""Fine-tuning with either engine, read from top to bottom: config -> run folder.

An `Engine` supplies a model, a solver, data and an evaluation; everything else is here and in `trainer`, once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pretrain.common import distributed
from pretrain.common.config import extensions
from pretrain.common.device import describe, set_float32_precision
from pretrain.common.distributed import data_parallel
from pretrain.common.errors import UserError, count_noun, one_line
from pretrain.common.files import atomic_write, read_json, remove, write_json
from pretrain.common.interrupt import Stopped, StopRequest, save_before_stop
from pretrain.common.logs import setup_logging
from pretrain.common.ranks import process_group
from pretrain.common.ranks.agreement import AgreedStop, check_agreement, on_every_rank, on_first_rank
from pretrain.common.run import file_names
from pretrain.common.run.folder import write_environment
from pretrain.common.run.garbage import GarbageCollector
from pretrain.common.run.skipped_steps import describe_skipped_steps
from pretrain.common.weights.file import compute_tensor_digest
from pretrain.common.weights.resnet_names import from_c4

from .coco.data import warn_of_pretraining_images
from .coco.records import DataSet
from .coco.results import flatten_metrics, write_results
from .config import dump
from .engine import Engine
from .preflight import FINAL
from .step import run_step
from .trainer import Trainer
from .training import checkpoints
from .training.batch_norm import estimate_frozen_bn, explain_single_values, precise_bn
from .training.samplers import ModelInput
from .training.scores import describe_early_end, end_without_gain, keep_best
from .trial import try_batch
from .weights.load import Weights, check_same_weights, check_weights_fit, load_weights, read_weights
from .weights.locate import find_weights

if TYPE_CHECKING:
    from .api import Run

log = logging.getLogger(__name__)
Results = dict[str, Any]  # the content of results.json
Write = Callable[..., Results]  # writes it from the metrics of the last evaluation and the ``iteration``s completed


def load_engine(name: str) -> type[Engine]:
    """Import an engine: detectron2 or torchvision."""
    if name == "detectron2":
        from .detectron2_engine.engine import Detectron2Engine

        return Detectron2Engine
    from .torchvision_engine.engine import TorchvisionEngine

    return TorchvisionEngine


def run(
    run: Run, device: torch.device, data_sets: Mapping[str, DataSet], request: StopRequest | None = None
) -> dict[str, Any]:
    """Train and evaluate, or evaluate only, in each process of the process group, which was joined before.

    Args:
        run: what to do; the SEED of its config is set to the one that is used.
        data_sets: those of DATASETS.TRAIN (which an evaluation does not need) and DATASETS.TEST, by name.
        request: a request to stop (default: none comes).

    Returns:
        The content of results.json, on every rank.

    Raises:
        UserError: weights or data that do not fit, a loss or weights that are not finite, ranks that do not see the
            same checkpoint.
        Stopped: a stop was requested; the checkpoint is written.
    """
    cfg = run.cfg
    output_dir = Path(cfg.OUTPUT_DIR)
    setup_logging(output_dir, distributed.rank())
    set_float32_precision(cfg.FLOAT32_PRECISION)
    log.info(describe(device))
    path, checkpoint = _load_checkpoint(run)
    cfg.SEED = _choose_seed(cfg.SEED, checkpoint.get("seed"))
    engine = load_engine(run.engine)(cfg, data_sets, AgreedStop(request or StopRequest(), device))
    data = None if run.eval_only else engine.load_training_data()
    start = checkpoint.get("iteration", -1) + 1
    if data and start < cfg.SOLVER.MAX_ITER:
        on_every_rank(try_batch, data, cfg.SEED, start)
    weights, weights_record = _read_weights(run, path, checkpoint)
    if not path:
        tested = [data_sets[name] for name in cfg.DATASETS.TEST]
        on_first_rank(warn_of_pretraining_images, tested, weights.provenance)
    if distributed.is_first_rank():
        atomic_write(output_dir / file_names.CONFIG, dump(cfg))
        write_environment(output_dir)
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK and not run.eval_only
    model = build_model(engine, device, weights, require_heads=run.eval_only or bool(checkpoint))
    _check_same_start(model, start)
    write = partial(write_results, cfg, engine=run.engine, weights=weights_record)
    if data is None:
        metrics = engine.complete_evaluation(model, engine.evaluate(model), run.visualize)
        return on_first_rank(write, metrics, iteration=None)
    trainer = Trainer(engine, model, data, device)
    if path:
        _resume(trainer, path, checkpoint)
    with explain_single_values():
        if cfg.SOLVER.FROZEN_BN_ITER and not path:
            estimate_frozen_bn(trainer, cfg.SOLVER.FROZEN_BN_ITER)
        return train(trainer, run.visualize, write)


def train(trainer: Trainer, visualize: int, write: Write) -> Results:
    """Run the remaining iterations and evaluations; return the content of results.json on every rank.

    Args:
        visualize: number of test images per data set on which to draw the last predictions.
    """
    output_dir = Path(trainer.cfg.OUTPUT_DIR)
    stop = trainer.engine.stop
    results: Results = {}
    model = data_parallel(trainer.model.train())
    batches = save_before_stop(_load_batches(trainer), lambda _: trainer.save(), trainer.world_size)
    with _explain_stop(trainer), trainer.open_logs(), trainer.surround_by_hooks(), GarbageCollector() as garbage:
        if trainer.pending or trainer.is_over:
            results = _evaluate(trainer, visualize, write)
        if trainer.rank == 0 and not trainer.is_over:
            remove(output_dir / file_names.RESULTS)  # stale: the run is being extended
        while not trainer.is_over:
            run_step(trainer, model, batches, trainer.done)
            if trainer.done == trainer.start_iter:
                process_group.shorten_timeout()
            trainer.advance()
            garbage.count_step()
            reason = stop.poll()
            trainer.save_if_due(reason)
            trainer.log()
            if reason:
                raise Stopped(reason)
            if trainer.pending:
                with garbage.automatic():
                    results = _evaluate(trainer, visualize, write)
    num_skipped = trainer.skipped.total_after(trainer.scaler.get_scale())
    if num_skipped:
        log.info(describe_skipped_steps(num_skipped, trainer.done))
    return results


def _evaluate(trainer: Trainer, visualize: int, write: Write) -> Results:
    """Do what is pending after the completed iterations; return the content of results.json, or {} before the end."""
    engine = trainer.engine
    summary = trainer.summarize()  # before what may take long, and logs its own lines
    if trainer.pending == checkpoints.PRECISE_BN:
        precise_bn(trainer, trainer.done - 1)
        trainer.pending = checkpoints.EVALUATION
        if trainer.is_over:
            trainer.save_final()
    metrics = engine.evaluate(trainer.model)
    keep_best(trainer, metrics)
    if end_without_gain(trainer):
        trainer.save_final()
    if trainer.is_over:
        metrics = engine.complete_evaluation(trainer.model, metrics, visualize)
    trainer.write_metrics(flatten_metrics(metrics) | summary)
    results: Results = {}
    if trainer.is_over:
        results = on_first_rank(write, metrics, iteration=trainer.done, ended_early=describe_early_end(trainer))
    trainer.settle()
    return results


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


def _load_checkpoint(run: Run) -> tuple[Path | None, dict[str, Any]]:
    """Load the newest undamaged checkpoint in OUTPUT_DIR on every rank; return (None, {}) for a new run.

    Raises:
        UserError: it is another engine's, or beyond SOLVER.MAX_ITER.
    """
    cfg = run.cfg
    checkpoint = checkpoints.load_newest_on_all_ranks(cfg.OUTPUT_DIR) if run.resume and not run.eval_only else None
    if checkpoint is None:
        return None, {}
    path, content = checkpoint
    if content.get("engine") != run.engine:
        raise UserError(f"{path} was not written by the {run.engine} engine; resume with the engine that wrote it")
    iterations_done = content["iteration"] + 1
    if iterations_done > cfg.SOLVER.MAX_ITER:
        problem = f"but {cfg.OUTPUT_DIR} completed {count_noun(iterations_done, 'iteration')}"
        raise UserError(f"SOLVER.MAX_ITER is {cfg.SOLVER.MAX_ITER}, {problem}; raise it, or choose another OUTPUT_DIR")
    log.info(f"resuming from {path}")
    change = extensions.describe_change(content.get("imported", ""))  # an earlier version recorded none
    if change:
        log.warning(f"{change}; the run continues with them as they are now")
    return checkpoint


def _choose_seed(configured: int, resumed: int | None) -> int:
    """Return the seed of the resumed run, the configured one, or a random one shared by all ranks."""
    if resumed is None:
        return configured if configured >= 0 else int.from_bytes(on_first_rank(os.urandom, 4), "little") >> 1
    if configured not in (resumed, -1):
        log.info(f"SEED is {configured}, but the run was started with {resumed} and keeps it")
    return resumed


def _read_weights(run: Run, path: Path | None, checkpoint: dict[str, Any]) -> tuple[Weights, dict[str, Any]]:
    """Return the weights of the checkpoint or else of MODEL.WEIGHTS, and the record of the latter for results.json.

    A training saves the record in OUTPUT_DIR/initial_weights.json, where a resumed one reads it.

    Raises:
        UserError: a resumed run is given weights other than those it was started with.
    """
    cfg = run.cfg
    record = Path(cfg.OUTPUT_DIR) / file_names.INITIAL_WEIGHTS
    if checkpoint:
        initial = on_first_rank(read_json, record)
        on_first_rank(check_same_weights, cfg.MODEL.WEIGHTS, initial, cfg.OUTPUT_DIR)
        return Weights(str(path), "", from_c4(checkpoint.pop("model")), None), initial
    on_first_rank(find_weights, cfg.MODEL.WEIGHTS)  # ranks whose downloads fail would try one after another
    weights = on_every_rank(read_weights, cfg.MODEL.WEIGHTS)
    check_weights_fit(weights, cfg)
    if not run.eval_only:
        on_first_rank(write_json, record, weights.summary())
    return weights, weights.summary()


def _resume(trainer: Trainer, path: Path, checkpoint: dict[str, Any]) -> None:
    """Restore a checkpoint; where it ends the run but is not the final one, precise BN and the evaluation are due."""
    trainer.restore(checkpoint)
    end_without_gain(trainer)
    if trainer.is_over and path.name != FINAL:
        trainer.pending = trainer.pending or checkpoints.PRECISE_BN


def _check_same_start(model: nn.Module, iteration: int) -> None:
    """Raise UserError unless all ranks start with the same weights at the same iteration."""
    if distributed.world_size() > 1:
        digest = compute_tensor_digest(*model.state_dict().values())
        check_agreement((iteration, digest), "the start (iteration, digest of the weights)")


def _load_batches(trainer: Trainer) -> Iterator[list[ModelInput]]:
    """Yield this rank's batches from the first that is not completed."""
    options: dict[str, Any] = {"workers": trainer.cfg.DATALOADER.NUM_WORKERS, "stop": trainer.engine.stop.request}
    return trainer.data.batches(seed=trainer.cfg.SEED, start=trainer.done, **options)


@contextmanager
def _explain_stop(trainer: Trainer) -> Iterator[None]:
    """Tell whoever stops the run in this block how to resume it, and in one line that training diverged."""
    try:
        yield
    except Stopped as stop:
        if checkpoints.list_checkpoints(trainer.cfg.OUTPUT_DIR):  # none where not even the first batch arrived
            stop.remedy = "a checkpoint is written; run the same command with --resume"
        raise
    except Exception as error:
        trainer.read_losses()  # where one is not finite, the next iteration may fail in any way
        if isinstance(error, FloatingPointError):  # raised by Detectron2's proposal generator
            raise checkpoints.build_divergence_error(f": {one_line(error)}") from error
        raise
