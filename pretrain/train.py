"""Pretraining, from config to run folder. Read it from top to bottom.

One process per device; the process group comes from the environment (torchrun, or tools/launch.py). Every random number
is a function of (seed, epoch, image, view) or (seed, step), so a resumed run equals an uninterrupted one.
"""

import contextlib
import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import Tensor

from .common import distributed, interrupt
from .common.errors import UserError, count_noun
from .common.files import remove, sha256, write_json
from .common.ranks import process_group
from .common.ranks.agreement import AgreedStop, check_agreement, on_every_rank, on_first_rank
from .common.run import file_names
from .common.run.garbage import GarbageCollector
from .common.run.metrics import MetricsWriter
from .common.run.progress import Progress, reduce_metrics
from .common.run.skipped_steps import describe_skipped_steps
from .common.run.stage import open_run
from .common.run.state import RunContext, read_json_or_empty
from .common.weights import checkpoint
from .common.weights.file import compute_tensor_digest
from .data import datasets
from .data.augmentations import AUGMENTATIONS
from .data.loader import Loader, build_loader
from .methods import METHODS
from .model.batch_split import log_left_out
from .monitor import TrainingMonitor
from .optim import set_learning_rate
from .probe import knn, rankme
from .probe.data import ProbeData
from .probe.protocol import build_knn_protocol
from .run_folder import prepare_folder
from .state import TrainState, build_train_state, load_checkpoint_to_resume
from .steps import training_step

log = logging.getLogger(__name__)
_MEMORY_REMEDY = "raise SOLVER.ACCUMULATE, use half precision (SOLVER.AMP)"
_NUM_TO_RESUME = 2  # checkpoints: the newest may be damaged


@dataclasses.dataclass(frozen=True)
class PretrainRun:
    """Everything that a pretraining run uses while it trains."""

    cfg: CfgNode
    folder: Path
    device: torch.device
    loader: Loader
    total_steps: int
    stop: AgreedStop
    state: TrainState
    monitor: TrainingMonitor
    metrics: MetricsWriter | None  # None on ranks other than 0, which do not write
    probe_data: ProbeData | None
    progress: Progress
    garbage: GarbageCollector

    def is_probe_due(self, step: int) -> bool:
        """Return True at the end of every PROBE.KNN_PERIOD epochs except the last, which has its own probe."""
        period = self.cfg.PROBE.KNN_PERIOD * self.state.steps_per_epoch
        return bool(period) and 0 < step < self.total_steps and step % period == 0


def main(cfg: CfgNode, *, context: RunContext | None = None) -> dict[str, Any]:
    """Pretrain according to ``cfg`` and return the content of results.json.

    A folder that contains checkpoints of the same config is resumed; a complete run is returned unchanged.

    Args:
        context: what this process was started with, such as the request to stop it.

    Raises:
        UserError: bad input, non-finite loss, full disk, a run folder in use, or created by another stage.
        interrupt.Stopped: a stop was requested; the checkpoint is written.
    """
    folder = Path(cfg.OUTPUT_DIR)
    context = context or RunContext()
    with open_run("pretrain", folder, context, cfg.DEVICE, cfg.FLOAT32_PRECISION, _MEMORY_REMEDY) as (device, stop):
        checkpoint_path, saved = load_checkpoint_to_resume(cfg, folder)
        data = on_every_rank(_load_images, cfg)
        loader = _build_loader(cfg, data, device)
        state = build_train_state(cfg, device, len(loader), data.digest(), read_weights=not saved)
        if saved:
            on_every_rank(state.load_state_dict, saved)
        if distributed.world_size() > 1:
            _check_same_start(state)
        step = state.step
        schedule_steps = len(loader) * cfg.SOLVER.EPOCHS
        total_steps = max(step, min(schedule_steps, cfg.SOLVER.MAX_STEPS or schedule_steps))
        results = on_first_rank(read_json_or_empty, folder / file_names.RESULTS) if step == total_steps else {}
        if results:
            log.info(f"{folder} is complete; nothing to do")
            return results

        on_first_rank(prepare_folder, cfg, folder, loader, checkpoint_path, step)
        if checkpoint_path:
            log.info(f"resumed from {checkpoint_path.name} at step {step} of {total_steps}")
            for change in state.recipe_changes:
                log.warning(f"the recipe was changed after {change}")
        run = PretrainRun(
            cfg=cfg,
            folder=folder,
            device=device,
            loader=loader,
            total_steps=total_steps,
            stop=stop,
            state=state,
            monitor=TrainingMonitor(device, state.scaler, data.image_name, state.skipped),
            metrics=on_every_rank(_open_metrics, folder, step),
            probe_data=knn.open_data(cfg, data),
            progress=Progress(total_steps, step, cfg.SOLVER.IMS_PER_BATCH, cfg.METHOD.NAME),
            garbage=GarbageCollector(),
        )
        with contextlib.closing(run.progress), run.garbage:
            if run.is_probe_due(step):  # the run may have been stopped between a checkpoint and its kNN
                _probe(run, step)
            _train(run, step)
        return _finish(run)


def _train(run: PretrainRun, first_step: int) -> None:
    """Train to the last step; `steps` names everything that a step changes."""
    solver = run.cfg.SOLVER
    steps_per_epoch = run.state.steps_per_epoch
    checkpoint_period = solver.CHECKPOINT_PERIOD or steps_per_epoch
    batches = run.progress.measure_waits(run.loader.batches(first_step, run.total_steps, run.stop.request))
    processes = distributed.world_size()
    batches = interrupt.save_before_stop(batches, lambda steps: _check_and_save(run, first_step + steps), processes)
    for step, batch in batches:
        lr = set_learning_rate(run.state.optimizer, solver, step, steps_per_epoch)
        views_VnCHW = batch.views_VnCHW.to(run.device, non_blocking=True).contiguous()
        loss, metrics = training_step(run.state, batch._replace(views_VnCHW=views_VnCHW), step)
        steps_done = step + 1
        run.state.step = steps_done
        run.monitor.watch(loss, steps_done, lr, batch.index_n)
        run.progress.advance()
        run.garbage.count_step()
        if step == first_step:
            process_group.shorten_timeout()

        is_last = steps_done == run.total_steps
        if steps_done % solver.LOG_PERIOD == 0 or is_last:
            _log(run, steps_done, lr, {"loss": loss, **metrics})
        stop_reason = run.stop.poll()
        is_probe_due = run.is_probe_due(steps_done)
        if stop_reason or is_probe_due or is_last or steps_done % checkpoint_period == 0:
            _check_and_save(run, steps_done)
        if stop_reason and not is_last:
            raise interrupt.Stopped(stop_reason, interrupt.describe_resume(run.folder, steps_done))
        if is_probe_due:
            with run.garbage.automatic():
                _probe(run, steps_done)


def _load_images(cfg: CfgNode) -> datasets.ImageData:
    """Load the training images; raise UserError if METHOD.LABELS needs classes that they do not have."""
    data = datasets.load(cfg.DATA.TRAIN, "train", cfg.DATA.ROOT, cfg.DATA.DOWNLOAD)
    if cfg.METHOD.LABELS == "class" and data.count_classes() < 2:
        classes = count_noun(data.count_classes(), "class", "classes")
        problem = f"METHOD.LABELS is class, but {cfg.DATA.TRAIN} has labels of {classes}"
        raise UserError(f"{problem}; provide at least two class folders, or set METHOD.LABELS index")
    return data


def _build_loader(cfg: CfgNode, data: datasets.ImageData, device: torch.device) -> Loader:
    """Build the loader; log the size of the data set, and warn if the queue often has keys of the query's own image."""
    augmentations = [AUGMENTATIONS[cfg.VIEWS.QUERY]] + [AUGMENTATIONS[cfg.VIEWS.KEY]] * cfg.METHOD.NUM_KEYS
    batch_size = cfg.SOLVER.IMS_PER_BATCH
    loader = build_loader(cfg, data, augmentations, device, size=cfg.VIEWS.IMAGE_SIZE, batch_size=batch_size)
    classes = f" in {count_noun(len(data.classes), 'class', 'classes')}" if data.classes else ""
    queue_size = cfg.MODEL.QUEUE_SIZE
    if distributed.is_first_rank():
        steps = f"{count_noun(len(loader), 'step')} of {batch_size} per epoch"
        log.info(f"{count_noun(len(data), 'image')}{classes}: {steps}")
        parts = distributed.world_size() * cfg.SOLVER.ACCUMULATE
        bn_groups = cfg.MODEL.BN_GROUPS or 2 - batch_size % 2  # an even batch has two BN groups or more
        divisor = math.lcm(parts, bn_groups)
        log_left_out("SOLVER.IMS_PER_BATCH", len(data), batch_size, divisor)
        if METHODS[cfg.METHOD.NAME].kind == "queue" and 2 * queue_size > len(data):
            problem = f"MODEL.QUEUE_SIZE {queue_size} spans {queue_size / len(data):.1f} epochs of keys"
            reason = "so the negatives of many queries contain a key of the same image"
            log.warning(f"{problem}, {reason}; lower it to at most {len(data) // 2}, half the number of images")
    return loader


def _check_same_start(state: TrainState) -> None:
    """Check that all ranks start from the same step, images and weights: DDP would silently average other gradients."""
    start = (state.step, state.images_digest, compute_tensor_digest(*state.objective.model.state_dict().values()))
    check_agreement(start, "(step, digest of the images' names and labels, of the weights)")


def _open_metrics(folder: Path, step: int) -> MetricsWriter | None:
    return MetricsWriter(folder, step) if distributed.is_first_rank() else None


def _log(run: PretrainRun, steps_done: int, lr: float, values: dict[str, Tensor]) -> None:
    means, seconds_waited, memory = reduce_metrics(values, run.progress.seconds_waited)
    rates = run.progress.take_rates(seconds_waited) | memory
    if run.metrics is None:
        return
    epoch = steps_done / run.state.steps_per_epoch
    skipped = run.state.skipped.metrics() if run.state.scaler.is_enabled() else {}
    run.metrics.write(steps_done - 1, {**means, "lr": lr, "epoch": epoch, **skipped, **rates})
    for line in run.monitor.find_warnings(steps_done, epoch, means):
        log.warning(line)
    run.progress.report(f"loss {means['loss']:.4f}  lr {lr:.3g}", rates, force=steps_done == run.total_steps)


def _check_and_save(run: PretrainRun, steps_done: int) -> None:
    """Write a checkpoint if the losses are finite; no rank continues or exits before the file is complete."""
    run.monitor.check()
    with run.progress.pause():
        on_first_rank(_save, run, steps_done)


def _save(run: PretrainRun, steps_done: int) -> None:
    number = run.cfg.SOLVER.CHECKPOINT_KEEP or _NUM_TO_RESUME
    checkpoint.save_step(run.folder, steps_done, run.state.state_dict(), number)


def _probe(run: PretrainRun, steps_done: int) -> dict[str, float]:
    """Evaluate the encoder by RankMe, and by kNN if there are labeled data; write and return the metrics."""
    network = run.state.objective.encoder.network
    with run.progress.pause():
        score = knn.evaluate(network, run.probe_data, run.cfg, run.stop, run.device)
        rank = rankme.evaluate(network, run.loader.data, run.cfg, run.stop, run.device)
    metrics = {**{f"knn_{name}": value for name, value in score.items()}, **rank}
    if metrics and run.metrics is not None:
        run.metrics.write(steps_done - 1, metrics)
        texts = [f"kNN top-1 {score['top1']:.2f} ({knn.describe(run.cfg, score)})"] if score else []
        if rank:
            most = min(run.cfg.MODEL.EMBEDDING_DIM, rank["rankme_images"])
            texts.append(f"RankMe {rank['rankme']:.1f} of at most {most} ({rank['rankme_images']} training images)")
        log.info(f"epoch {steps_done / run.state.steps_per_epoch:g}: {', '.join(texts)}")
    return metrics


def _finish(run: PretrainRun) -> dict[str, Any]:
    """Run the last probe; write what marks the run as complete (`_write_results`), and return results.json."""
    cfg = run.cfg
    results = {
        "stage": "pretrain",
        "method": cfg.METHOD.NAME,
        "arch": cfg.MODEL.ARCH,
        "epochs": run.total_steps / run.state.steps_per_epoch,
        "steps": run.total_steps,
        "metrics": _probe(run, run.total_steps),
    }
    if run.state.recipe_changes:
        results["recipe_changes"] = run.state.recipe_changes
    if run.probe_data:
        results["knn_protocol"] = build_knn_protocol(cfg, run.probe_data)
    if cfg.SOLVER.AMP == "fp16":
        results["skipped_steps"] = run.state.skipped.total
        if run.state.skipped.total:
            log.info(describe_skipped_steps(run.state.skipped.total, run.total_steps))
    return on_first_rank(_write_results, run, results)


def _write_results(run: PretrainRun, results: dict[str, Any]) -> dict[str, Any]:
    """Write the final checkpoint, which replaces numbered ones, and at the end results.json; return its content."""
    assert run.metrics is not None
    run.metrics.close()
    path = run.folder / checkpoint.FINAL
    checkpoint.save(path, run.state.state_dict())
    results["checkpoint_sha256"] = sha256(path)  # identifies this run in files derived from it
    for numbered in run.folder.glob(checkpoint.NUMBERED):
        if not run.cfg.SOLVER.CHECKPOINT_KEEP or numbered == checkpoint.path_of_step(run.folder, run.total_steps):
            remove(numbered)
    write_json(run.folder / file_names.RESULTS, results)
    log.info(f"done: {path}")
    return results
