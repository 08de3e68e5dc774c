"""The linear probe: a classifier on frozen features; a resumed probe equals an uninterrupted one to the bit."""

import contextlib
import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torchvision.models import ResNet

from ..common import distributed, interrupt
from ..common.errors import count_noun
from ..common.ranks import process_group
from ..common.ranks.agreement import on_first_rank
from ..common.run import file_names
from ..common.run.metrics import MetricsWriter
from ..common.run.progress import Progress
from ..common.run.state import RunContext, read_json_or_empty
from ..common.weights import checkpoint
from ..data import augmentations
from ..data.datasets import ImageData
from ..data.loader import Batch, build_loader
from ..model.batch_split import check_batch_fits, log_left_out
from ..model.encoder import count_channels
from ..preflight import check_probe_divisible, check_same_images
from .data import ProbeData, find_held_out, warn_of_training_images
from .features import compute_features, extract, load_frozen
from .heads import Heads
from .protocol import (
    build_linear_protocol,
    build_protocol,
    check_same_probe,
    choose_evaluation_size,
    list_linear_settings,
)
from .stage import ProbeRun, open_probe

log = logging.getLogger(__name__)
_MEMORY_REMEDY = "lower LINEAR.IMS_PER_BATCH or PROBE.IMAGE_SIZE"
Scores = dict[str, dict[str, float]]  # learning rate -> top1, top5, ...


def main(cfg: CfgNode, weights: str, *, context: RunContext | None = None) -> dict[str, Any]:
    """Train LINEAR.* heads on frozen features of the labeled images; return the content of results.json.

    With LINEAR.LRS several heads learn in parallel from one pass over the data, one per learning rate; one that
    diverges scores 0 and does not affect the others. The result is that of the head with the highest top-1 on a
    held-out tenth of the training images: selecting it on the validation images would bias the result. With
    LINEAR.AUGMENT none every feature is computed once.

    Args:
        weights: run folder, checkpoint file, or ``random``.

    Raises:
        interrupt.Stopped: a stop was requested; a checkpoint of the current step is written.
    """
    with open_probe(cfg, "linear", context, _MEMORY_REMEDY) as run:
        backbone, source = load_frozen(weights, cfg, run.device)
        settings = {"backbone": str(source.get("source_sha256") or source), **list_linear_settings(cfg)}
        results, saved = on_first_rank(_load_earlier, run.folder, settings)
        if results:
            log.info(f"{run.folder} is complete; nothing to do")
            return results
        data = run.load_data()
        on_first_rank(warn_of_training_images, data)
        sizes = {**build_protocol(cfg, data), "classes": len(data.train.classes)}
        images = data.train.digest()
        if saved:
            check_same_probe(run.folder, saved.get("sizes", {}), sizes)
            check_same_images(saved.get("images", images), images, sizes["train"], run.folder)
        run.start()
        torch.manual_seed(cfg.SEED)
        scores = _train(run, backbone, data, {"work": settings, "sizes": sizes, "images": images}, saved)
        for lr, score in scores.items():
            if "diverged" in score:
                log.warning(f"the head of learning rate {lr} diverged; it scores 0")
        best = _select_best(scores)
        summary = f"lr {best['learning_rate']:g}, {count_noun(cfg.LINEAR.EPOCHS, 'epoch')}, {cfg.LINEAR.AUGMENT}"
        summary += f", {count_noun(len(data.val), 'validation image')}"
        log.info(f"linear top-1 {best['top1']:.2f}, top-5 {best['top5']:.2f} ({summary})")
        results = {"source": source, "metrics": best, "per_learning_rate": scores}
        return run.finish({**results, "protocol": build_linear_protocol(cfg, data), "work": settings})


def _train(run: ProbeRun, backbone: ResNet, data: ProbeData, metadata: dict[str, Any], saved: dict[str, Any]) -> Scores:
    """Train from a ``saved`` checkpoint, or from step 0, to the end; return every head's scores.

    Args:
        metadata: stored in every checkpoint.
    """
    check_probe_divisible(run.cfg, distributed.world_size())
    settings = run.cfg.LINEAR
    heads = Heads(count_channels(backbone), len(data.train.classes), settings).to(run.device)
    val = extract(backbone, data.val, run.cfg, run.stop, run.device)
    train_split = data.train
    held_out = None
    if len(heads.learning_rates) > 1:
        train_split, held_out_split = _split(data.train)
        held_out = extract(backbone, held_out_split, run.cfg, run.stop, run.device)
    if settings.AUGMENT == "none":
        batch_source = _CachedFeatures(run, backbone, train_split)
    else:
        batch_source = _AugmentedImages(run, backbone, train_split)
    if distributed.is_first_rank():
        log_left_out("LINEAR.IMS_PER_BATCH", len(train_split), settings.IMS_PER_BATCH, distributed.world_size())
    steps_per_epoch = len(batch_source)
    total_steps = settings.EPOCHS * steps_per_epoch
    step = 0
    losses_H = torch.zeros(len(heads.learning_rates), device=run.device)  # sums over the current epoch
    if saved:
        step, losses_H = restore_heads(heads, saved, losses_H)
        log.info(f"resumed at step {step} of {total_steps}")
        if distributed.is_first_rank():  # the run may have been killed before it removed the previous checkpoint
            checkpoint.prune(run.folder, 1, checkpoint.path_of_step(run.folder, step))
    metrics = MetricsWriter(run.folder, step) if distributed.is_first_rank() else None
    save = functools.partial(_save, run, heads, metadata, losses_H)
    first_step = step
    scores = heads.score(val, held_out)
    with contextlib.closing(Progress(total_steps, step, settings.IMS_PER_BATCH, run.name)) as progress:
        batches = progress.measure_waits(batch_source.batches(step, total_steps))
        for batch in interrupt.save_before_stop(batches, lambda n: save(first_step + n), distributed.world_size()):
            epoch = step // steps_per_epoch
            factor = heads.set_learning_rates(epoch)
            losses_H += heads.step(*batch_source.features(batch))
            if step == first_step:
                process_group.shorten_timeout()
            step += 1
            progress.advance()
            stop_reason = run.stop.poll()
            is_epoch_end = step % steps_per_epoch == 0
            if is_epoch_end:
                scores = heads.score(val, held_out)
                if metrics:
                    best = _select_best(scores)
                    loss = float(losses_H[heads.learning_rates.index(best["learning_rate"])]) / steps_per_epoch
                    metrics.write(step - 1, {"loss": loss, "lr_factor": factor, **best})
                    progress.report(f"epoch {epoch + 1}  top-1 {best['top1']:.2f}", progress.take_rates())
                losses_H.zero_()
            if is_epoch_end or stop_reason:
                save(step)
            if stop_reason and step < total_steps:
                raise interrupt.Stopped(stop_reason, interrupt.describe_resume(run.folder, step))
    if metrics:
        metrics.close()
    return scores


def _save(run: ProbeRun, heads: Heads, metadata: dict[str, Any], losses_H: Tensor, step: int) -> None:
    content = {**heads.state(), **metadata, "step": step, "losses": losses_H}
    on_first_rank(checkpoint.save_step, run.folder, step, content, keep=1)


def restore_heads(heads: Heads, saved: dict[str, Any], losses_H: Tensor) -> tuple[int, Tensor]:
    """Load the ``saved`` checkpoint into ``heads``; return its step and losses, the latter like ``losses_H``."""
    with checkpoint.translate_restore_errors("the checkpoint", heads.optimizer, "remove it to start again"):
        heads.load(saved)
        return int(saved["step"]), saved["losses"].to(losses_H).view_as(losses_H)


def _split(train: ImageData) -> tuple[ImageData, ImageData]:
    """Return the images to learn from, and those on which the learning rate is selected."""
    is_held_out = find_held_out(len(train))
    return train.subset(np.flatnonzero(~is_held_out)), train.subset(np.flatnonzero(is_held_out))


class _AugmentedImages:
    """Batches of images with LINEAR.AUGMENT, whose features are computed in each step."""

    def __init__(self, run: ProbeRun, backbone: ResNet, data: ImageData) -> None:
        cfg = run.cfg
        self._run = run
        self._backbone = backbone
        size, _ = choose_evaluation_size(cfg)
        augment = [augmentations.AUGMENTATIONS[cfg.LINEAR.AUGMENT]]
        batch = {"batch_size": cfg.LINEAR.IMS_PER_BATCH, "batch_key": "LINEAR.IMS_PER_BATCH"}
        self._loader = build_loader(cfg, data, augment, run.device, size=size, **batch)

    def __len__(self) -> int:
        return len(self._loader)

    def batches(self, first_step: int, total_steps: int) -> Iterator[Batch]:
        return (batch for _, batch in self._loader.batches(first_step, total_steps, self._run.stop.request))

    def features(self, batch: Any) -> tuple[Tensor, Tensor]:
        cfg = self._run.cfg
        device = self._run.device
        features = compute_features(self._backbone, batch.views_VnCHW[0], cfg, cfg.SOLVER.AMP, device).float()
        return features, batch.label_n.to(device, non_blocking=True)


class _CachedFeatures:
    """Batches of (features, labels) from features computed once; the order is a function of (seed, epoch)."""

    def __init__(self, run: ProbeRun, backbone: ResNet, data: ImageData) -> None:
        self._batch_size = run.cfg.LINEAR.IMS_PER_BATCH
        self._seed = run.cfg.SEED
        self._features = extract(backbone, data, run.cfg, run.stop, run.device)
        check_batch_fits("LINEAR.IMS_PER_BATCH", self._batch_size, len(self._features.labels_N))

    def __len__(self) -> int:
        return len(self._features.labels_N) // self._batch_size

    def batches(self, first_step: int, total_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        features_NF, labels_N, _ = self._features
        size = self._batch_size // distributed.world_size()
        for step in range(first_step, total_steps):
            epoch, position = divmod(step, len(self))
            if step == first_step or position == 0:
                generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
                order = torch.randperm(len(labels_N), generator=generator).to(labels_N.device)
            start = position * self._batch_size + distributed.rank() * size
            batch = order[start : start + size]
            yield features_NF[batch], labels_N[batch]

    def features(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch


def _load_earlier(folder: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of a complete probe and the newest checkpoint of one to resume; {} for what does not exist.

    Raises:
        UserError: it is another probe's.
    """
    results = read_json_or_empty(folder / file_names.RESULTS)
    newest = None if results else checkpoint.load_newest(folder)
    saved = newest[1] if newest else {}
    if results or saved:
        check_same_probe(folder, (results or saved).get("work", {}), settings)
    return results, saved


def _select_best(scores: Scores) -> dict[str, Any]:
    """Return the scores and learning rate of the only head, or of the one with the highest held-out top-1."""
    lr = max(scores, key=lambda name: scores[name].get("held_out_top1", 0.0))
    return {**scores[lr], "learning_rate": float(lr)}
