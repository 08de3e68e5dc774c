"""This project's side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.utils.tensorboard  # otherwise imported by the run, whose time excludes imports
from fvcore.common.config import CfgNode

from pretrain import train as pretraining
from pretrain.data import datasets
from pretrain.data.loader import build_loader
from pretrain.data.recipes import RECIPES
from pretrain.data.views import normalize


def load(cfg: CfgNode) -> Iterator[int]:
    """One epoch: the images of each batch, whose two views are ready for the encoder."""
    data = datasets.load(cfg.DATA.TRAIN, "train")
    recipes = [RECIPES[cfg.VIEWS.QUERY], RECIPES[cfg.VIEWS.KEY]]
    size, batch_size = cfg.VIEWS.IMAGE_SIZE, cfg.SOLVER.IMS_PER_BATCH
    loader = build_loader(cfg, data, recipes, torch.device("cpu"), size=size, batch_size=batch_size)
    for _, batch in loader.batches(0, len(loader)):
        normalize(batch.views_VNCHW, cfg.VIEWS.MEAN, cfg.VIEWS.STD)
        yield len(batch.index_N)


def train(cfg: CfgNode) -> Path:
    """A run of the pretraining stage; returns its folder."""
    pretraining.main(cfg)
    return Path(cfg.OUTPUT_DIR)
