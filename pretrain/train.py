"""The pretraining stage, from config to run folder; it reads from top to bottom.

One process per device; the process group comes from the environment (torchrun, or tools/launch.py). Every random number
is a function of (seed, epoch, image, view) or (seed, step), so a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor

from .common import distributed, interrupt
from .common.device import describe
from .common.errors import UserError
from .common.files import atomic_write, read_json, remove, sha256, write_json
from .common.logs import setup_logging
from .common.run.folder import write_environment
from .common.run.metrics import MetricsWriter
from .common.run.progress import Progress, reduce_metrics
from .common.run.skipped_steps import summary
from .common.run.stage import stage
from .common.weights import checkpoint
from .common.weights.file import tensor_digest
from .config import run_folder
from .data import datasets, view_grid
from .data.loader import Loader, build_loader
from .data.recipes import RECIPES
from .methods import METHODS
from .model.objectives import build_objective
from .monitor import TrainingMonitor
from .optim import build_optimizer, set_learning_rate
from .preflight import check_modules_unchanged
from .probe import knn
from .probe.data import ProbeData
from .probe.protocol import protocol
from .state import find_checkpoint, from_checkpoint, to_checkpoint
from .steps import TrainState, training_step

log = logging.getLogger(__name__)
_IMAGES_SHOWN, _VIEWS_SHOWN = 6, 8  # in views.png


@dataclasses.dataclass(frozen=True)
class _Run:
    """What the functions of this file share."""

    cfg: CfgNode
    folder: Path
    device: torch.device
    log: logging.Logger
    loader: Loader
    images: str  # `ImageData.digest` of the training images
    total_steps: int
    training: TrainState
    watch: TrainingMonitor
    metrics: MetricsWriter | None  # None on ranks other than 0, which do not write
    probe_data: ProbeData | None
    progress: Progress
    recipe_changes: list[str]  # what SOLVER.CHANGE_RECIPE has changed so far, and after which step

    @property
    def steps_per_epoch(self) -> int:
        return len(self.loader)

    def probe_due(self, step: int) -> bool:
        """True at the end of every PROBE.KNN_PERIOD epochs except the last, which has its own probe."""
        period = self.cfg.PROBE.KNN_PERIOD * self.steps_per_epoch
        return bool(period) and 0 < step < self.total_steps and step % period == 0


def main(cfg: CfgNode) -> dict[str, Any]:
    """Pretrains as ``cfg`` says and returns the content of results.json.

    A folder that holds checkpoints of the same config is resumed; one that is complete is left as it is.

    Raises:
        UserError: bad input, non-finite loss, full disk, a folder that is in use or another stage's.
        interrupt.Stopped: a stop was requested; the checkpoint is written.
    """
    output_dir = run_folder(cfg)
    with stage("pretrain", output_dir, lambda: distributed.init(cfg.DEVICE)) as device:
        setup_logging(output_dir, distributed.rank())
        log.info(describe(device))
        run, step, results = _open(cfg, output_dir, device, log)
        if results:
            log.info(f"{output_dir} is complete; nothing to do")
            return results
        if run.probe_due(step) and distributed.on_first_rank(lambda: not _is_probed(run, step)):
            _probe(run, step)  # the run was stopped between a checkpoint and its kNN
        _train(run, step)
        return _finish(run)


def _train(run: _Run, first_step: int) -> None:
    """The training loop; `steps` names everything that a step changes."""
    cfg, watch, agreed_stop = run.cfg, run.watch, distributed.AgreedStop(run.device)
    total = run.total_steps
    for step, batch in run.progress.measure_waits(run.loader.batches(first_step, total)):
        lr = set_learning_rate(run.training.optimizer, cfg.SOLVER, step, run.steps_per_epoch)
        views_VNCHW = batch.views_VNCHW.to(run.device, non_blocking=True).contiguous()
        loss, metrics = training_step(run.training, batch._replace(views_VNCHW=views_VNCHW), step)
        watch.step(loss, step, lr, batch.index_N)
        run.progress.advance()

        done = step + 1
        if done % cfg.SOLVER.LOG_PERIOD == 0 or done == total:
            _log(run, done, lr, {"loss": loss, **metrics})
        stop, probe_due = agreed_stop.poll(), run.probe_due(done)
        if stop or probe_due or done == total or done % (cfg.SOLVER.CHECKPOINT_PERIOD or run.steps_per_epoch) == 0:
            watch.check()
            _save(run, done)
        if stop and done < total:
            run.progress.close()
            raise interrupt.Stopped(stop, interrupt.resume_hint(run.folder, done))
        if probe_due:
            _probe(run, done)
    run.progress.close()


def _open(
    cfg: CfgNode, folder: Path, device: torch.device, log: logging.Logger
) -> tuple[_Run, int, dict[str, Any] | None]:
    """Opens the data, builds what is trained and opens the run folder, which all ranks agree on.

    Returns:
        The run, the step to continue from, and the results if the run is complete.
    """
    distributed.on_every_rank(lambda: check_modules_unchanged(cfg))
    resumed = find_checkpoint(cfg, folder)
    data = distributed.on_every_rank(lambda: _open_data(cfg))
    recipes = [RECIPES[cfg.VIEWS.QUERY]] + [RECIPES[cfg.VIEWS.KEY]] * cfg.METHOD.NUM_KEYS
    size = cfg.VIEWS.IMAGE_SIZE
    loader = build_loader(cfg, data, recipes, device, size=size, batch_size=cfg.SOLVER.IMS_PER_BATCH)
    if distributed.is_main():
        _describe(cfg, data, len(loader), log)
    images, all_steps = data.digest(), len(loader) * cfg.SOLVER.EPOCHS
    total_steps = min(all_steps, cfg.SOLVER.MAX_STEPS or all_steps)
    objective = build_objective(cfg, device, len(loader), read_weights=resumed is None)
    scaler = torch.amp.GradScaler(device.type, enabled=cfg.SOLVER.AMP == "fp16")
    training = TrainState(objective, build_optimizer(objective.encoder, cfg.SOLVER), scaler)
    step, state = 0, resumed[1] if resumed else {}
    if resumed:
        step = distributed.on_every_rank(lambda: from_checkpoint(training, state, log.info))
        total_steps = max(step, total_steps)
    if distributed.world_size() > 1:  # gradients of ranks with different weights would be averaged without an error
        start = (step, images, tensor_digest(*objective.model.state_dict().values()))
        distributed.check_agreement(start, "(step, digest of the images' names and labels, of the weights)")
    if state.get("images", images) != images:
        raise UserError(
            f"the images of {cfg.DATA.TRAIN} are not those with which {folder} was started: names or labels have "
            "changed; restore the original ones, or choose another OUTPUT_DIR"
        )

    newest = resumed[0] if resumed else None
    picture = functools.partial(view_grid.draw, data, recipes[:_VIEWS_SHOWN], size, _IMAGES_SHOWN, cfg.SEED)
    results = distributed.on_first_rank(lambda: _open_folder(cfg, folder, newest, step, step < total_steps, picture))
    metrics = distributed.on_every_rank(lambda: MetricsWriter(folder, step) if distributed.is_main() else None)
    if resumed:
        log.info(f"resumed from {resumed[0].name} at step {step} of {total_steps}")
        for change in state["recipe_changes"]:
            log.warning(f"the recipe was changed after {change}")
    run = _Run(
        cfg, folder, device, log, loader, images, total_steps, training,
        TrainingMonitor(device, scaler, data.image_name, int(state.get("skipped_steps", 0))),
        metrics, None if results else knn.open_data(cfg, data),
        Progress(total_steps, step, cfg.SOLVER.IMS_PER_BATCH, cfg.METHOD.NAME),
        state.get("recipe_changes", []),
    )  # fmt: skip
    return run, step, results


def _open_folder(
    cfg: CfgNode, folder: Path, newest: Path | None, step: int, goes_on: bool, picture: Callable[[], np.ndarray]
) -> dict[str, Any] | None:
    """Writes what a run folder has from its start; returns the results if the run is complete.

    Args:
        newest: the checkpoint that is resumed, of ``step``; None: a fresh start.
    """
    results_file = folder / "results.json"
    if goes_on:
        atomic_write(folder / "config.yaml", cfg.dump())
    if newest and goes_on:  # complete under a lower MAX_STEPS: later checkpoints must count as newer
        remove(results_file)
        if newest.name == checkpoint.FINAL:
            newest.replace(checkpoint.path_of_step(folder, step))
    if not newest:
        for name in ("results.json", "metrics.json", "events.out.tfevents.*"):  # of a run without a checkpoint
            for path in folder.glob(name):
                remove(path)
        view_grid.write(folder / "views.png", picture())
    write_environment(folder)
    return read_json(results_file) if not goes_on and results_file.is_file() else None


def _open_data(cfg: CfgNode) -> datasets.ImageData:
    data = datasets.load(cfg.DATA.TRAIN, "train", cfg.DATA.ROOT, cfg.DATA.DOWNLOAD)
    if cfg.METHOD.LABELS == "class" and data.class_count() < 2:
        raise UserError(
            f"METHOD.LABELS is class, but {cfg.DATA.TRAIN} has labels of {data.class_count()} classes; use one folder "
            "per class, two or more, or index"
        )
    return data


def _describe(cfg: CfgNode, data: datasets.ImageData, steps_per_epoch: int, log: logging.Logger) -> None:
    """Logs what is trained on, and warns of a queue in which the query's own image is often among the negatives."""
    classes = f" in {len(data.classes)} classes" if data.classes else ""
    log.info(f"{len(data):,} images{classes}: {steps_per_epoch:,} steps of {cfg.SOLVER.IMS_PER_BATCH} per epoch")
    size = cfg.MODEL.QUEUE_SIZE
    if METHODS[cfg.METHOD.NAME].kind == "queue" and 2 * size > len(data):
        log.warning(
            f"MODEL.QUEUE_SIZE {size} holds the keys of {size / len(data):.1f} epochs: many queries find an earlier "
            "key of their own image among the negatives; lower it to at most half of the images"
        )


def _log(run: _Run, done: int, lr: float, values: dict[str, Tensor]) -> None:
    means, waited = reduce_metrics(values, run.progress.seconds_waited)
    rates = run.progress.rates(waited)
    if run.metrics is None:
        return
    epoch, fp16 = done / run.steps_per_epoch, run.training.scaler.is_enabled()
    skipped = run.watch.skipped.values() if fp16 else {}
    run.metrics.write(done - 1, {**means, "lr": lr, "epoch": epoch, **skipped, **rates})
    for line in run.watch.warnings(done, epoch, means):
        run.log.warning(line)
    run.progress.report(f"loss {means['loss']:.4f}  lr {lr:.3g}", rates, force=done == run.total_steps)


def _save(run: _Run, done: int) -> None:
    """Writes a checkpoint on rank 0; no rank continues or exits before it is complete."""

    def write() -> None:
        path = checkpoint.path_of_step(run.folder, done)
        checkpoint.save(path, _state(run, done))
        checkpoint.prune(run.folder, run.cfg.SOLVER.CHECKPOINT_KEEP, path)

    with run.progress.pause():
        distributed.on_first_rank(write)


def _state(run: _Run, done: int) -> dict[str, Any]:
    state = to_checkpoint(run.training, run.cfg, done, run.steps_per_epoch, run.watch.skipped.total)
    return {**state, "images": run.images, "recipe_changes": run.recipe_changes}


def _is_probed(run: _Run, done: int) -> bool:
    return run.metrics is not None and run.metrics.holds(done - 1, "knn_top1")


def _probe(run: _Run, done: int) -> None:
    with run.progress.pause():
        score = knn.evaluate(run.training.objective.encoder, run.probe_data, run.cfg, run.device)
    if score and run.metrics is not None:
        run.metrics.write(done - 1, {f"knn_{k}": v for k, v in score.items()})
        run.log.info(f"epoch {done // run.steps_per_epoch}: kNN top-1 {score['top1']:.2f}")


def _finish(run: _Run) -> dict[str, Any]:
    """Runs the last kNN and writes the final checkpoint and results.json, which says that the run is complete."""
    cfg, folder, steps, metrics = run.cfg, run.folder, run.total_steps, run.metrics
    score = knn.evaluate(run.training.objective.encoder, run.probe_data, cfg, run.device)
    results = {"stage": "pretrain", "method": cfg.METHOD.NAME, "arch": cfg.MODEL.ARCH,
               "epochs": steps / run.steps_per_epoch, "steps": steps,
               "metrics": {f"knn_{k}": v for k, v in score.items()}}  # fmt: skip
    if run.recipe_changes:
        results["recipe_changes"] = run.recipe_changes
    if run.probe_data:
        results["knn_protocol"] = protocol(cfg, "knn", run.probe_data)
    if cfg.SOLVER.AMP == "fp16":
        results["skipped_steps"] = skipped = run.watch.skipped.total
        if skipped:
            run.log.info(summary(skipped, steps))

    def write() -> dict[str, Any]:
        assert metrics is not None
        if score and not _is_probed(run, steps):  # a run killed after this line has it
            metrics.write(steps - 1, results["metrics"])
            run.log.info(f"kNN top-1 {score['top1']:.2f} ({knn.describe(cfg, score)})")
        metrics.close()
        checkpoint.save(folder / checkpoint.FINAL, _state(run, steps))
        results["checkpoint_sha256"] = sha256(folder / checkpoint.FINAL)  # names the run in what is made of it
        for path in folder.glob("checkpoint_[0-9]*.pth"):
            remove(path)
        write_json(folder / "results.json", results)
        run.log.info(f"done: {folder / checkpoint.FINAL}")
        return results

    return distributed.on_first_rank(write)
