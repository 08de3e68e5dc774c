"""The infinite, shuffled stream of training images, its batches and their loading, for both engines.

The content of a batch is a function of (seed, position in the stream), so that a resumed run continues in the middle of
a pass with the batches of an uninterrupted one.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.utils.data import Dataset

from pretrain.common import distributed
from pretrain.common.errors import UserError
from pretrain.common.images import CorruptImage
from pretrain.common.interrupt import StopRequest
from pretrain.common.run.workers import SignalSafeDataLoader


class ImageFile(TypedDict):
    """An image of a data set; height and width are those of the file."""

    file_name: str
    image_id: int
    height: int
    width: int


class Record(ImageFile):
    """An image with its annotations, whose form is the engine's."""

    annotations: list[dict[str, Any]]


class ModelInput(ImageFile):
    """An image as a model takes it."""

    image: Tensor  # (3, H, W) uint8, resized
    target: Any  # only in the torchvision engine's training (`mapper.Target`); Detectron2 has `instances`


Mapper = Callable[[Record, tuple[int, int]], ModelInput]  # the numbers seed its random choices
Item = tuple[int, int]  # a position in the stream, and the index of the image there


def index_stream(weights: Sequence[float], seed: int) -> Iterator[int]:
    """Yield indices without end: each pass is shuffled and contains index i ``weights[i]`` >= 1 times on average."""
    whole = torch.tensor(weights).trunc()
    fraction = torch.tensor(weights) - whole
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.arange(len(whole))
        if fraction.any() or (whole > 1).any():
            extra = torch.rand(len(fraction), generator=generator) < fraction
            order = order.repeat_interleave((whole + extra).long())
        yield from order[torch.randperm(len(order), generator=generator)].tolist()


def index_batches(
    weights: Sequence[float], wide: Sequence[bool] | None, size: int, seed: int, rank: int, world_size: int, start: int
) -> Iterator[list[Item]]:
    """Yield one process's batches without end: every ``world_size``-th item of the stream, grouped by aspect ratio.

    If ``wide`` is given, either all images of a batch are wider than high or none is, as Detectron2 groups them.
    ``start`` batches are skipped without reading an image.
    """
    buckets: dict[bool, list[Item]] = {True: [], False: []}
    stream = enumerate(index_stream(weights, seed))
    for position, index in itertools.islice(stream, rank, None, world_size):
        bucket = buckets[wide[index] if wide is not None else True]
        bucket.append((position, index))
        if len(bucket) == size:
            if start == 0:
                yield list(bucket)
            start = max(0, start - 1)
            bucket.clear()


@dataclass(frozen=True)
class MappedRecords(Dataset):
    """Records as the model takes them, by (position in the stream, index).

    A bad record is returned as its `UserError`: raised in a worker, it would arrive as a traceback instead of one line.
    """

    records: Sequence[Record]
    mapper: Mapper
    seed: int = 0

    def image_name(self, item: Item) -> str:
        return self.records[item[1]]["file_name"]

    def __getitem__(self, item: Item) -> ModelInput | UserError:
        position, index = item
        try:
            return self.mapper(self.records[index], (self.seed, position))
        except UserError as error:
            return error
        except Exception as error:
            error.add_note(f"while mapping {self.image_name(item)}")
            raise


@dataclass(frozen=True)
class TrainingData:
    """The training images, and this rank's endless batches of them from any position.

    Attributes:
        repeat_factors: how often each record occurs in a pass on average, at least 1.
        batch_size: images of this rank per iteration.
        wide: whether each image is wider than high: either all images of a batch are, or none is; None to mix them.
        pin_memory: load into pinned memory, from which copies to a GPU do not block.
    """

    records: Sequence[Record]
    repeat_factors: Sequence[float]
    mapper: Mapper
    batch_size: int
    wide: Sequence[bool] | None
    pin_memory: bool

    def batches(
        self, *, seed: int, start: int, workers: int, stop: StopRequest | None = None
    ) -> Iterator[list[ModelInput]]:
        """Yield batches from number ``start`` on; raise the UserError of a bad record, with the remedy."""
        rank = distributed.rank()
        world_size = distributed.world_size()
        items = index_batches(self.repeat_factors, self.wide, self.batch_size, seed, rank, world_size, start)
        images = MappedRecords(self.records, self.mapper, seed)
        try:
            yield from load_batches(images, items, workers, pin_memory=self.pin_memory, stop=stop)
        except CorruptImage as error:
            raise CorruptImage(f"{error}, and run the same command with --resume") from error


def load_batches(
    images: MappedRecords,
    batches: Iterable[list[Item]],
    workers: int,
    *,
    pin_memory: bool = False,
    stop: StopRequest | None = None,
) -> Iterator[list[ModelInput]]:
    """Yield the batches; raise the UserError of a bad record."""
    options: dict[str, Any] = {"collate_fn": list, "pin_memory": pin_memory, "stop": stop}
    for batch in SignalSafeDataLoader(images, batches, workers, describe=images.image_name, **options):
        for image in batch:
            if isinstance(image, UserError):
                raise image
        yield batch


def derive_seed(seed: int, iteration: int, rank: int) -> int:
    """Return a 63-bit seed, by a multiplicative hash: neighboring iterations and ranks get unrelated streams."""
    value = (seed * 0x9E3779B97F4A7C15 + iteration * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) & (2**64 - 1)
    return (value ^ (value >> 29)) & (2**63 - 1)
