"""Weighted k-nearest-neighbour classification of frozen features (Wu et al. 2018, Sec. 3.4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torch.nn import functional as F
from torchvision.models import ResNet

from .. import distributed
from ..common.config_io import dump
from ..common.errors import UserError
from ..common.run_folder import atomic_write, setup_logging, write_environment, write_json
from .features import Features, extract, load_frozen, probe_data


def main(cfg: CfgNode, weights: str) -> dict[str, Any]:
    """kNN of a run folder's or checkpoint's backbone (or ``random``); writes OUTPUT_DIR/results.json."""
    output_dir = Path(cfg.OUTPUT_DIR or "runs/knn")
    device = distributed.init(cfg.DEVICE)
    log = setup_logging(output_dir, distributed.rank())
    backbone, source = load_frozen(weights, cfg, device)
    data = probe_data(cfg)
    most = cfg.PROBE.KNN_MAX_IMAGES
    score = classify(
        extract(backbone, data.train, cfg, device, most), extract(backbone, data.val, cfg, device),
        k=cfg.PROBE.KNN_K, temperature=cfg.PROBE.KNN_TEMPERATURE,
    )  # fmt: skip
    results = {"stage": "knn", "source": source, "k": cfg.PROBE.KNN_K, "temperature": cfg.PROBE.KNN_TEMPERATURE,
               "metrics": score}  # fmt: skip
    if distributed.is_main():
        atomic_write(output_dir / "config.yaml", dump(cfg))
        write_environment(output_dir)
        write_json(output_dir / "results.json", results)
        log.info(f"kNN top-1 {score['top1']:.2f}, top-5 {score['top5']:.2f} (k {cfg.PROBE.KNN_K})")
    return results


def evaluate(encoder: ResNet, cfg: CfgNode, device: torch.device) -> dict[str, float]:
    """kNN of an encoder in training, returned to the mode it was in; empty where the data have no labels."""
    try:
        data = probe_data(cfg)
    except UserError:
        if cfg.DATA.PROBE_TRAIN or cfg.DATA.VAL:  # asked for by name: a mistake, not an absence
            raise
        return {}
    training = encoder.training
    encoder.eval()
    try:
        train = extract(encoder, data.train, cfg, device, cfg.PROBE.KNN_MAX_IMAGES)
        return classify(
            train, extract(encoder, data.val, cfg, device), k=cfg.PROBE.KNN_K, temperature=cfg.PROBE.KNN_TEMPERATURE
        )
    finally:
        encoder.train(training)


@torch.no_grad()
def classify(train: Features, val: Features, *, k: int, temperature: float, chunk: int = 1024) -> dict[str, float]:
    """Top-1 and top-5 accuracy, 0 to 100.

    Each validation image takes a vote of its k nearest training images by cosine similarity s, with weight
    exp(s / temperature). k above the number of training images means all of them.
    """
    bank_TF, classes = F.normalize(train.features_NF, dim=1), train.num_classes
    k = min(k, len(bank_TF))
    top = min(5, classes)
    hits1 = hits5 = 0
    for queries, labels in zip(val.features_NF.split(chunk), val.labels_N.split(chunk), strict=True):
        ranked = (
            vote(F.normalize(queries, dim=1) @ bank_TF.T, train.labels_N, k, temperature, classes).topk(top).indices
        )
        right = ranked == labels[:, None]
        hits1 += int(right[:, 0].sum())
        hits5 += int(right.sum())
    count = len(val.labels_N)
    return {"top1": 100 * hits1 / count, "top5": 100 * hits5 / count, "train_images": len(bank_TF), "val_images": count}


def vote(similarity_QT: Tensor, labels_T: Tensor, k: int, temperature: float, classes: int) -> Tensor:
    """(Q, C) sums of exp(s / temperature) over each query's k nearest, by class."""
    nearest = similarity_QT.topk(k, dim=1)
    # The largest similarity is taken out first: exp(1 / 0.01) does not fit float32.
    weights = ((nearest.values - nearest.values[:, :1]) / temperature).exp()
    votes = weights.new_zeros(len(similarity_QT), classes)
    return votes.scatter_add_(1, labels_T[nearest.indices], weights)
