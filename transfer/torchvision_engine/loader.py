"""The torchvision engine's batches for training and evaluation.

A record's random choices are a function of (seed, position), the position being its place in the infinite training
stream: the same whatever the number of ranks and workers, and where a resumed run begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode

from pretrain.common.distributed import rank, world_size

from ..samplers import Batches, Mapped, load, repeat_factors
from .data import Records
from .mapper import Mapper, build_mapper


def training_batches(
    cfg: CfgNode, records: Records, flip: Sequence[int], *, seed: int, start: int, workers: int
) -> Iterator[list[dict[str, Any]]]:
    """Endless batches of this rank, from batch ``start`` on; SOLVER.IMS_PER_BATCH counts all ranks' images.

    Args:
        flip: the index of every keypoint's mirror image.

    Raises:
        UserError: a record is bad.
    """
    loader = cfg.DATALOADER
    weights: Sequence[float] = [1.0] * len(records)
    if loader.SAMPLER_TRAIN == "RepeatFactorTrainingSampler":
        weights = repeat_factors(records, loader.REPEAT_THRESHOLD, loader.REPEAT_SQRT)
    wide = [r["width"] > r["height"] for r in records] if loader.ASPECT_RATIO_GROUPING else None
    batches = Batches(weights, wide, cfg.SOLVER.IMS_PER_BATCH // world_size(), seed, rank(), world_size(), start)
    mapped = Mapped(records, partial(_augment, build_mapper(cfg, True, flip), seed))
    return load(mapped, batches, workers, pin=_pin(cfg))


def evaluation_batches(cfg: CfgNode, records: Records, share: range) -> Iterator[list[dict[str, Any]]]:
    """The test images at the positions ``share``, one at a time.

    Raises:
        UserError: a record is bad.
    """
    mapped = Mapped(records, partial(_map, build_mapper(cfg, False, ())))
    return load(mapped, [[(index, index)] for index in share], cfg.DATALOADER.NUM_WORKERS, pin=_pin(cfg))


def _augment(mapper: Mapper, seed: int, record: dict[str, Any], position: int) -> dict[str, Any]:
    return mapper(record, np.random.default_rng([seed, position]))


def _map(mapper: Mapper, record: dict[str, Any], _: int) -> dict[str, Any]:
    return mapper(record, None)


def _pin(cfg: CfgNode) -> bool:
    return cfg.MODEL.DEVICE == "cuda" and torch.cuda.is_available()  # copies from other memory would block
