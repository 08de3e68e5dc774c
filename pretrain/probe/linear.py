"""The linear probe: a classifier on frozen features; it resumes exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torchvision.models import ResNet

from ..common import distributed, interrupt
from ..common.distributed import AgreedStop, on_first_rank
from ..common.errors import UserError
from ..common.files import read_json
from ..common.run.metrics import MetricsWriter
from ..common.run.progress import Progress
from ..common.weights import checkpoint
from ..data import recipes, views
from ..data.datasets import ImageData
from ..data.loader import Batch, build_loader
from ..model.encoder import feature_dim, pooled_features
from ..model.momentum_encoder import autocast
from ..preflight import check_divisible
from .data import ProbeData
from .features import extract, load_frozen
from .heads import Heads
from .protocol import check_same_probe, linear_settings, protocol
from .stage import ProbeRun, probe_run

Scores = dict[str, dict[str, float]]  # learning rate -> top1, top5, ...


def main(cfg: CfgNode, weights: str) -> dict[str, Any]:
    """Trains LINEAR.* heads on frozen features of the labeled images; returns the content of results.json.

    With LINEAR.LRS several heads learn side by side from one pass over the data, one per learning rate; one that
    diverges scores 0 and leaves the others alone. The result is that of the head with the highest top-1 on a tenth of
    the training images, which no head learns from: to choose it on the validation images would flatter it. With
    LINEAR.AUGMENT none every feature is computed once.

    Args:
        weights: run folder, checkpoint file, or ``random``.

    Raises:
        interrupt.Stopped: asked to stop; a checkpoint of the current step is written.
    """
    with probe_run(cfg, "linear") as run:
        backbone, source = load_frozen(weights, cfg, run.device)
        work = {"backbone": str(source.get("source_sha256") or source), **linear_settings(cfg)}
        complete, state = on_first_rank(lambda: _earlier(run, work))
        if complete:
            run.log.info(f"{run.folder} is complete; nothing to do")
            return complete
        data = run.open_data()
        sizes = {**protocol(cfg, data=data), "classes": len(data.train.classes)}
        if state:
            check_same_probe(run.folder, state.get("sizes", {}), sizes)
        run.start()
        torch.manual_seed(cfg.SEED)
        score = _train(run, backbone, data, {"work": work, "sizes": sizes}, state)
        for rate in (rate for rate, values in score.items() if "diverged" in values):
            run.log.warning(f"the head of learning rate {rate} diverged; it scores 0")
        best = _best(score)
        how = f"lr {best['learning_rate']:g}, {cfg.LINEAR.EPOCHS} epochs, {cfg.LINEAR.AUGMENT}"
        run.log.info(
            f"linear top-1 {best['top1']:.2f}, top-5 {best['top5']:.2f} ({how}, {len(data.val)} validation images)"
        )
        return run.finish({
            "source": source, "metrics": best, "per_learning_rate": score, "protocol": protocol(cfg, "linear", data),
            "work": work,
        })  # fmt: skip


def _train(
    run: ProbeRun, backbone: ResNet, data: ProbeData, about: dict[str, Any], state: dict[str, Any] | None
) -> Scores:
    """Trains from ``state`` (None: from the start) to the end; returns every head's scores.

    Args:
        about: what every checkpoint records about the work it belongs to.
    """
    check_divisible(run.cfg, "linear", distributed.world_size())
    settings, device = run.cfg.LINEAR, run.device
    heads = Heads(feature_dim(backbone), len(data.train.classes), settings).to(device)
    val, held_out, learned = extract(backbone, data.val, run.cfg, device), None, data.train
    if len(heads.rates) > 1:
        learned, unseen = _split(data.train)
        held_out = extract(backbone, unseen, run.cfg, device)
    stream = (_Cached if settings.AUGMENT == "none" else _Augmented)(run, backbone, learned)
    steps_per_epoch, step = len(stream), 0
    total_steps = settings.EPOCHS * steps_per_epoch
    losses = torch.zeros(len(heads.rates), device=device)  # sums over the current epoch
    if state:
        step, losses = restored(heads, state, losses)
        run.log.info(f"resumed at step {step} of {total_steps}")
        if distributed.is_main():  # it may have been killed before it removed the one before
            checkpoint.prune(run.folder, 1, checkpoint.path_of_step(run.folder, step))
    metrics = MetricsWriter(run.folder, step) if distributed.is_main() else None
    progress = Progress(total_steps, step, settings.IMS_PER_BATCH, run.name)
    stop, score = AgreedStop(device), heads.score(val, held_out)
    for batch in progress.measure_waits(stream.batches(step, total_steps)):
        epoch = step // steps_per_epoch
        factor = heads.set_rates(epoch)
        losses += heads.step(*stream.features(batch))
        step += 1
        progress.advance()
        reason, epoch_ends = stop.poll(), step % steps_per_epoch == 0
        if epoch_ends:
            score = heads.score(val, held_out)
            if metrics:
                best = _best(score)
                loss = float(losses[heads.rates.index(best["learning_rate"])]) / steps_per_epoch
                metrics.write(step - 1, {"loss": loss, "lr_factor": factor, **best})
                progress.report(f"epoch {epoch + 1}  top-1 {best['top1']:.2f}", progress.rates())
            losses.zero_()
        if epoch_ends or reason:
            _save(run.folder, step, {**heads.state(), **about, "step": step, "losses": losses})
        if reason and step < total_steps:
            progress.close()
            raise interrupt.Stopped(reason, interrupt.resume_hint(run.folder, step))
    progress.close()
    if metrics:
        metrics.close()
    return score


def restored(heads: Heads, state: dict[str, Any], losses_H: Tensor) -> tuple[int, Tensor]:
    """Loads a checkpoint's ``state`` into ``heads``; returns its step and losses, in the form of ``losses_H``."""
    with checkpoint.check_restoring("the checkpoint", heads.optimizer, "remove it to begin anew"):
        heads.load(state)
        return int(state["step"]), state["losses"].to(losses_H).view_as(losses_H)


def _split(train: ImageData) -> tuple[ImageData, ImageData]:
    """The images to learn from, and every tenth image, to choose the learning rate on."""
    positions = np.arange(len(train))
    is_held_out = positions % 10 == 9 if len(train) > 9 else positions == 0
    return train.chosen(positions[~is_held_out]), train.chosen(positions[is_held_out])


class _Augmented:
    """Batches of images with LINEAR.AUGMENT, whose features are computed in each step."""

    def __init__(self, run: ProbeRun, backbone: ResNet, data: ImageData) -> None:
        cfg = run.cfg
        self._backbone, self._device, self._amp = backbone, run.device, cfg.SOLVER.AMP
        self._statistics = cfg.VIEWS.MEAN, cfg.VIEWS.STD
        size, recipe = cfg.PROBE.IMAGE_SIZE or cfg.VIEWS.IMAGE_SIZE, recipes.RECIPES[cfg.LINEAR.AUGMENT]
        self._loader = build_loader(cfg, data, [recipe], run.device, size=size, batch_size=cfg.LINEAR.IMS_PER_BATCH)

    def __len__(self) -> int:
        return len(self._loader)

    def batches(self, first_step: int, total_steps: int) -> Iterator[Batch]:
        return (batch for _, batch in self._loader.batches(first_step, total_steps))

    def features(self, batch: Any) -> tuple[Tensor, Tensor]:
        images = views.normalize(batch.views_VNCHW[0].to(self._device, non_blocking=True), *self._statistics)
        with autocast(self._amp, self._device.type):
            features = pooled_features(self._backbone, images).float()
        return features, batch.label_N.to(self._device, non_blocking=True)


class _Cached:
    """Batches of (features, labels) from features computed once; the order is a function of (seed, epoch)."""

    def __init__(self, run: ProbeRun, backbone: ResNet, data: ImageData) -> None:
        self._total, self._seed = run.cfg.LINEAR.IMS_PER_BATCH, run.cfg.SEED
        self._features = extract(backbone, data, run.cfg, run.device)
        if (count := len(self._features.labels_N)) < self._total:
            raise UserError(f"LINEAR.IMS_PER_BATCH is {self._total}, above the {count} labeled images; lower it")

    def __len__(self) -> int:
        return len(self._features.labels_N) // self._total

    def batches(self, first_step: int, total_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        features_NF, labels_N, _ = self._features
        size = self._total // distributed.world_size()
        for step in range(first_step, total_steps):
            epoch, at = divmod(step, len(self))
            if step == first_step or at == 0:
                generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
                order = torch.randperm(len(labels_N), generator=generator).to(labels_N.device)
            start = at * self._total + distributed.rank() * size
            batch = order[start : start + size]
            yield features_NF[batch], labels_N[batch]

    def features(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch


def _save(folder: Path, step: int, state: dict[str, Any]) -> None:
    def write() -> None:
        path = checkpoint.path_of_step(folder, step)
        checkpoint.save(path, state)
        checkpoint.prune(folder, 1, path)

    on_first_rank(write)  # a full disk ends every rank


def _earlier(run: ProbeRun, work: dict[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The result of a complete stage, or the newest checkpoint of one to resume; UserError if it is another probe's."""
    path = run.folder / "results.json"
    results = read_json(path) if path.is_file() else None
    newest = None if results else checkpoint.load_latest(run.folder)
    state = newest[1] if newest else None
    if earlier := results or state:
        check_same_probe(run.folder, earlier.get("work", {}), work)
    return results, state


def _best(scores: Scores) -> dict[str, Any]:
    """The only head, or the one with the highest top-1 on the images held out; with its learning rate."""
    rate = max(scores, key=lambda r: scores[r].get("held_out_top1", 0.0))
    return {**scores[rate], "learning_rate": float(rate)}
