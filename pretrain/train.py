"""Pretraining, read from top to bottom: config -> run folder.

One process a device; the process group comes from the environment (torchrun, or tools/launch.py). Every random number
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

from . import checkpoint, datasets, distributed, schedule, views
from .common import interrupt
from .common.config_io import dump, flatten
from .common.errors import UserError
from .common.run_folder import MetricsWriter, atomic_write, setup_logging, write_environment, write_json
from .config import from_yaml_text
from .learner import Learner
from .loader import Loader
from .methods import METHODS
from .probe import knn
from .probe.features import ProbeData
from .progress import Progress

# Keys that may change between a run and its continuation: they do not change what is learnt.
_FREE_ON_RESUME = ("OUTPUT_DIR", "DEVICE", "DATA.ROOT", "DATA.DOWNLOAD", "DATALOADER.NUM_WORKERS", "PROBE.", "LINEAR.",
                   "SOLVER.CHECKPOINT_", "SOLVER.LOG_PERIOD", "SOLVER.COMPILE")  # fmt: skip


def main(cfg: CfgNode) -> dict[str, Any]:
    """Pretrains as ``cfg`` says and returns what stands in results.json.

    A folder that holds checkpoints of the same config is resumed; one that is complete is left as it is.

    Raises:
        UserError: bad input, non-finite loss, full disk.
        interrupt.Stopped: a stop was requested; the checkpoint is written.
    """
    output_dir = Path(cfg.OUTPUT_DIR or f"runs/{cfg.METHOD.NAME}_{cfg.MODEL.ARCH}")
    device = distributed.init(cfg.DEVICE)
    log = setup_logging(output_dir, distributed.rank())
    method = METHODS[cfg.METHOD.NAME]
    found = checkpoint.newest(output_dir, warn=log.warning)
    if found:
        _check_same_run(cfg, found[1]["config"], output_dir)

    data = datasets.load(cfg.DATA.TRAIN, "train", cfg.DATA.ROOT, cfg.DATA.DOWNLOAD)
    if cfg.METHOD.LABELS == "class" and method.kind == "batch" and data.labels is None:
        raise UserError(f"METHOD.LABELS is class, but {cfg.DATA.TRAIN} has no labels; use one folder a class, or index")
    recipes = [views.RECIPES[cfg.VIEWS.QUERY]] + [views.RECIPES[cfg.VIEWS.KEY]] * cfg.METHOD.NUM_KEYS
    loader = Loader(
        data, recipes, cfg.VIEWS.IMAGE_SIZE, batch_size=cfg.SOLVER.IMS_PER_BATCH, seed=cfg.SEED,
        rank=distributed.rank(), world_size=distributed.world_size(), num_workers=cfg.DATALOADER.NUM_WORKERS,
        on_corrupt=cfg.DATALOADER.ON_CORRUPT, executor=cfg.VIEWS.EXECUTOR, pin_memory=device.type == "cuda",
    )  # fmt: skip
    steps_per_epoch = len(loader)
    total_steps = steps_per_epoch * cfg.SOLVER.EPOCHS
    if cfg.SOLVER.MAX_STEPS:
        total_steps = min(total_steps, cfg.SOLVER.MAX_STEPS)

    if found and found[1].get("steps_per_epoch", steps_per_epoch) != steps_per_epoch:
        raise UserError(
            f"{output_dir} was begun with {found[1]['steps_per_epoch']} steps an epoch, but {cfg.DATA.TRAIN} now gives "
            f"{steps_per_epoch}: its images have changed; bring the same ones back, or choose another OUTPUT_DIR"
        )
    learner = Learner(cfg, device, log.info)
    step = learner.load(found[1]) if found else 0
    resumed = found is not None
    if found:
        log.info(f"resumed from {found[0].name} at step {step} of {total_steps}")
        del found  # a checkpoint's worth of memory
    metrics: MetricsWriter | None = None  # rank 0 writes
    if distributed.is_main():
        if not resumed:
            atomic_write(output_dir / "config.yaml", dump(cfg))
        write_environment(output_dir)
        metrics = MetricsWriter(output_dir, step)
    distributed.barrier()
    if step >= total_steps and (output_dir / "results.json").is_file():
        log.info(f"{output_dir} is complete; nothing to do")
        return _read_json(output_dir / "results.json")

    probe_data = knn.open_data(cfg, data, log.info)
    progress = Progress(total_steps, step, cfg.SOLVER.IMS_PER_BATCH, log, distributed.is_main(), cfg.METHOD.NAME)
    if _probe_is_due(step, cfg, steps_per_epoch, total_steps):  # stopped between this checkpoint and its kNN?
        missing = metrics is not None and not metrics.holds(step - 1, "knn_top1")
        if distributed.mean_(torch.full((), float(missing), device=device)) > 0:
            _probe(learner, probe_data, cfg, device, step, steps_per_epoch, metrics, log.info)
    while step < total_steps:
        epoch = step // steps_per_epoch
        batches = iter(loader.epoch(epoch, step % steps_per_epoch))
        while step < min((epoch + 1) * steps_per_epoch, total_steps):
            waiting = time.perf_counter()
            batch = next(batches)
            progress.waited(time.perf_counter() - waiting)
            lr = _set_learning_rate(learner.optimizer, cfg, step, steps_per_epoch)
            objective = learner.step(batch, step, step / total_steps, epoch, lr, data)
            step += 1
            progress.advance()
            if step % cfg.SOLVER.LOG_PERIOD == 0 or step == total_steps:
                values = _mean_over_ranks({"loss": objective.loss.detach(), **objective.metrics})
                rates = progress.rates()
                if metrics is not None:
                    corrupt = {"corrupt_images": loader.corrupt_count} if loader.corrupt_count else {}
                    metrics.write(step - 1, {**values, "lr": lr, "epoch": step / steps_per_epoch, **corrupt, **rates})
                    progress.report(f"loss {values['loss']:.4f}  lr {lr:.3g}", rates, force=step == total_steps)
            stop = learner.stop_agreed()
            period = cfg.SOLVER.CHECKPOINT_PERIOD or steps_per_epoch
            if stop or step % period == 0 or step == total_steps:
                learner.check_finite()
                _save(learner, output_dir, cfg, step, steps_per_epoch)
            if stop and step < total_steps:
                progress.close()
                raise interrupt.Stopped(f"{stop}: checkpoint of step {step} is in {output_dir}")
        if _probe_is_due(step, cfg, steps_per_epoch, total_steps):
            _probe(learner, probe_data, cfg, device, step, steps_per_epoch, metrics, log.info)
    progress.close()

    knn_score = knn.evaluate(learner.encoder, probe_data, cfg, device)
    results = {"stage": "pretrain", "method": cfg.METHOD.NAME, "arch": cfg.MODEL.ARCH, "epochs": step / steps_per_epoch,
               "steps": step, "metrics": {f"knn_{k}": v for k, v in knn_score.items()}}  # fmt: skip
    if probe_data:
        results["knn_protocol"] = knn.protocol(cfg, probe_data)
    if metrics is not None:
        if knn_score:
            metrics.write(step - 1, results["metrics"])
            log.info(f"kNN top-1 {knn_score['top1']:.2f} ({knn_score['train_images']} images, k {cfg.PROBE.KNN_K})")
        metrics.close()
        checkpoint.save(output_dir / checkpoint.FINAL, learner.state(cfg, step, steps_per_epoch))
        for path in output_dir.glob("checkpoint_[0-9]*.pth"):
            path.unlink()
        write_json(output_dir / "results.json", results)
        log.info(f"done: {output_dir / checkpoint.FINAL}")
    distributed.barrier()
    return results


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


def _mean_over_ranks(values: dict[str, Tensor]) -> dict[str, float]:
    stacked = distributed.mean_(torch.stack([v.float() for v in values.values()]))
    return dict(zip(values, stacked.tolist(), strict=True))


def _save(learner: Learner, output_dir: Path, cfg: CfgNode, step: int, steps_per_epoch: int) -> None:
    if distributed.is_main():
        checkpoint.save(checkpoint.path_of_step(output_dir, step), learner.state(cfg, step, steps_per_epoch))
        checkpoint.prune(output_dir, cfg.SOLVER.CHECKPOINT_KEEP)
    distributed.barrier()


def _check_same_run(cfg: CfgNode, earlier_text: str, output_dir: Path) -> None:
    """Refuses to continue a run under another config: the result would be neither."""
    earlier = dict(flatten(from_yaml_text(earlier_text)))
    changed = [f"{key} {earlier.get(key)!r} -> {value!r}" for key, value in flatten(cfg)
               if earlier.get(key) != value and not key.startswith(_FREE_ON_RESUME)]  # fmt: skip
    if changed:
        raise UserError(f"{output_dir} holds a run of another config ({'; '.join(changed)}); choose another OUTPUT_DIR")


def _read_json(path: Path) -> dict[str, Any]:
    import json

    return json.loads(path.read_text())
