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
from .data import MissingLabels, ProbeData, probe_data
from .features import Features, extract, load_frozen
from .protocol import protocol
from .stage import probe_run

log = logging.getLogger(__name__)
_USUAL_K = (10, 20, 100, 200)  # whatever PROBE.KNN_K is: papers differ in it


def main(cfg: CfgNode, weights: str) -> dict[str, Any]:
    """kNN of a run folder's or checkpoint's backbone (or ``random``); returns the content of results.json."""
    with probe_run(cfg, "knn") as run:
        backbone, source = load_frozen(weights, cfg, run.device)
        data = run.open_data()
        _warn_if_all_vote(cfg, data)
        run.start()
        score = _score(backbone, data, cfg, run.device)
        results = {"source": source, "protocol": protocol(cfg, "knn", data), "metrics": score}
        run.log.info(f"kNN top-1 {score['top1']:.2f}, top-5 {score['top5']:.2f} ({describe(cfg, score)})")
        return run.finish(results)


def open_data(cfg: CfgNode, train: datasets.ImageData) -> ProbeData | None:
    """Opens kNN's data before the first step of pretraining, so that a mistake in it costs nothing.

    Args:
        train: the open train split of DATA.TRAIN.

    Returns:
        The data for `evaluate`; None (the log has the reason) where they have no labels or no val split, unless
        DATA.PROBE_TRAIN or DATA.VAL names them: that is a UserError.
    """

    def load() -> tuple[ProbeData | None, str]:
        try:
            return probe_data(cfg, train), ""
        except (MissingLabels, datasets.MissingSplit) as reason:
            if cfg.DATA.PROBE_TRAIN or cfg.DATA.VAL:
                raise
            return None, str(reason)

    data, reason = on_every_rank(load)
    if data is None:
        log.info(f"kNN will not be run, which changes nothing in the training: {reason}")
    check_agreement(data and (len(data.train), len(data.val)), "the number of labeled images for kNN")
    if data:
        _warn_if_all_vote(cfg, data)
    return data


def _warn_if_all_vote(cfg: CfgNode, data: ProbeData) -> None:
    if is_main() and protocol(cfg, "knn", data)["k"] in (len(data.train), cfg.PROBE.KNN_MAX_IMAGES):
        log.warning(f"PROBE.KNN_K is {cfg.PROBE.KNN_K}: all training images vote on every image; lower it")


def evaluate(encoder: ResNet, data: ProbeData | None, cfg: CfgNode, device: torch.device) -> dict[str, float]:
    """kNN of an encoder in training, returned to the mode it was in; empty where `open_data` found no data for it."""
    if data is None:
        return {}
    training = encoder.training
    encoder.eval()
    try:
        with translate_torch_errors("knn"):
            return _score(encoder, data, cfg, device)
    finally:
        encoder.train(training)


def _score(encoder: ResNet, data: ProbeData, cfg: CfgNode, device: torch.device) -> dict[str, float]:
    train = extract(encoder, data.train, cfg, device, cfg.PROBE.KNN_MAX_IMAGES)
    val = extract(encoder, data.val, cfg, device)
    return classify(train, val, k=cfg.PROBE.KNN_K, temperature=cfg.PROBE.KNN_TEMPERATURE)


def describe(cfg: CfgNode, score: Mapping[str, float]) -> str:
    """The protocol of a ``score``, to be printed next to it."""
    size = cfg.PROBE.IMAGE_SIZE or cfg.VIEWS.IMAGE_SIZE
    k = min(cfg.PROBE.KNN_K, score["train_images"])
    return (
        f"k {k}, temperature {cfg.PROBE.KNN_TEMPERATURE}, {score['train_images']} training and "
        f"{score['val_images']} validation images, {size} pixels"
    )


@torch.no_grad()
def classify(train: Features, val: Features, *, k: int, temperature: float, chunk: int = 1024) -> dict[str, float]:
    """Top-1 and top-5 accuracy, 0 to 100, and ``top1_k10`` and so on for the usual k that the bank has images for.

    Each validation image takes a vote of its k nearest training images by cosine similarity s, with weight
    exp(s / temperature). k above the number of training images means all of them. The features of ``train`` are
    normalized in place.

    Raises:
        Stopped: a rank was asked to stop.
    """
    stop = AgreedStop(val.features_NF.device)
    bank_TF, classes = F.normalize(train.features_NF, dim=1, out=train.features_NF), train.num_classes
    k = min(k, len(bank_TF))
    usual = [other for other in _USUAL_K if other <= len(bank_TF)]
    top = min(5, classes)
    hits1, hits5, hits_of = 0, 0, dict.fromkeys(usual, 0)
    for queries, labels in zip(val.features_NF.split(chunk), val.labels_N.split(chunk), strict=True):
        stop.raise_if_requested()
        nearest = (F.normalize(queries, dim=1) @ bank_TF.T).topk(max(k, *usual, 0), dim=1)
        labels_QK = train.labels_N[nearest.indices]
        votes = vote(nearest.values[:, :k], labels_QK[:, :k], temperature, classes)
        right = votes.topk(top).indices == labels[:, None]
        hits1 += int(right[:, 0].sum())
        hits5 += int(right.sum())
        for other in usual:
            votes = vote(nearest.values[:, :other], labels_QK[:, :other], temperature, classes)
            hits_of[other] += int((votes.argmax(dim=1) == labels).sum())
    count = len(val.labels_N)
    scores = {f"top1_k{other}": 100 * hits / count for other, hits in hits_of.items()}
    return {"top1": 100 * hits1 / count, "top5": 100 * hits5 / count, **scores, "train_images": len(bank_TF),
            "val_images": count}  # fmt: skip


def vote(similarity_QK: Tensor, labels_QK: Tensor, temperature: float, classes: int) -> Tensor:
    """(Q, C) sums of exp(s / temperature) over each query's neighbors, the nearest first, by class."""
    # The largest similarity is subtracted first: exp(1 / 0.01) does not fit float32.
    weights_QK = ((similarity_QK - similarity_QK[:, :1]) / temperature).exp()
    votes_QC = weights_QK.new_zeros(len(weights_QK), classes)
    return votes_QC.scatter_add_(1, labels_QK, weights_QK)
