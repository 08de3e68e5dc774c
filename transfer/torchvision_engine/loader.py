"""The torchvision engine's loaders of training and evaluation.

A record's random choices are a function of (seed, position in the stream), as a batch's content is.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch.utils.data import DataLoader, Dataset

from pretrain.common.errors import UserError
from pretrain.common.workers import ShieldedDataLoader

from ..stream import Batches, repeat_factors
from .data import CocoInfo
from .mapper import Mapper, build_mapper


class Records(Dataset):
    """Records as one block of bytes, so that forked workers share it; indexed by (position, index) in training.

    An item that cannot be made comes back as its `UserError`: a worker's exception would lose its one line.
    """

    def __init__(self, records: list[dict[str, Any]], mapper: Mapper, seed: int | None) -> None:
        packed = [np.frombuffer(pickle.dumps(r, -1), np.uint8) for r in records]
        self.ends = np.cumsum([len(p) for p in packed])
        self.bytes = np.concatenate(packed)
        self.mapper, self.seed = mapper, seed

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, item: Any) -> dict[str, Any] | UserError:
        position, index = item if self.seed is not None else (0, item)
        record = self._record(index)
        try:
            return self.mapper(record, None if self.seed is None else np.random.default_rng([self.seed, position]))
        except UserError as error:
            return error

    def name(self, item: Any) -> str:
        """The image file of an item."""
        return self._record(item if self.seed is None else item[1])["file_name"]

    def _record(self, index: int) -> dict[str, Any]:
        start = self.ends[index - 1] if index else 0
        return pickle.loads(self.bytes[start : self.ends[index]].tobytes())


def training_loader(
    cfg: CfgNode,
    records: list[dict[str, Any]],
    info: CocoInfo,
    *,
    seed: int,
    rank: int,
    world: int,
    start: int,
    workers: int,
) -> DataLoader:
    """Endless batches of this process, from batch ``start`` on; SOLVER.IMS_PER_BATCH counts all processes' images.

    Raises:
        UserError: the batch cannot be divided among the processes.
    """
    if cfg.SOLVER.IMS_PER_BATCH % world or cfg.SOLVER.IMS_PER_BATCH < 1:
        raise UserError(
            f"SOLVER.IMS_PER_BATCH is {cfg.SOLVER.IMS_PER_BATCH}; it must be a multiple of the {world} processes"
        )
    loader = cfg.DATALOADER
    weights: Sequence[float] = [1.0] * len(records)
    if loader.SAMPLER_TRAIN == "RepeatFactorTrainingSampler":
        weights = repeat_factors(records, loader.REPEAT_THRESHOLD, loader.REPEAT_SQRT)
    wide = [r["width"] > r["height"] for r in records] if loader.ASPECT_RATIO_GROUPING else None
    batches = Batches(weights, wide, cfg.SOLVER.IMS_PER_BATCH // world, seed, rank, world, start)
    return _loader(cfg, Records(records, build_mapper(cfg, True, info.flip), seed), workers, batch_sampler=batches)


def evaluation_loader(cfg: CfgNode, records: list[dict[str, Any]], rank: int, world: int) -> DataLoader:
    """This process's contiguous share of the test images, one at a time."""
    share = records[len(records) * rank // world : len(records) * (rank + 1) // world]
    if not share:
        return DataLoader([])  # type: ignore[arg-type]
    batches = [[i] for i in range(len(share))]
    return _loader(
        cfg, Records(share, build_mapper(cfg, False, ()), None), cfg.DATALOADER.NUM_WORKERS, batch_sampler=batches
    )


def _loader(cfg: CfgNode, dataset: Dataset, workers: int, **kwargs: Any) -> DataLoader:
    pin = cfg.MODEL.DEVICE.startswith("cuda") and torch.cuda.is_available()  # so that copies to the device do not wait
    return ShieldedDataLoader(dataset, num_workers=workers, collate_fn=list, pin_memory=pin, **kwargs)
