"""Pretraining, read from top to bottom: config -> run folder.

One process per device; the process group comes from the environment (torchrun, or tools/launch.py). Every random number
is a function of (seed, epoch, image, view) or (seed, step), so a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import Tensor

from . import datasets, distributed, schedule, views
from .common import checkpoint, interrupt, process_group
from .common.config_io import dump, flatten
from .common.errors import UserError
from .common.run_folder import (
    MetricsWriter,
    atomic_write,
    read_json,
    setup_logging,
    write_environment,
    write_json,
)
from .common.stage import stage
from .config import FREE_ON_RESUME, from_yaml_text
from .learner import Learner
from .loader import Loader
from .methods import METHODS
from .probe import knn
from .probe.features import ProbeData
from .progress import Progress


def main(cfg: CfgNode) -> dict[str, Any]:
    """Pretrains as ``cfg`` says and returns what stands in results.json.

    A folder that holds checkpoints of the same config is resumed; one that is complete is left as it is.

    Raises:
        UserError: bad input, non-finite loss, full disk, a folder that is in use or another stage's.
        interrupt.Stopped: a stop was requested; the checkpoint is written.
    """
    output_dir = Path(cfg.OUTPUT_DIR or f"runs/{cfg.METHOD.NAME}_{cfg.MODEL.ARCH}")
    with stage("pretrain", output_dir, lambda: distributed.init(cfg.DEVICE)) as device:
        return _pretrain(cfg, output_dir, device)


def _pretrain(cfg: CfgNode, output_dir: Path, device: torch.device) -> dict[str, Any]:
    log = setup_logging(output_dir, distributed.rank())
    method = METHODS[cfg.METHOD.NAME]
    found = _find_checkpoint(cfg, output_dir, log.warning)

    def open_data() -> datasets.ImageData:
        data = datasets.load(cfg.DATA.TRAIN, "train", cfg.DATA.ROOT, cfg.DATA.DOWNLOAD)
        if cfg.METHOD.LABELS == "class" and method.kind == "batch" and data.labels is None:
            raise UserError(
                f"METHOD.LABELS is class, but {cfg.DATA.TRAIN} has no labels; use one folder per class, or index"
            )
        return data

    data = process_group.on_every_rank(open_data)
    recipes = [views.RECIPES[cfg.VIEWS.QUERY]] + [views.RECIPES[cfg.VIEWS.KEY]] * cfg.METHOD.NUM_KEYS
    loader = Loader(
        data, recipes, cfg.VIEWS.IMAGE_SIZE, batch_size=cfg.SOLVER.IMS_PER_BATCH, seed=cfg.SEED,
        rank=distributed.rank(), world_size=distributed.world_size(), num_workers=cfg.DATALOADER.NUM_WORKERS,
        on_corrupt=cfg.DATALOADER.ON_CORRUPT, executor=cfg.VIEWS.EXECUTOR, pin_memory=device.type == "cuda",
    )  # fmt: skip
    steps_per_epoch = len(loader)
    all_steps = steps_per_epoch * cfg.SOLVER.EPOCHS  # what schedules run over
    total_steps = min(all_steps, cfg.SOLVER.MAX_STEPS or all_steps)

    learner = Learner(cfg, device, log.info, resumes=found is not None)
    state = found[1] if found else {}
    step = process_group.on_every_rank(lambda: learner.load(state)) if state else 0
    if distributed.world_size() > 1:  # ranks of different weights would average their gradients without a word
        process_group.refuse_disagreement(
            (step, len(data), learner.digest()), "(step, training images, digest of the weights)"
        )
    if state.get("steps_per_epoch", steps_per_epoch) != steps_per_epoch:
        raise UserError(
            f"{output_dir} was begun with {state['steps_per_epoch']} steps per epoch, but {cfg.DATA.TRAIN} now gives "
            f"{steps_per_epoch}: its images have changed; bring the same ones back, or choose another OUTPUT_DIR"
        )
    metrics: MetricsWriter | None = None  # rank 0 writes

    def open_folder() -> None:
        nonlocal metrics
        if not found:
            _clear(output_dir)
            atomic_write(output_dir / "config.yaml", dump(cfg))
        write_environment(output_dir)
        metrics = MetricsWriter(output_dir, step)

    process_group.on_first_rank(open_folder)
    if found:
        log.info(f"resumed from {found[0].name} at step {step} of {total_steps}")
        found, state = None, {}  # a checkpoint's worth of memory
    if step >= total_steps:
        results_file = output_dir / "results.json"
        results = process_group.on_first_rank(lambda: read_json(results_file) if results_file.is_file() else None)
        if results:
            log.info(f"{output_dir} is complete; nothing to do")
            return results

    probe_data = knn.open_data(cfg, data, log.info)
    progress = Progress(total_steps, step, cfg.SOLVER.IMS_PER_BATCH, log, distributed.is_main(), cfg.METHOD.NAME)
    if _probe_is_due(step, cfg, steps_per_epoch, total_steps):  # stopped between this checkpoint and its kNN?
        missing = metrics is not None and not metrics.holds(step - 1, "knn_top1")
        if distributed.mean_(torch.full((), float(missing), device=device)) > 0:
            with progress.paused():
                _probe(learner, probe_data, cfg, device, step, steps_per_epoch, metrics, log.info)
    while step < total_steps:
        epoch = step // steps_per_epoch
        batches = iter(loader.epoch(epoch, step % steps_per_epoch))
        while step < min((epoch + 1) * steps_per_epoch, total_steps):
            waiting = time.perf_counter()
            batch = next(batches)
            progress.waited(time.perf_counter() - waiting)
            lr = _set_learning_rate(learner.optimizer, cfg, step, steps_per_epoch)
            objective = learner.step(batch, step, step / all_steps, epoch, lr, data)
            step += 1
            progress.advance()
            if step % cfg.SOLVER.LOG_PERIOD == 0 or step == total_steps:
                share = len(batch.index_N) / cfg.SOLVER.IMS_PER_BATCH
                values, corrupt, waited = _over_ranks(
                    {"loss": objective.loss.detach(), **objective.metrics}, share, loader.corrupt_count, progress
                )
                rates = progress.rates(waited)
                if metrics is not None:
                    notes = {"corrupt_images": corrupt} if corrupt else {}
                    notes |= learner.precision()
                    metrics.write(step - 1, {**values, "lr": lr, "epoch": step / steps_per_epoch, **notes, **rates})
                    progress.report(f"loss {values['loss']:.4f}  lr {lr:.3g}", rates, force=step == total_steps)
            stop = learner.stop_agreed()
            period = cfg.SOLVER.CHECKPOINT_PERIOD or steps_per_epoch
            probe_due = _probe_is_due(step, cfg, steps_per_epoch, total_steps)
            if stop or probe_due or step % period == 0 or step == total_steps:
                learner.check_finite()
                with progress.paused():
                    _save(learner, output_dir, cfg, step, steps_per_epoch)
            if stop and step < total_steps:
                progress.close()
                raise interrupt.Stopped(f"{stop}: checkpoint of step {step} is in {output_dir}")
        if _probe_is_due(step, cfg, steps_per_epoch, total_steps):
            with progress.paused():
                _probe(learner, probe_data, cfg, device, step, steps_per_epoch, metrics, log.info)
    progress.close()

    knn_score = knn.evaluate(learner.encoder, probe_data, cfg, device)
    results = {"stage": "pretrain", "method": cfg.METHOD.NAME, "arch": cfg.MODEL.ARCH, "epochs": step / steps_per_epoch,
               "steps": step, "metrics": {f"knn_{k}": v for k, v in knn_score.items()}}  # fmt: skip
    if probe_data:
        results["knn_protocol"] = knn.protocol(cfg, probe_data)
    if cfg.SOLVER.AMP == "fp16":
        results["skipped_steps"] = learner.skipped_steps
        if learner.skipped_steps:
            log.info(f"fp16: {learner.skipped_steps} of {step} steps were skipped, as their gradients overflowed")

    def finish() -> None:
        assert metrics is not None
        if knn_score and not metrics.holds(step - 1, "knn_top1"):  # a run killed after this line has it already
            metrics.write(step - 1, results["metrics"])
            log.info(f"kNN top-1 {knn_score['top1']:.2f} ({knn_score['train_images']} images, k {cfg.PROBE.KNN_K})")
        metrics.close()
        checkpoint.save(output_dir / checkpoint.FINAL, learner.state(cfg, step, steps_per_epoch))
        for path in output_dir.glob("checkpoint_[0-9]*.pth"):
            path.unlink()
        write_json(output_dir / "results.json", results)
        log.info(f"done: {output_dir / checkpoint.FINAL}")

    process_group.on_first_rank(finish)
    return results


def _find_checkpoint(cfg: CfgNode, output_dir: Path, warn: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
    """The newest good checkpoint, which rank 0 chooses, and its content, which every rank reads; None: a fresh start.

    Raises:
        UserError: a rank cannot read it, or it is not of a run of ``cfg``.
    """

    def choose() -> Path | None:
        found = checkpoint.newest(output_dir, warn)
        return found[0] if found else None

    path = process_group.on_first_rank(choose)
    if path is None:
        return None

    def read() -> dict[str, Any]:
        state = checkpoint.read(path)
        if not isinstance(state.get("config"), str):
            raise UserError(f"{path} keeps no config, so no run of pretraining wrote it; choose another OUTPUT_DIR")
        _check_same_run(cfg, from_yaml_text(state["config"], f"the config in {path}"), output_dir)
        return state

    return path, process_group.on_every_rank(read)


def _clear(output_dir: Path) -> None:
    """Removes what a run that left no checkpoint wrote: it would pass for this run's."""
    for name in ("results.json", "metrics.json", "events.out.tfevents.*"):
        for path in output_dir.glob(name):
            path.unlink()


def _probe_is_due(step: int, cfg: CfgNode, steps_per_epoch: int, total_steps: int) -> bool:
    """True at the end of every PROBE.KNN_PERIOD epochs but the last, which has its own."""
    period = cfg.PROBE.KNN_PERIOD * steps_per_epoch
    return bool(period) and 0 < step < total_steps and step % period == 0


def _probe(
    learner: Learner,
    data: ProbeData | None,
    cfg: CfgNode,
    device: torch.device,
    step: int,
    steps_per_epoch: int,
    metrics: MetricsWriter | None,
    say: Callable[[str], None],
) -> None:
    score = knn.evaluate(learner.encoder, data, cfg, device)
    if score and metrics is not None:
        metrics.write(step - 1, {f"knn_{k}": v for k, v in score.items()})
        say(f"epoch {step // steps_per_epoch}: kNN top-1 {score['top1']:.2f}")


def _set_learning_rate(optimizer: torch.optim.Optimizer, cfg: CfgNode, step: int, steps_per_epoch: int) -> float:
    solver = cfg.SOLVER
    lr = schedule.learning_rate(
        step, steps_per_epoch, solver.EPOCHS, base_lr=solver.BASE_LR, kind=solver.LR_SCHEDULE, milestones=solver.STEPS,
        gamma=solver.GAMMA, warmup_epochs=solver.WARMUP_EPOCHS, per_step=solver.PER_STEP_LR,
    )  # fmt: skip
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def _over_ranks(
    values: dict[str, Tensor], share: float, corrupt: int, progress: Progress
) -> tuple[dict[str, float], int, float]:
    """Means over the global batch, corrupt images in total, and the seconds the slowest rank waited for its data.

    Args:
        values: means over this rank's images.
        share: this rank's images per image of the global batch.
    """
    device = next(iter(values.values())).device
    here = torch.tensor([share, corrupt, progress.seconds_waited], device=device)
    row = torch.cat([here, torch.stack([v.float() for v in values.values()])])
    rows = distributed.gather(row[None], [1] * distributed.world_size()).tolist()
    shares, corrupts, waits, *columns = zip(*rows, strict=True)
    means = [sum(share * value for share, value in zip(shares, column, strict=True)) for column in columns]
    return dict(zip(values, means, strict=True)), round(sum(corrupts)), max(waits)


def _save(learner: Learner, output_dir: Path, cfg: CfgNode, step: int, steps_per_epoch: int) -> None:
    """Rank 0 writes; no rank goes on, or leaves, before it has."""

    def write() -> None:
        path = checkpoint.path_of_step(output_dir, step)
        checkpoint.save(path, learner.state(cfg, step, steps_per_epoch))
        checkpoint.prune(output_dir, cfg.SOLVER.CHECKPOINT_KEEP, path)

    process_group.on_first_rank(write)


def _check_same_run(cfg: CfgNode, earlier_cfg: CfgNode, output_dir: Path) -> None:
    """Refuses to continue a run under another config: the result would be neither."""
    earlier = dict(flatten(earlier_cfg))
    changed = [f"{key} {earlier.get(key)!r} -> {value!r}" for key, value in flatten(cfg)
               if earlier.get(key) != value and not key.startswith(FREE_ON_RESUME)]  # fmt: skip
    if changed:
        raise UserError(f"{output_dir} holds a run of another config ({'; '.join(changed)}); choose another OUTPUT_DIR")
