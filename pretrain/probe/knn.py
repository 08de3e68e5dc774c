"""Weighted k-nearest-neighbor classification of frozen features (Wu et al. 2018, Sec. 3.4)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torch.nn import functional as F
from torchvision.models import ResNet

from ..common.distributed import AgreedStop, check_agreement, is_main, on_every_rank
from ..common.run.stage import translate_torch_errors
from ..data import datasets
from .data import MissingLabels, ProbeData, load_probe_data
from .features import Features, extract, load_frozen
from .protocol import build_protocol
from .stage import probe_run

log = logging.getLogger(__name__)
_REPORTED_K = (10, 20, 100, 200)  # always reported, because papers use different k


def main(cfg: CfgNode, weights: str) -> dict[str, Any]:
    """Evaluate a run folder's or checkpoint's backbone (or ``random``); return the content of results.json."""
    with probe_run(cfg, "knn") as run:
        backbone, source = load_frozen(weights, cfg, run.device)
        data = run.load_data()
        _warn_if_all_vote(cfg, data)
        run.start()
        score = _score(backbone, data, cfg, run.device)
        results = {"source": source, "protocol": build_protocol(cfg, "knn", data), "metrics": score}
        log.info(f"kNN top-1 {score['top1']:.2f}, top-5 {score['top5']:.2f} ({describe(cfg, score)})")
        return run.finish(results)


def open_data(cfg: CfgNode, train: datasets.ImageData) -> ProbeData | None:
    """Open kNN's data before the first step of pretraining, so that a mistake in it costs nothing.

    Args:
        train: the open train split of DATA.TRAIN.

    Returns:
        The data for `evaluate`; None (the log has the reason) if they have no labels or no val split.

    Raises:
        UserError: DATA.PROBE_TRAIN or DATA.VAL names data without labels or val split, or data are missing.
    """
    data = on_every_rank(_load_if_labeled, cfg, train)
    check_agreement(data and (len(data.train), len(data.val)), "the number of labeled images for kNN")
    if data:
        _warn_if_all_vote(cfg, data)
    return data


def _load_if_labeled(cfg: CfgNode, train: datasets.ImageData) -> ProbeData | None:
    try:
        return load_probe_data(cfg, train)
    except (MissingLabels, datasets.MissingSplit) as reason:
        if cfg.DATA.PROBE_TRAIN or cfg.DATA.VAL:
            raise
        log.info(f"kNN evaluation is disabled; training is unaffected: {reason}")
        return None


def _warn_if_all_vote(cfg: CfgNode, data: ProbeData) -> None:
    if is_main() and build_protocol(cfg, "knn", data)["k"] in (len(data.train), cfg.PROBE.KNN_MAX_IMAGES):
        log.warning(f"PROBE.KNN_K is {cfg.PROBE.KNN_K}: all training images vote on every image; lower it")


def evaluate(encoder: ResNet, data: ProbeData | None, cfg: CfgNode, device: torch.device) -> dict[str, float]:
    """Evaluate an encoder in training and restore its mode; return {} if `open_data` returned None."""
    if data is None:
        return {}
    is_training = encoder.training
    encoder.eval()
    try:
        with translate_torch_errors("knn"):
            return _score(encoder, data, cfg, device)
    finally:
        encoder.train(is_training)


def _score(encoder: ResNet, data: ProbeData, cfg: CfgNode, device: torch.device) -> dict[str, float]:
    train = extract(encoder, data.train, cfg, device, cfg.PROBE.KNN_MAX_IMAGES)
    val = extract(encoder, data.val, cfg, device)
    return classify(train, val, k=cfg.PROBE.KNN_K, temperature=cfg.PROBE.KNN_TEMPERATURE)


def describe(cfg: CfgNode, score: Mapping[str, float]) -> str:
    """Return the settings of a ``score`` as text to print next to it."""
    size = cfg.PROBE.IMAGE_SIZE or cfg.VIEWS.IMAGE_SIZE
    k = min(cfg.PROBE.KNN_K, score["train_images"])
    images = f"{score['train_images']} training and {score['val_images']} validation images"
    return f"k {k}, temperature {cfg.PROBE.KNN_TEMPERATURE}, {images}, {size} pixels"


@torch.no_grad()
def classify(train: Features, val: Features, *, k: int, temperature: float, chunk: int = 1024) -> dict[str, float]:
    """Return top-1 and top-5 accuracy, 0 to 100, and ``top1_k10`` and so on for each of _REPORTED_K up to the images.

    Each validation image takes a vote of its k nearest training images by cosine similarity s, with weight
    exp(s / temperature). k above the number of training images means all of them. The features of ``train`` are
    normalized in place.

    Raises:
        Stopped: a rank was asked to stop.
    """
    stop = AgreedStop(val.features_NF.device)
    bank_TF = F.normalize(train.features_NF, dim=1, out=train.features_NF)
    classes = train.num_classes
    k = min(k, len(bank_TF))
    reported_k = [reported for reported in _REPORTED_K if reported <= len(bank_TF)]
    hits = {"top1": 0, "top5": 0, **{f"top1_k{reported}": 0 for reported in reported_k}}
    for queries, labels in zip(val.features_NF.split(chunk), val.labels_N.split(chunk), strict=True):
        stop.raise_if_requested()
        nearest = (F.normalize(queries, dim=1) @ bank_TF.T).topk(max(k, *reported_k, 0), dim=1)
        labels_QK = train.labels_N[nearest.indices]
        votes = vote(nearest.values[:, :k], labels_QK[:, :k], temperature, classes)
        correct = votes.topk(min(5, classes)).indices == labels[:, None]
        hits["top1"] += int(correct[:, 0].sum())
        hits["top5"] += int(correct.sum())
        for reported in reported_k:
            votes = vote(nearest.values[:, :reported], labels_QK[:, :reported], temperature, classes)
            hits[f"top1_k{reported}"] += int((votes.argmax(dim=1) == labels).sum())
    scores = {name: 100 * correct / len(val.labels_N) for name, correct in hits.items()}
    return {**scores, "train_images": len(bank_TF), "val_images": len(val.labels_N)}


def vote(similarity_QK: Tensor, labels_QK: Tensor, temperature: float, classes: int) -> Tensor:
    """Sum exp(s / temperature) over each query's neighbors, the nearest first, by class: (Q, C)."""
    # The largest similarity is subtracted first: exp(1 / 0.01) does not fit float32.
    weights_QK = ((similarity_QK - similarity_QK[:, :1]) / temperature).exp()
    votes_QC = weights_QK.new_zeros(len(weights_QK), classes)
    return votes_QC.scatter_add_(1, labels_QK, weights_QK)
