r"""The infinite, shuffled stream of training images, its batches, and the loaders of training and evaluation.

A record's random choices and a batch's content are functions of (seed, position in the stream), so a run resumes in the
middle of a pass with the batches it would have had.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch.utils.data import DataLoader, Dataset, Sampler

from pretrain.common.errors import UserError
from pretrain.common.interrupt import ignore_in_worker

from .torchvision_data import CocoInfo, Mapper, mapper


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
        start = self.ends[index - 1] if index else 0
        record = pickle.loads(self.bytes[start : self.ends[index]].tobytes())
        try:
            return self.mapper(record, None if self.seed is None else np.random.default_rng([self.seed, position]))
        except UserError as error:
            return error


def index_stream(weights: Sequence[float], seed: int) -> Iterator[int]:
    """An endless stream of indices: every pass is shuffled and holds index i ``weights[i]`` times on average.

    Raises:
        ValueError: a weight below 1 (LVIS's repeat factors are at least 1).
    """
    whole = torch.tensor(weights).trunc()
    part = torch.tensor(weights) - whole
    if (whole < 1).any():
        raise ValueError("repeat factors are at least 1")
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.arange(len(whole))
        if part.any() or (whole > 1).any():
            extra = torch.rand(len(part), generator=generator) < part
            order = order.repeat_interleave((whole + extra).long())
        yield from order[torch.randperm(len(order), generator=generator)].tolist()


def repeat_factors(records: list[dict[str, Any]], threshold: float, square_root: bool) -> list[float]:
    """LVIS's repeat factor of every image: max over its categories of max(1, (threshold / frequency)^(1/2 or 1))."""
    present = [{a["label"] for a in record["annotations"]} for record in records]
    images = Counter(label for labels in present for label in labels)
    ratio = {label: threshold / (count / len(records)) for label, count in images.items()}
    factor = {label: max(1.0, math.sqrt(r) if square_root else r) for label, r in ratio.items()}
    return [max((factor[label] for label in labels), default=1.0) for labels in present]


class Batches(Sampler):
    """One process's endless batches of (position, index): every ``world``-th of the stream, grouped by aspect ratio.

    A batch holds images all wider than high or all not, if ``wide`` is given, as Detectron2 groups them. ``start``
    batches are passed over without reading an image.
    """

    def __init__(
        self,
        weights: Sequence[float],
        wide: Sequence[bool] | None,
        size: int,
        seed: int,
        rank: int,
        world: int,
        start: int,
    ) -> None:
        self.weights, self.wide, self.size, self.seed = weights, wide, size, seed
        self.rank, self.world, self.start = rank, world, start

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return itertools.islice(self._all(), self.start, None)

    def _all(self) -> Iterator[list[tuple[int, int]]]:
        buckets: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        stream = enumerate(index_stream(self.weights, self.seed))
        for position, index in itertools.islice(stream, self.rank, None, self.world):
            bucket = buckets[self.wide[index] if self.wide is not None else True]
            bucket.append((position, index))
            if len(bucket) == self.size:
                yield list(bucket)
                bucket.clear()


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
    return _loader(Records(records, mapper(cfg, True, info.flip), seed), workers, batch_sampler=batches)


def evaluation_loader(cfg: CfgNode, records: list[dict[str, Any]], rank: int, world: int) -> DataLoader:
    """This process's contiguous share of the test images, one at a time."""
    share = records[len(records) * rank // world : len(records) * (rank + 1) // world]
    if not share:
        return DataLoader([])  # type: ignore[arg-type]
    return _loader(Records(share, mapper(cfg, False, ()), None), cfg.DATALOADER.NUM_WORKERS, batch_size=1)


def _loader(dataset: Dataset, workers: int, **kwargs: Any) -> DataLoader:
    return DataLoader(dataset, num_workers=workers, collate_fn=list, worker_init_fn=ignore_in_worker, **kwargs)
