"""The torchvision engine's loaders for training and evaluation.

A record's random choices are a function of (seed, position), the position being its place in the infinite training
stream: the same whatever the number of ranks and workers, and where a resumed run begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch.utils.data import DataLoader, Dataset

from pretrain.common.errors import UserError
from pretrain.common.workers import ShieldedDataLoader

from ..samplers import Batches, repeat_factors
from .mapper import Mapper, build_mapper
from .records import Records


class Mapped(Dataset):
    """Records in the form that the model expects; indexed by (position, index) in training.

    A bad item is returned as its `UserError`: raised in a worker, it would arrive as a traceback instead of one line.
    """

    def __init__(self, records: Sequence[dict[str, Any]], mapper: Mapper, seed: int | None) -> None:
        self.records = records if isinstance(records, Records) else Records(records)
        self.mapper, self.seed = mapper, seed

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, item: Any) -> dict[str, Any] | UserError:
        position, index = item if self.seed is not None else (0, item)
        record = self.records[index]
        try:
            return self.mapper(record, None if self.seed is None else np.random.default_rng([self.seed, position]))
        except UserError as error:
            return error


def training_batches(
    cfg: CfgNode, records: Sequence[dict[str, Any]], flip: Sequence[int], rank: int, world: int, *, seed: int,
    start: int, workers: int,
) -> Iterator[list[dict[str, Any]]]:  # fmt: skip
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
    batches = Batches(weights, wide, cfg.SOLVER.IMS_PER_BATCH // world, seed, rank, world, start)
    return _checked(_loader(cfg, Mapped(records, build_mapper(cfg, True, flip), seed), batches, workers))


def evaluation_batches(cfg: CfgNode, records: Sequence[dict[str, Any]], share: range) -> Iterator[list[dict[str, Any]]]:
    """The test images at the positions ``share``, one at a time.

    Raises:
        UserError: a record is bad.
    """
    if not share:
        return iter(())
    dataset = Mapped(records, build_mapper(cfg, False, ()), None)
    return _checked(_loader(cfg, dataset, [[index] for index in share], cfg.DATALOADER.NUM_WORKERS))


def _loader(cfg: CfgNode, dataset: Dataset, batches: Any, workers: int) -> DataLoader:
    pin = cfg.MODEL.DEVICE.startswith("cuda") and torch.cuda.is_available()  # copies from other memory would block
    return ShieldedDataLoader(dataset, batch_sampler=batches, num_workers=workers, collate_fn=list, pin_memory=pin)


def _checked(batches: DataLoader) -> Iterator[list[dict[str, Any]]]:
    for batch in batches:
        for record in batch:
            if isinstance(record, UserError):
                raise record
        yield batch
