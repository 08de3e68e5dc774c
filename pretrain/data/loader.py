"""Decodes each image once and makes all its views; order and randomness do not depend on workers, ranks or history.

The order of an epoch is a function of (seed, epoch), and a view's randomness of (seed, epoch, image index, view
number). Global batches thus do not depend on the numbers of workers and processes, and a run can start at any step.

Shape letters: V views, n images of this rank's slice of a batch, C = 3 channels, H = W = S pixels.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torch.utils.data import Dataset

from ..common import distributed, interrupt
from ..common.errors import UserError, count_noun
from ..common.images import CorruptImage
from ..common.interrupt import StopRequest
from ..common.run.workers import SignalSafeDataLoader
from ..model.batch_split import check_batch_fits
from .augmentations import Augmentation
from .datasets import ImageData
from .views import choose_reduction, make_center_view, make_views

log = logging.getLogger(__name__)
VIEW = 0  # purposes of random streams
ORDER = 1


class Batch(NamedTuple):
    """This rank's slice of a global batch."""

    views_VnCHW: Tensor  # uint8, with the channels of a pixel side by side in memory
    index_n: Tensor  # int64, position in the data set of the image used
    label_n: Tensor  # int64, -1 where the image has no label
    replaced: dict[int, str]  # position -> error of the corrupt images that other images replace


@dataclass
class Loader:
    """Batches of views that depend on the seed and the step alone.

    Raises:
        UserError: the data set is smaller than a batch.
    """

    data: ImageData
    augmentations: Sequence[Augmentation]  # one per view
    size: int  # S
    _: KW_ONLY
    batch_size: int  # global; the last incomplete batch of an epoch is dropped
    batch_key: str = "SOLVER.IMS_PER_BATCH"  # which contains it
    seed: int
    rank: int = 0
    world_size: int = 1
    num_workers: int = 4  # 0 means that this process decodes
    on_corrupt: str = "error"  # or skip, which takes the next readable image instead
    reduced_decoding: bool = False  # decode JPEGs at the smallest size that leaves every crop S pixels per side
    pin_memory: bool = False  # for copies to a GPU without a host-device synchronization

    def __post_init__(self) -> None:
        check_batch_fits(self.batch_key, self.batch_size, len(self.data))
        self._corrupt_images: set[int] = set()
        chooser = functools.partial(choose_reduction, self.augmentations, self.size)
        self._choose_reduction = chooser if self.reduced_decoding else None

    def __len__(self) -> int:
        """Return the steps per epoch."""
        return len(self.data) // self.batch_size

    def batches(
        self, first_step: int, total_steps: int, stop: StopRequest | None = None
    ) -> Iterator[tuple[int, Batch]]:
        """Yield each step from ``first_step`` to before ``total_steps`` with its batch.

        Args:
            stop: a request that is obeyed even while a worker hangs.

        Raises:
            UserError: an image is corrupt; with ``on_corrupt`` skip, more than 1 image and 1 in 1,000 are.
        """
        items = self._order_items(first_step, total_steps)
        loaded = _load_batches(self._read_batch, items, self._name_item, self.num_workers, self.pin_memory, stop)
        for step, batch in enumerate(loaded, start=first_step):
            self._count_corrupt(batch.replaced)
            yield step, batch

    def _order_items(self, first_step: int, total_steps: int) -> Iterator[list[tuple[int, int]]]:
        """Yield for each step the (epoch, position) of each image of this rank."""
        rank_batch_size = self.batch_size // self.world_size
        order = None
        for step in range(first_step, total_steps):
            epoch, batch = divmod(step, len(self))
            if order is None or batch == 0:
                order = make_random_stream(self.seed, epoch, ORDER, 0).permutation(len(self.data))
            start = batch * self.batch_size + self.rank * rank_batch_size
            yield [(epoch, int(i)) for i in order[start : start + rank_batch_size]]

    def _name_item(self, item: tuple[int, int]) -> str:
        return self.data.image_name(item[1])

    def _read_batch(self, items: list[tuple[int, int]]) -> Batch:
        """Read a batch of (epoch, position) and make its views; runs in the workers."""
        views = np.empty((len(self.augmentations), len(items), self.size, self.size, 3), np.uint8)
        used = np.empty(len(items), np.int64)
        replaced: dict[int, str] = {}
        for n, (epoch, position) in enumerate(items):
            image, used[n] = self._read(position, replaced)
            view_rng = functools.partial(make_random_stream, self.seed, epoch, VIEW, position)
            views[:, n] = make_views(image, self.augmentations, self.size, view_rng)
        labels = np.full(len(used), -1, np.int64) if self.data.labels is None else self.data.labels[used]
        views_VnCHW = torch.from_numpy(views).permute(0, 1, 4, 2, 3)
        return Batch(views_VnCHW, torch.from_numpy(used), torch.from_numpy(labels), replaced)

    def _read(self, position: int, replaced: dict[int, str]) -> tuple[np.ndarray, int]:
        """Read an image; where it is corrupt and skipped, add it to ``replaced`` and read the next one."""
        for shift in range(len(self.data)):
            candidate = (position + shift) % len(self.data)
            try:
                return self.data.read(candidate, self._choose_reduction), candidate
            except CorruptImage as error:
                if self.on_corrupt != "skip":
                    raise
                replaced[candidate] = str(error)
        raise UserError(
            f"none of the {count_noun(len(self.data), 'image')} can be read; the first: {self.data.image_name(0)}"
        )

    def _count_corrupt(self, replaced: dict[int, str]) -> None:
        for position in replaced.keys() - self._corrupt_images:
            log.warning(f"{replaced[position]}; another image replaces it (DATALOADER.ON_CORRUPT skip)")
        self._corrupt_images.update(replaced)
        if len(self._corrupt_images) > max(1, len(self.data) // 1000):
            count = f"{len(self._corrupt_images)} of {len(self.data)} images"
            limit = "DATALOADER.ON_CORRUPT skip allows 1 in 1,000, or a single one"
            raise UserError(f"{count} are corrupt; {limit}; the last: {list(replaced.values())[-1]}")


def build_loader(
    cfg: CfgNode,
    data: ImageData,
    augmentations: list[Augmentation],
    device: torch.device,
    size: int,
    batch_size: int,
    batch_key: str = "SOLVER.IMS_PER_BATCH",
) -> Loader:
    """Build the `Loader` of this rank for ``device``; errors name the key that contains the batch size."""
    return Loader(
        data,
        augmentations,
        size,
        batch_size=batch_size,
        batch_key=batch_key,
        seed=cfg.SEED,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        num_workers=cfg.DATALOADER.NUM_WORKERS,
        on_corrupt=cfg.DATALOADER.ON_CORRUPT,
        reduced_decoding=cfg.DATALOADER.REDUCED_DECODING,
        pin_memory=device.type == "cuda",
    )


def load_eval_batches(
    data: ImageData,
    positions_N: np.ndarray,
    size: int,
    resize: int,
    batch_size: int,
    num_workers: int,
    on_corrupt: str = "error",
    pin_memory: bool = False,
    stop: StopRequest | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield evaluation views of the images at ``positions_N``: shorter side ``resize``, middle ``size`` x ``size``.

    Args:
        resize: 0 means that the image is resized straight to ``size`` x ``size``.
        on_corrupt: ``error``, or ``skip`` to drop unreadable images (their positions are not yielded).
        pin_memory: copy batches to a GPU without a host-device synchronization.
        stop: a request that is obeyed even while a worker hangs.

    Yields:
        (N, 3, S, S) uint8 and the images' positions (N,) int64; the last batch may be smaller.
    """
    batches = [positions_N[i : i + batch_size].tolist() for i in range(0, len(positions_N), batch_size)]
    read = functools.partial(_read_center_views, data, size, resize, on_corrupt == "skip")
    for images_NHWC, index_n in _load_batches(read, batches, data.image_name, num_workers, pin_memory, stop):
        yield images_NHWC.permute(0, 3, 1, 2), index_n


def make_random_stream(seed: int, epoch: int, purpose: int, index: int, view: int = 0) -> np.random.Generator:
    """Return the random stream of (seed, epoch, image index, view): a counter-based generator, 13 us to create."""
    key = np.array((seed, epoch), np.int64).astype(np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array((0, view, index, purpose), np.uint64)))


def _read_center_views(
    data: ImageData, size: int, resize: int, skip_corrupt: bool, positions: list[int]
) -> tuple[Tensor, Tensor]:
    """Read the images at ``positions``, without those that are corrupt and skipped; runs in the workers."""
    images: list[np.ndarray] = []
    read_positions: list[int] = []
    for position in positions:
        try:
            images.append(make_center_view(data.read(position), size, resize))
            read_positions.append(position)
        except CorruptImage:
            if not skip_corrupt:
                raise
    stacked = np.stack(images) if images else np.empty((0, size, size, 3), np.uint8)
    return torch.from_numpy(stacked), torch.tensor(read_positions, dtype=torch.int64)


@dataclass(frozen=True)
class _BatchReader(Dataset):
    """Calls ``read`` with a batch of positions, in a worker."""

    read: Callable[[Any], Any]

    def __getitems__(self, positions: Any) -> Any:
        try:
            return self.read(positions)
        except UserError as error:
            return error  # returned, because DataLoader would wrap it in a traceback


def _load_batches(
    read: Callable[[Any], Any],
    batches: Iterable[Any],
    describe: Callable[[Any], str],
    num_workers: int,
    pin_memory: bool,
    stop: StopRequest | None,
) -> Iterator[Any]:
    """Yield ``read(batch)`` for each of ``batches`` in order; a UserError of a worker is raised here.

    Args:
        describe: returns the name of an item's image.
    """
    options: dict[str, Any] = {"collate_fn": _identity, "worker_init_fn": _prepare_worker, "pin_memory": pin_memory}
    loader = SignalSafeDataLoader(_BatchReader(read), batches, num_workers, describe=describe, stop=stop, **options)
    for item in loader:
        if isinstance(item, CorruptImage):
            remedy = "do not delete it, because a run resumes only with the same images"
            raise CorruptImage(f"{item}, or set DATALOADER.ON_CORRUPT skip; {remedy}")
        if isinstance(item, UserError):
            raise item
        yield item


def _identity(loaded: Any) -> Any:
    return loaded


def _prepare_worker(worker: int) -> None:
    interrupt.ignore_in_worker(worker)
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
