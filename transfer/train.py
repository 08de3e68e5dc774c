"""Fine-tuning with either engine, read from top to bottom: config -> run folder.

An engine (`state.Engine`) has a model, a solver, data and an evaluation; everything else is here and in `state`, once.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from pretrain.common import distributed
from pretrain.common.device import describe
from pretrain.common.distributed import AgreedStop, average_gradients, data_parallel, on_first_rank
from pretrain.common.errors import UserError, one_line
from pretrain.common.files import atomic_write, remove
from pretrain.common.interrupt import Stopped
from pretrain.common.logs import setup_logging
from pretrain.common.run.folder import write_environment
from pretrain.common.run.skipped_steps import summary
from pretrain.common.weights.file import tensor_digest
from pretrain.common.weights.resnet_names import from_c4

from . import checkpoints
from .batch_norm import estimate_frozen_bn, precise_bn
from .coco.results import Metrics, flatten_metrics
from .config import dump
from .distributed import join
from .samplers import mix
from .state import LOG_PERIOD, Engine, State, find_checkpoint
from .weights.load import Weights, check_config, load_weights

log = logging.getLogger(__name__)


def run(
    engine: Engine, cfg: CfgNode, *, weights: Weights | None, resume: bool = False,
    eval_only: bool = False, visualize: int = 0,
) -> dict[str, Metrics]:  # fmt: skip
    """Trains and evaluates, or evaluates only, in each process of RANK and WORLD_SIZE (without them: in one process).

    Args:
        cfg: of config.load_config, written for this number of processes, and checked by config.check_supported; its
            SEED is set to the one that is used.
        weights: what the run begins with; cleared once loaded; not needed where it resumes from a checkpoint.
        resume: continue from OUTPUT_DIR's newest good checkpoint (none: start with ``weights``).
        visualize: draw the predictions on that many test images.

    Returns:
        The last evaluation's metrics, ``{data set: {"bbox": {"AP": ...}}}``, on rank 0; {} on other ranks.

    Raises:
        UserError: weights or data that do not fit, a loss or weights that are not finite, ranks that do not see the
            same checkpoint.
        Stopped: a stop was requested; the checkpoint is written.
    """
    device, out = join(cfg.MODEL.DEVICE), Path(cfg.OUTPUT_DIR)
    setup_logging(out, distributed.rank())
    log.info(describe(device))
    resumed = find_checkpoint(cfg, engine.NAME, log) if resume and not eval_only else None
    path, content = resumed or (None, {})
    start = content["iteration"] + 1 if resumed else 0
    cfg.SEED = _seed(cfg.SEED, content.get("seed"), log.info)
    if distributed.is_main():
        atomic_write(out / "config.yaml", dump(cfg))
        write_environment(out)
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK and not eval_only
    if resumed:
        weights = Weights(str(path), "", from_c4(content.pop("model")), {})
    assert weights
    cfg, model = build(engine, cfg, device, weights, check=not resumed, require_heads=eval_only or start > 0)
    if distributed.world_size() > 1:
        digest = tensor_digest(*model.state_dict().values())
        distributed.check_agreement((start, digest), "the start (iteration, digest of the weights)")
    if eval_only:
        return engine.evaluate(cfg, model, visualize, final=True)
    evaluating = path is not None and path.name == checkpoints.EVALUATING
    with State(engine, cfg, model, device, log) as state:
        if resumed:
            state.restore(content)
        elif count := cfg.SOLVER.get("FROZEN_BN_ITER", 0):
            estimate_frozen_bn(state, count)
        try:
            return train(state, start, visualize, evaluating=evaluating)
        except Stopped as stop:
            stop.remedy = "a checkpoint is written; run the same command with --resume"
            raise


def build(
    engine: Engine, cfg: CfgNode, device: torch.device, weights: Weights, *,
    check: bool = True, require_heads: bool = True,
) -> tuple[CfgNode, Any]:  # fmt: skip
    """The engine's own config, and the model with ``weights``, which are cleared.

    Args:
        check: compare ``cfg`` with what the weights were trained with.
        require_heads: the weights are a detector's, not only a backbone's.
    """
    if cfg.FLOAT32_PRECISION:
        torch.set_float32_matmul_precision(cfg.FLOAT32_PRECISION)
        torch.backends.cudnn.allow_tf32 = cfg.FLOAT32_PRECISION != "highest"  # Detectron2 couples the two
    cfg = engine.prepare(cfg, logging.getLogger(__name__).info)
    torch.manual_seed(cfg.SEED)
    model = engine.build_model(cfg, device)
    if check:
        check_config(weights, cfg)
    load_weights(model.state_dict, weights, require_heads=require_heads)
    weights.state.clear()  # the model has them now
    return cfg, model


def _seed(given: int, earlier: int | None, log: Callable[[str], None]) -> int:
    """That of the resumed run, or, if ``given`` is negative, a random one for all ranks."""
    if earlier is None:
        return given if given >= 0 else on_first_rank(lambda: int.from_bytes(os.urandom(4), "little") >> 1)
    if given not in (earlier, -1):
        log(f"SEED is {given}, but the run began with {earlier} and keeps it")
    return earlier


def train(state: State, start: int, visualize: int, *, evaluating: bool) -> dict[str, Metrics]:
    """Iterations from ``start`` to the last; returns the last evaluation.

    Args:
        evaluating: the run stopped after iteration ``start - 1``, in precise BN or the evaluation.
    """
    cfg, end, log = state.cfg, state.max_iter, state.log
    repeats = evaluating or start >= end  # the last evaluation, whose line in metrics.json is replaced
    bar = state.report_from(start, first_line=start - repeats)
    parallel = data_parallel(state.model, state.device)
    stop, results = AgreedStop(state.device), {}
    state.model.train()
    if repeats:
        log.info(f"evaluating after iteration {start - 1}, the last of {start} done")
        results = _finish(state, start - 1, visualize, saved=not evaluating)
    if start >= end:
        return results
    if state.rank == 0:
        remove(Path(cfg.OUTPUT_DIR) / "results.json")  # of an earlier end: a training that goes on is not complete
    batches = state.batches(seed=cfg.SEED, start=start, workers=cfg.DATALOADER.NUM_WORKERS)
    state.call_hooks("before_train")
    try:
        for iteration in range(start, end):
            run_step(state, parallel, batches, iteration)
            bar.update()
            done, reason = iteration + 1, stop.poll()
            if done == end or (cfg.TEST.EVAL_PERIOD > 0 and done % cfg.TEST.EVAL_PERIOD == 0):
                results = _finish(state, iteration, visualize, reason)
                continue
            if done % cfg.SOLVER.CHECKPOINT_PERIOD == 0 or reason:
                state.save(f"model_{iteration:07d}.pth", iteration)
            if done % LOG_PERIOD == 0:
                state.write(iteration, state.summary(iteration))
            if reason:
                raise Stopped(reason)
        state.iter = end
    except FloatingPointError as error:  # Detectron2's, of proposals
        raise _diverged(f": {one_line(error)}") from error
    finally:
        state.call_hooks("after_train")
    if skipped := state.skipped.total_after(state.scaler.get_scale()):
        log.info(summary(skipped, end))
    return results


def run_step(state: State, parallel: nn.Module, batches: Any, iteration: int) -> None:
    """One iteration: data, losses, gradients, update."""
    state.iter = state.storage.iter = iteration
    state.call_hooks("before_step")
    began = time.perf_counter()
    batch = next(batches)
    waited = time.perf_counter() - began
    rate = state.schedule(iteration)
    # The sampling of anchors and proposals depends on the seed, the iteration and the rank, not on history.
    torch.manual_seed(mix(state.cfg.SEED, iteration, state.rank))
    state.optimizer.zero_grad()
    parts = state.cfg.SOLVER.get("ACCUMULATE", 1)
    losses = accumulated_losses(parallel, batch, parts, state.scaler.scale, state.precision)
    total = torch.stack(list(losses.values())).sum()
    state.scaler.scale(total).backward()
    state.call_hooks("after_backward")
    scale = state.scaler.scale(torch.ones_like(total, dtype=torch.float32))
    stacked = torch.stack([value.detach().float() for value in (*losses.values(), scale)])
    *values, scale = distributed.mean_(stacked).tolist()  # the losses are read only here
    losses = dict(zip(losses, values, strict=True))
    if not all(map(math.isfinite, values)):
        shown = ", ".join(f"{name} {value:.3g}" for name, value in losses.items())
        images = ", ".join(record["file_name"] for record in batch)
        raise _diverged(f" at iteration {iteration} (learning rate {rate:.3g}): {shown}; images: {images}")
    state.skipped.update(scale, iteration)
    if state.cfg.SOLVER.CLIP_GRADIENTS.ENABLED:
        state.scaler.unscale_(state.optimizer)  # the optimizer's step clips
    state.scaler.step(state.optimizer)
    state.scaler.update()
    seconds = {"time": time.perf_counter() - began, "data_time": waited}
    state.window.append({"total_loss": sum(values), **losses, **seconds})
    state.call_hooks("after_step")
    state.write_images()


def accumulated_losses(
    model: nn.Module,
    batch: list[Any],
    count: int,
    scale: Callable[[Tensor], Tensor],
    precision: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """The losses of ``count`` micro-batches, averaged by their numbers of images.

    The backward pass of all but the last has run: gradients must be zeroed before. Batch norm sees a micro-batch at a
    time. A loss that is a mean over sampled boxes is one per micro-batch.

    Args:
        model: a detector, or DistributedDataParallel around it; its gradients are averaged over ranks once.
        scale: of a loss, for fp16.
        precision: of autocast; None: full precision.
    """
    device, sums = next(model.parameters()).device.type, dict[str, Tensor]()
    for index in range(count):
        start, stop = (len(batch) * part // count for part in (index, index + 1))
        is_last, share = index == count - 1, (stop - start) / len(batch)
        with average_gradients(model, is_last):
            with torch.autocast(device, precision) if precision else nullcontext():
                losses = {name: loss * share for name, loss in model(batch[start:stop]).items()}
            if not is_last:
                scale(torch.stack(list(losses.values())).sum()).backward()
                losses = {name: loss.detach() for name, loss in losses.items()}
        sums = {name: loss + sums[name] if sums else loss for name, loss in losses.items()}
    return sums


def _finish(state: State, iteration: int, visualize: int, reason: str = "", *, saved: bool = False) -> Any:
    """Runs precise BN, saves the checkpoints that are due, and evaluates after ``iteration``; returns the metrics.

    A checkpoint is saved first, so that a resumed run begins with whatever was not finished.

    Args:
        reason: to stop, once that first checkpoint is saved; empty: continue.
        saved: precise BN and the checkpoints are already complete.
    """
    cfg, done = state.cfg, iteration + 1
    final, pending = done >= state.max_iter, Path(cfg.OUTPUT_DIR) / checkpoints.EVALUATING
    if not saved:
        state.save(pending.name, iteration)
        if reason:
            raise Stopped(reason)
        precise_bn(state, iteration)
        if done % cfg.SOLVER.CHECKPOINT_PERIOD == 0:
            state.save(f"model_{iteration:07d}.pth", iteration)
        if final:
            state.save("model_final.pth", iteration)
            if state.rank == 0:
                remove(pending)  # the final checkpoint says the same: only the evaluation is due
    results = state.engine.evaluate(cfg, state.model, visualize if final else 0, final=final)
    on_first_rank(lambda: state.keep_best(results, iteration))
    line = state.summary(iteration) if final or done % LOG_PERIOD == 0 else {}
    state.write(iteration, flatten_metrics(results) | line)
    if state.rank == 0:
        remove(pending)
    return results


def _diverged(what: str) -> UserError:
    return UserError(f"training diverged{what}; lower SOLVER.BASE_LR or lengthen SOLVER.WARMUP_ITERS")
