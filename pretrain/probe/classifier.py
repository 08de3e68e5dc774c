"""Training of a classifier as a stage, by itself (linear) or with its backbone (finetune); it resumes exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torchvision.models import ResNet

from .. import distributed, recipes, views
from ..common import checkpoint, interrupt
from ..common.errors import UserError
from ..common.metrics import MetricsWriter
from ..common.process_group import AgreedStop, on_every_rank, on_first_rank
from ..common.run_folder import read_json
from ..datasets import ImageData
from ..encoder import pooled_features
from ..loader import Batch, build_loader
from ..progress import Progress
from ..siamese import autocast
from .data import ProbeData
from .features import load_frozen
from .heads import Heads
from .knn import warning_if_random
from .protocol import check_same_probe, classifier_settings, protocol
from .run import ProbeRun, probe_run

Scores = dict[str, dict[str, float]]  # learning rate -> top1, top5, ...


class Stream(Protocol):
    """What is learned from, a batch at a time."""

    def __len__(self) -> int:
        """Steps per epoch."""
        ...

    def batches(self, first_step: int, total_steps: int) -> Iterator[Any]:
        """As the loader has them."""
        ...

    def features(self, batch: Any) -> tuple[Tensor, Tensor]:
        """(features, labels) of a batch."""
        ...


class Learner(Protocol):
    """What is trained, and how it is scored."""

    @property
    def heads(self) -> Heads: ...

    @property
    def stream(self) -> Stream: ...

    @property
    def scored_every_epoch(self) -> bool:
        """Scoring is cheap; else it is scored once, at the end."""
        ...

    def score(self) -> Scores:
        """Top-1 and top-5 on the validation images (0 to 100) by learning rate."""
        ...


Open = Callable[[ProbeRun, ResNet, dict[str, Any], ProbeData], Learner]


def run_stage(stage: str, cfg: CfgNode, weights: str, open_learner: Open) -> dict[str, Any]:
    """Trains on the labeled images of the config and returns the content of results.json.

    Args:
        stage: linear | finetune; its settings are the config's section of that name.
        weights: run folder, checkpoint file, or ``random``.

    Raises:
        UserError: bad input, training diverged, the folder is in use or holds something else.
        interrupt.Stopped: asked to stop; a checkpoint of the current step is written.
    """
    settings = cfg[stage.upper()]
    with probe_run(cfg, stage) as run:
        backbone, source = load_frozen(weights, cfg, run.device)
        work = {"backbone": str(source.get("source_sha256") or source)}
        work |= on_every_rank(lambda: classifier_settings(cfg, stage))  # reads a list of labels
        complete, state = on_first_rank(lambda: _earlier(run, work))
        if complete:
            run.log.info(f"{run.folder} is complete; nothing to do")
            return complete
        data = run.open_data()
        if (least := distributed.world_size() * (2 if stage == "finetune" else 1)) > settings.IMS_PER_BATCH:
            raise UserError(
                f"{stage.upper()}.IMS_PER_BATCH is {settings.IMS_PER_BATCH}; it must be at least {least} for "
                f"{distributed.world_size()} process(es)"
            )
        sizes = {**protocol(cfg, data=data), "classes": len(data.train.classes)}
        earlier = state.get("sizes") if state else sizes
        if earlier != sizes:
            earlier = earlier if isinstance(earlier, dict) else {}
            changed = "; ".join(f"{key} {earlier.get(key)} -> {now}" for key, now in sizes.items()
                                if now != earlier.get(key))  # fmt: skip
            raise UserError(
                f"the labeled images have changed since {run.folder} was begun ({changed}); restore the original ones, "
                "or choose another OUTPUT_DIR"
            )
        run.start()
        torch.manual_seed(cfg.SEED)
        learner = open_learner(run, backbone, source, data)
        score = _train(run, settings, learner, {"work": work, "sizes": sizes}, state)
        best = _best(score)
        how = f"lr {best['learning_rate']:g}, {settings.EPOCHS} epochs, {settings.AUGMENT}"
        run.log.info(
            f"{stage} top-1 {best['top1']:.2f}, top-5 {best['top5']:.2f} ({how}, {len(data.val)} validation images)"
        )
        warning = {}
        if stage == "linear":  # the features are still those of the weights
            warning = warning_if_random(backbone, source, data, cfg, run.device, run.log)
        return run.finish({
            "source": source, "metrics": best, "per_learning_rate": score, "protocol": protocol(cfg, stage, data),
            "work": work, **warning,
        })  # fmt: skip


def restored(heads: Heads, state: dict[str, Any], losses_H: Tensor, total_steps: int) -> tuple[int, Tensor]:
    """Loads a checkpoint's ``state`` into ``heads``; returns its step and losses, in the form of ``losses_H``.

    Raises:
        UserError: it is damaged, or another probe's.
    """
    with checkpoint.restoring("the checkpoint", heads.optimizer, "remove it to begin anew"):
        heads.load(state)
        step, found_H = int(state["step"]), state["losses"].to(losses_H).view_as(losses_H)
        if not 0 <= step <= total_steps or found_H.layout != losses_H.layout:
            raise ValueError(f"it is of step {step} of {total_steps}")
    return step, found_H


def _train(
    run: ProbeRun, settings: CfgNode, learner: Learner, about: dict[str, Any], state: dict[str, Any] | None
) -> Scores:
    """Trains from ``state`` (None: from the start) to the end; returns every head's scores.

    Args:
        about: what every checkpoint says of the work that it belongs to.
    """
    heads, stream = learner.heads, learner.stream
    steps_per_epoch, step = len(stream), 0
    total_steps = settings.EPOCHS * steps_per_epoch
    losses = torch.zeros(len(heads.rates), device=run.device)  # sums over the current epoch
    if state:
        step, losses = restored(heads, state, losses, total_steps)
        run.log.info(f"resumed at step {step} of {total_steps}")
        if distributed.is_main():  # it may have been killed before it removed the one before
            checkpoint.prune(run.folder, 1, checkpoint.path_of_step(run.folder, step))
    metrics = MetricsWriter(run.folder, step) if distributed.is_main() else None
    progress = Progress(total_steps, step, settings.IMS_PER_BATCH, run.log, metrics is not None, run.name)
    stop, score = AgreedStop(run.device), learner.score() if learner.scored_every_epoch else {}
    for batch in progress.timed(stream.batches(step, total_steps)):
        epoch = step // steps_per_epoch
        factor = heads.set_rates(epoch)
        losses += heads.step(*stream.features(batch))
        step += 1
        progress.advance()
        reason, epoch_ends = stop.poll(), step % steps_per_epoch == 0
        if epoch_ends:
            heads.retire(losses, epoch, run.log.warning)
            score = learner.score() if learner.scored_every_epoch else {}
            best = _best(score) if score else {}
            if metrics:
                rate = heads.rates.index(best["learning_rate"]) if best else 0
                loss = float(losses[rate]) / steps_per_epoch
                metrics.write(step - 1, {"loss": loss, "lr_factor": factor, **best})
                top1 = f"top-1 {best['top1']:.2f}" if best else f"loss {loss:.4f}"
                progress.report(f"epoch {epoch + 1}  {top1}", progress.rates())
            losses.zero_()
        if epoch_ends or reason:
            _save(run.folder, step, {**heads.state(), **about, "step": step, "losses": losses})
        if reason and step < total_steps:
            progress.close()
            raise interrupt.Stopped(reason, interrupt.from_checkpoint(run.folder, step))
    progress.close()
    if metrics:
        metrics.close()
    return score or learner.score()


class Augmented:
    """Features of augmented images; gradients flow to a backbone that is trained."""

    def __init__(self, run: ProbeRun, settings: CfgNode, backbone: ResNet, data: ImageData) -> None:
        cfg = run.cfg
        self._backbone, self._device, self._amp = backbone, run.device, cfg.SOLVER.AMP
        self._statistics = cfg.VIEWS.MEAN, cfg.VIEWS.STD
        size, recipe = cfg.PROBE.IMAGE_SIZE or cfg.VIEWS.IMAGE_SIZE, recipes.RECIPES[settings.AUGMENT]
        self._loader = build_loader(cfg, data, [recipe], run.device, size=size, batch_size=settings.IMS_PER_BATCH)

    def __len__(self) -> int:
        return len(self._loader)

    def batches(self, first_step: int, total_steps: int) -> Iterator[Batch]:
        return (batch for _, batch in self._loader.batches(first_step, total_steps))

    def features(self, batch: Batch) -> tuple[Tensor, Tensor]:
        images = views.normalize(batch.views_VNCHW[0].to(self._device, non_blocking=True), *self._statistics)
        with autocast(self._amp, self._device.type):
            features = pooled_features(self._backbone, images).float()
        return features, batch.label_N.to(self._device, non_blocking=True)


def _save(folder: Path, step: int, state: dict[str, Any]) -> None:
    def write() -> None:
        path = checkpoint.path_of_step(folder, step)
        checkpoint.save(path, state)
        checkpoint.prune(folder, 1, path)

    on_first_rank(write)  # a full disk ends every rank


def _earlier(run: ProbeRun, work: dict[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The result of a complete stage, or the newest checkpoint of one to resume.

    Raises:
        UserError: the folder holds one with another protocol or backbone.
    """
    path = run.folder / "results.json"
    results = read_json(path) if path.is_file() else None
    found = None if results else checkpoint.newest(run.folder, warn=run.log.warning)
    state = found[1] if found else None
    earlier = results or state
    if earlier is None:
        return None, None
    before = earlier.get("work")
    if not isinstance(before, dict):
        raise UserError(f"{run.folder} does not say what its {run.name} stage was made from; choose another OUTPUT_DIR")
    check_same_probe(run.folder, before, work)
    return results, state


def _best(scores: Scores) -> dict[str, Any]:
    """The only head, or the one with the highest top-1 on the images held out; with its learning rate."""
    rate = max(scores, key=lambda r: scores[r].get("held_out_top1", 0.0))
    return {**scores[rate], "learning_rate": float(rate)}
