"""The infinite, shuffled stream of training images, its batches and their loading, for both engines.

The content of a batch is a function of (seed, position in the stream), so that a resumed run continues in the middle of
a pass with the batches of an uninterrupted one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from pretrain.common.errors import UserError
from pretrain.common.run.workers import SignalSafeDataLoader


def index_stream(weights: Sequence[float], seed: int) -> Iterator[int]:
    """An endless stream of indices: each pass is shuffled and contains index i ``weights[i]`` >= 1 times on average."""
    whole = torch.tensor(weights).trunc()
    part = torch.tensor(weights) - whole
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.arange(len(whole))
        if part.any() or (whole > 1).any():
            extra = torch.rand(len(part), generator=generator) < part
            order = order.repeat_interleave((whole + extra).long())
        yield from order[torch.randperm(len(order), generator=generator)].tolist()


def index_batches(
    weights: Sequence[float], wide: Sequence[bool] | None, size: int, seed: int, rank: int, world: int, start: int
) -> Iterator[list[tuple[int, int]]]:
    """One process's endless batches of (position, index): every ``world``-th of the stream, grouped by aspect ratio.

    If ``wide`` is given, either all images of a batch are wider than high or none is, as Detectron2 groups them.
    ``start`` batches are skipped without reading an image.
    """
    buckets: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    stream = enumerate(index_stream(weights, seed))
    for position, index in itertools.islice(stream, rank, None, world):
        bucket = buckets[wide[index] if wide is not None else True]
        bucket.append((position, index))
        if len(bucket) == size:
            if start == 0:
                yield list(bucket)
            start = max(0, start - 1)
            bucket.clear()


class MappedRecords(Dataset):
    """Records as the model takes them, by (position in the stream, index).

    A bad record is returned as its `UserError`: raised in a worker, it would arrive as a traceback instead of one line.

    Args:
        mapper: (record, position) -> the model's input.
    """

    def __init__(self, records: Any, mapper: Callable[[dict[str, Any], int], dict[str, Any]]) -> None:
        self._records, self._mapper = records, mapper

    def __getitem__(self, item: tuple[int, int]) -> dict[str, Any] | UserError:
        position, index = item
        try:
            return self._mapper(self._records[index], position)
        except UserError as error:
            return error


def load(
    records: MappedRecords, batches: Iterable[list[tuple[int, int]]], workers: int, *, pin: bool = False
) -> Iterator[list[dict[str, Any]]]:
    """Yields the batches, in pinned memory if ``pin``; raises the UserError of a bad record."""
    for batch in SignalSafeDataLoader(records, batches, workers, collate_fn=list, pin_memory=pin):
        for record in batch:
            if isinstance(record, UserError):
                raise record
        yield batch


def mix(seed: int, iteration: int, rank: int) -> int:
    """One 63-bit seed from three numbers, by a multiplicative hash: neighboring ones get unrelated streams."""
    value = (seed * 0x9E3779B97F4A7C15 + iteration * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) & (2**64 - 1)
    return (value ^ (value >> 29)) & (2**63 - 1)
