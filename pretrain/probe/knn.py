"""Weighted k-nearest-neighbor classification of frozen features (Wu et al. 2018, Sec. 3.4)."""

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torch.nn import functional as F
from torchvision.models import ResNet

from ..common.device import translate_torch_errors
from ..common.distributed import gather, gather_objects, is_first_rank, world_size
from ..common.errors import count_noun
from ..common.ranks.agreement import AgreedStop, check_agreement, on_every_rank, on_first_rank
from ..common.run.state import RunContext
from ..data import datasets
from .data import MissingLabels, ProbeData, load_probe_data, warn_of_training_images
from .features import Features, NotFinite, extract, load_frozen
from .protocol import build_knn_protocol
from .stage import open_probe

log = logging.getLogger(__name__)
_MEMORY_REMEDY = "set PROBE.KNN_MAX_IMAGES or lower PROBE.IMAGE_SIZE (a resumed run may change both)"
_REPORTED_K = (10, 20, 100, 200)  # always reported, because papers use different k
_MAX_CHUNK = 1024  # validation images at once
_SIMILARITIES = 2**27  # to validation images at once: 0.5 GiB


def main(cfg: CfgNode, weights: str, *, context: RunContext | None = None) -> dict[str, Any]:
    """Evaluate a run folder's or checkpoint's backbone (or ``random``); return the content of results.json."""
    with open_probe(cfg, "knn", context, _MEMORY_REMEDY) as run:
        backbone, source = load_frozen(weights, cfg, run.device)
        data = run.load_data()
        _warn_of_data(cfg, data)
        run.start()
        score = _score(backbone, data, cfg, run.stop, run.device)
        results = {"source": source, "protocol": build_knn_protocol(cfg, data), "metrics": score}
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
        _warn_of_data(cfg, data)
    return data


def _load_if_labeled(cfg: CfgNode, train: datasets.ImageData) -> ProbeData | None:
    try:
        return load_probe_data(cfg, train)
    except (MissingLabels, datasets.MissingSplit) as reason:
        if cfg.DATA.PROBE_TRAIN or cfg.DATA.VAL:
            raise
        # Labels are often missing on purpose.
        level = logging.WARNING if isinstance(reason, datasets.MissingSplit) else logging.INFO
        log.log(level, f"kNN evaluation is disabled; training is unaffected: {reason}")
        return None


def _warn_of_data(cfg: CfgNode, data: ProbeData) -> None:
    """Log what makes the score of these data meaningless."""
    on_first_rank(warn_of_training_images, data)
    if is_first_rank() and build_knn_protocol(cfg, data)["k"] in (len(data.train), cfg.PROBE.KNN_MAX_IMAGES):
        log.warning(f"PROBE.KNN_K is {cfg.PROBE.KNN_K}: all training images vote on every image; lower it")


def evaluate(
    encoder: ResNet, data: ProbeData | None, cfg: CfgNode, stop: AgreedStop, device: torch.device
) -> dict[str, float]:
    """Evaluate an encoder in training and restore its mode; return {} if `open_data` returned None."""
    if data is None:
        return {}
    is_training = encoder.training
    encoder.eval()
    try:
        with translate_torch_errors(_MEMORY_REMEDY):
            return _score(encoder, data, cfg, stop, device)
    except NotFinite as error:  # training has checks of its own
        if is_first_rank():
            log.warning(f"no kNN score: {error}")
        return {}
    finally:
        encoder.train(is_training)


def _score(encoder: ResNet, data: ProbeData, cfg: CfgNode, stop: AgreedStop, device: torch.device) -> dict[str, float]:
    train = extract(encoder, data.train, cfg, stop, device, cfg.PROBE.KNN_MAX_IMAGES, gather=False)
    val = extract(encoder, data.val, cfg, stop, device)
    return classify(train, val, stop, k=cfg.PROBE.KNN_K, temperature=cfg.PROBE.KNN_TEMPERATURE)


def describe(cfg: CfgNode, score: Mapping[str, float]) -> str:
    """Return the settings of a ``score`` as text to print next to it."""
    size = cfg.PROBE.IMAGE_SIZE or cfg.VIEWS.IMAGE_SIZE
    k = min(cfg.PROBE.KNN_K, score["train_images"])
    images = f"{int(score['train_images']):,} training and {count_noun(int(score['val_images']), 'validation image')}"
    return f"k {k}, temperature {cfg.PROBE.KNN_TEMPERATURE}, {images}, {size} pixels"


@torch.no_grad()
def classify(
    train: Features, val: Features, stop: AgreedStop, *, k: int, temperature: float, chunk: int = 0
) -> dict[str, float]:
    """Return top-1 and top-5 accuracy, 0 to 100, and ``top1_k10`` and so on for each of _REPORTED_K up to the images.

    Each validation image takes a vote of its k nearest training images by cosine similarity s, with weight
    exp(s / temperature); of equally similar ones, the first in the data set is the nearest. k above the number of
    training images means all of them.

    Args:
        train: this rank's training images; its features are normalized in place.
        val: all validation images.
        chunk: validation images at once; 0 means as many as fit a buffer of moderate size.

    Raises:
        Stopped: a rank was asked to stop.
    """
    bank_TF = F.normalize(train.features_NF, dim=1, out=train.features_NF)
    sizes = gather_objects(len(bank_TF))
    train_images = sum(sizes)
    chunk = chunk or max(1, min(_MAX_CHUNK, _SIMILARITIES // max(1, *sizes)))
    classes = train.num_classes
    k = min(k, train_images)
    reported_k = [reported for reported in _REPORTED_K if reported <= train_images]
    hits = {"top1": 0, "top5": 0, **{f"top1_k{reported}": 0 for reported in reported_k}}
    for queries, labels in zip(val.features_NF.split(chunk), val.labels_N.split(chunk), strict=True):
        stop.raise_if_requested()
        similarity_QT = F.normalize(queries, dim=1) @ bank_TF.T
        nearest_QK, labels_QK = find_nearest(similarity_QT, train.labels_N, max(k, *reported_k, 0))
        votes = vote(nearest_QK[:, :k], labels_QK[:, :k], temperature, classes)
        correct = votes.topk(min(5, classes)).indices == labels[:, None]
        hits["top1"] += int(correct[:, 0].sum())
        hits["top5"] += int(correct.sum())
        for reported in reported_k:
            votes = vote(nearest_QK[:, :reported], labels_QK[:, :reported], temperature, classes)
            hits[f"top1_k{reported}"] += int((votes.argmax(dim=1) == labels).sum())
    scores = {name: 100 * correct / len(val.labels_N) for name, correct in hits.items()}
    return {**scores, "train_images": train_images, "val_images": len(val.labels_N)}


def find_nearest(similarity_QT: Tensor, labels_T: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return similarities and labels, (Q, k), of the nearest training images of all ranks, the nearest first."""
    local_k = min(k, len(labels_T))
    top_QK, index_QK = similarity_QT.topk(local_k, dim=1)
    # topk breaks ties arbitrarily; where a tie is cut, sort by position as well.
    last_Q1 = top_QK[:, local_k - 1 :]
    is_cut_Q = (similarity_QT == last_Q1).sum(1) > (top_QK == last_Q1).sum(1)
    index_QK[is_cut_Q] = similarity_QT[is_cut_Q].argsort(dim=1, descending=True, stable=True)[:, :local_k]
    index_QK = index_QK.sort(dim=1).values
    top_QK, order_QK = similarity_QT.gather(1, index_QK).sort(dim=1, descending=True, stable=True)
    padding = (0, k - local_k)
    nearest_QK = F.pad(top_QK, padding, value=-math.inf)
    labels_QK = F.pad(labels_T[index_QK.gather(1, order_QK)], padding)
    if world_size() == 1:
        return nearest_QK, labels_QK
    # The ranks have consecutive slices of the data set, so that a stable sort keeps equal ones in its order.
    ranks = (world_size(), len(similarity_QT))
    nearest_QRK = gather(nearest_QK).unflatten(0, ranks).transpose(0, 1).flatten(1)
    labels_QRK = gather(labels_QK).unflatten(0, ranks).transpose(0, 1).flatten(1)
    values, order = nearest_QRK.sort(dim=1, descending=True, stable=True)
    return values[:, :k], labels_QRK.gather(1, order[:, :k])


def vote(similarity_QK: Tensor, labels_QK: Tensor, temperature: float, classes: int) -> Tensor:
    """Sum exp(s / temperature) over each query's neighbors, the nearest first, by class: (Q, C)."""
    # The largest similarity is subtracted first: exp(1 / 0.01) does not fit float32.
    weights_QK = ((similarity_QK - similarity_QK[:, :1]) / temperature).exp()
    votes_QC = weights_QK.new_zeros(len(weights_QK), classes)
    return votes_QC.scatter_add_(1, labels_QK, weights_QK)
