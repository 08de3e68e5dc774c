"""Training on the torchvision engine, read from top to bottom: config -> run folder."""

from __future__ import annotations

import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fvcore.common.config import CfgNode
from fvcore.nn.precise_bn import get_bn_modules, update_bn_stats

from pretrain.common.errors import UserError
from pretrain.common.interrupt import Stopped
from pretrain.common.process_group import AgreedStop, data_parallel, on_first_rank
from pretrain.common.run_folder import atomic_write, remove, setup_logging, write_environment
from pretrain.common.skipped_steps import summary

from .. import checkpoints, frozen_bn
from ..accumulate import Accumulated
from ..coco import results as coco_results
from ..config import precise_bn_batches
from ..distributed import check_same_start, join, pool_batch_norm, reported, settle_seed, until_stopped
from ..stream import mix
from ..weights import Weights, check_config, load_weights
from .evaluation import evaluate
from .layers import FrozenBatchNorm
from .model import build_model
from .solver import clip_gradients, set_learning_rate
from .state import LOG_PERIOD, State, find_checkpoint


def run(
    cfg: CfgNode, *, weights: Weights | None, resume: bool = False, eval_only: bool = False, visualize: int = 0
) -> dict[str, coco_results.Metrics]:
    """Trains and evaluates, or evaluates only, in each process of RANK and WORLD_SIZE (without them: in one process).

    Args:
        cfg: of config.load_config, written for this number of processes, and checked by config.check_supported; its
            SEED is set to the one that is used.
        weights: what the run begins with; not needed where it resumes from a checkpoint.
        resume: continue from OUTPUT_DIR's newest good checkpoint (none: start with ``weights``).
        visualize: draw the predictions on that many test images.

    Returns:
        The last evaluation's metrics, ``{data set: {"bbox": {"AP": ...}}}``, on rank 0; {} on other ranks.

    Raises:
        UserError: weights or data that do not fit, a loss or weights that are not finite, ranks that do not see the
            same checkpoint.
        Stopped: a stop was requested; the checkpoint is written.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = join(cfg.MODEL.DEVICE)
    out = Path(cfg.OUTPUT_DIR)
    log = setup_logging(out, rank, "transfer")
    found = find_checkpoint(cfg, log) if resume and not eval_only else None
    path, content = found or (None, {})
    start = content["iteration"] + 1 if found else 0
    settle_seed(cfg, content.get("seed"), log.info)
    if rank == 0:
        atomic_write(out / "config.yaml", cfg.dump())
        write_environment(out)
    if cfg.MODEL.DEVICE == "cuda" and device.type == "cpu":
        log.info("MODEL.DEVICE is cuda, but there is no CUDA device: running on the CPU")
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK and not eval_only
    if cfg.FLOAT32_PRECISION:
        torch.set_float32_matmul_precision(cfg.FLOAT32_PRECISION)
        torch.backends.cudnn.allow_tf32 = cfg.FLOAT32_PRECISION != "highest"  # Detectron2 couples the two

    torch.manual_seed(cfg.SEED)
    model = build_model(cfg, device)
    if found:
        weights = Weights(str(path), "", content.pop("model"), {})
    else:
        assert weights
        check_config(weights, cfg, log.info)
    load_weights(model.state_dict, weights, require_heads=eval_only or start > 0, log=log.info)
    del weights  # the model has them now
    check_same_start(start, model.state_dict())
    if eval_only:
        return evaluate(cfg, model, rank, world, visualize)
    evaluating = path is not None and path.name == checkpoints.EVALUATING
    with State(cfg, model, device, rank, world, log) as state:
        if found:
            state.restore(content)
        elif count := cfg.SOLVER.get("FROZEN_BN_ITER", 0):
            _settle_frozen_bn(state, count)
        return train(state, start, visualize, evaluating=evaluating)


def train(state: State, start: int, visualize: int, *, evaluating: bool) -> dict[str, coco_results.Metrics]:
    """Iterations from ``start`` to the last; returns the last evaluation.

    Args:
        evaluating: the run stopped after iteration ``start - 1``, in precise BN or the evaluation.
    """
    cfg, solver, model, device, log = state.cfg, state.cfg.SOLVER, state.model, state.device, state.log
    results: dict[str, coco_results.Metrics] = {}
    done, is_over = start, start >= solver.MAX_ITER
    repeats = evaluating or is_over  # the last evaluation, whose line in metrics.json is replaced
    bar = state.report_from(start, first_line=start - repeats)
    parallel = Accumulated(
        data_parallel(model, device), solver.get("ACCUMULATE", 1), state.scaler.scale, state.precision
    )
    stop = AgreedStop(device)
    model.train()
    if repeats:
        log.info(f"evaluating after iteration {start - 1}, the last of {start} done")
        results = _finish(state, start - 1, visualize, saved=not evaluating)
        if is_over:
            return results
    batches = state.batches(seed=cfg.SEED, start=start, workers=cfg.DATALOADER.NUM_WORKERS)
    for iteration in range(start, solver.MAX_ITER):
        began = time.perf_counter()
        batch = next(batches)
        waited = time.perf_counter() - began
        set_learning_rate(state.optimizer, state.rate(iteration))
        # The sampling of anchors and proposals depends on the seed, the iteration and the rank, not on history.
        torch.manual_seed(mix(cfg.SEED, iteration, state.rank))
        state.optimizer.zero_grad()
        losses = parallel(batch)
        total = torch.stack(list(losses.values())).sum()
        state.scaler.scale(total).backward()
        scale = state.scaler.scale(torch.ones_like(total, dtype=torch.float32))
        *values, scale = _mean_over_ranks([*losses.values(), scale])  # the losses are read only here
        losses = dict(zip(losses, values, strict=True))
        _check_finite(losses, iteration, state.rate(iteration), batch)
        state.skipped.see(scale, iteration)
        if solver.CLIP_GRADIENTS.ENABLED:
            state.scaler.unscale_(state.optimizer)
            clip_gradients(solver.CLIP_GRADIENTS, model.parameters())
        state.scaler.step(state.optimizer)
        state.scaler.update()
        seconds = {"time": time.perf_counter() - began, "data_time": waited}
        state.window.append({"total_loss": sum(values), **losses, **seconds})
        bar.update()

        done, reason = iteration + 1, stop.poll()
        if done == solver.MAX_ITER or (cfg.TEST.EVAL_PERIOD > 0 and done % cfg.TEST.EVAL_PERIOD == 0):
            results = _finish(state, iteration, visualize, reason)
            continue
        if done % solver.CHECKPOINT_PERIOD == 0 or reason:
            state.save(f"model_{iteration:07d}.pth", iteration)
        if done % LOG_PERIOD == 0:
            state.write(iteration, state.summary(iteration))
        if reason:
            raise Stopped(reason)
    if skipped := state.skipped.up_to(state.scaler.get_scale()):
        log.info(summary(skipped, done))
    return results


def _finish(
    state: State, iteration: int, visualize: int, reason: str = "", *, saved: bool = False
) -> dict[str, coco_results.Metrics]:
    """Runs precise BN, saves the checkpoints that are due, and evaluates after ``iteration``.

    A checkpoint is saved first, so that a resumed run begins with whatever was not finished.

    Args:
        reason: to stop, once that first checkpoint is saved; empty: continue.
        saved: precise BN and the checkpoints are already complete.
    """
    cfg, done = state.cfg, iteration + 1
    final, pending = done >= cfg.SOLVER.MAX_ITER, Path(cfg.OUTPUT_DIR) / checkpoints.EVALUATING
    if not saved:
        state.save(pending.name, iteration)
        if reason:
            raise Stopped(reason)
    if not saved:
        _precise_bn(state, iteration)
        if done % cfg.SOLVER.CHECKPOINT_PERIOD == 0:
            state.save(f"model_{iteration:07d}.pth", iteration)
        if final:
            state.save("model_final.pth", iteration)
            if state.rank == 0:
                remove(pending)  # the final checkpoint says the same: only the evaluation is due
    results = evaluate(cfg, state.model, state.rank, state.world, visualize if final else 0)
    write = partial(state.write_file, iteration=iteration)
    on_first_rank(lambda: checkpoints.keep_best(cfg, results, done, write, state.log.info))
    summary = state.summary(iteration) if final or done % LOG_PERIOD == 0 else {}
    state.write(iteration, coco_results.flat_sets(results) | summary)
    if state.rank == 0:
        remove(pending)
    return results


def _precise_bn(state: State, iteration: int) -> None:
    """Replaces the running statistics by the true averages over some batches, the same on every rank."""
    norms, count = get_bn_modules(state.model), precise_bn_batches(state.cfg, iteration + 1)
    if not state.cfg.TEST.PRECISE_BN.ENABLED or not norms:
        return
    state.log.info(f"precise BN over {count} batches")
    torch.manual_seed(mix(state.cfg.SEED, iteration, state.rank))
    batches = state.batches(seed=mix(state.cfg.SEED, iteration, 0), start=0, workers=0)
    update_bn_stats(state.model, reported(until_stopped(batches), count, "precise BN", state.log.info), count)
    if state.world > 1:
        pool_batch_norm(norms)


def _settle_frozen_bn(state: State, count: int) -> None:
    """Takes the statistics of the frozen norms from the first batches of the training."""
    model = state.model
    batches = state.batches(seed=state.cfg.SEED, start=0, workers=0)
    frozen_bn.settle(
        model,
        [module for module in model.modules() if isinstance(module, FrozenBatchNorm)],
        lambda batch: model.backbone.bottom_up(model.preprocess([record["image"] for record in batch])[0]),
        batches, count, state.log.info,
    )  # fmt: skip


def _mean_over_ranks(values: list[torch.Tensor]) -> list[float]:
    stacked = torch.stack([value.detach().float() for value in values])
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return stacked.tolist()
    dist.all_reduce(stacked)
    return [value / dist.get_world_size() for value in stacked.tolist()]


def _check_finite(losses: dict[str, float], iteration: int, rate: float, batch: list[dict[str, Any]]) -> None:
    if not all(map(math.isfinite, losses.values())):
        shown = ", ".join(f"{name} {value:.3g}" for name, value in losses.items())
        images = ", ".join(record["file_name"] for record in batch)
        raise UserError(
            f"training diverged at iteration {iteration} (learning rate {rate:.3g}): {shown}; images: {images}; lower "
            "SOLVER.BASE_LR or lengthen SOLVER.WARMUP_ITERS"
        )
