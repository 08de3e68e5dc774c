"""The Detectron2 engine's data: sets by two paths, and training batches from any position of stock's stream."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from detectron2.data import (
    DatasetCatalog,
    DatasetFromList,
    DatasetMapper,
    build_detection_test_loader,
    detection_utils,
    get_detection_dataset_dicts,
)
from detectron2.data.build import trivial_batch_collator
from detectron2.data.datasets import register_coco_instances
from detectron2.data.detection_utils import SizeMismatchError
from detectron2.data.samplers import RepeatFactorTrainingSampler
from detectron2.utils import comm
from fvcore.common.config import CfgNode
from torch.utils.data import Dataset

from pretrain.common.errors import UserError
from pretrain.common.image_io import open_upright
from pretrain.common.interrupt import stop_requested
from pretrain.common.workers import ShieldedDataLoader

from ..coco import data as coco_data
from ..stream import Batches

log = logging.getLogger("detectron2.transfer")


def register(name: str) -> None:
    """Makes a data set by two paths known to Detectron2; the standard names are, already."""
    annotations, images = coco_data.resolve(name)
    detection_utils.read_image = read_image  # every DatasetMapper, ours and stock's, looks it up there
    content = coco_data.read(annotations)  # a standard one too: pycocotools does not check what it is given
    if name in DatasetCatalog:
        return
    metadata: dict[str, Any] = {}
    if "left_out" in content:
        coco_data.say_once(log.warning, content["left_out"]["summary"])
    names = next((c["keypoints"] for c in content["categories"] if c.get("keypoints")), None)
    if names:
        pairs = [(left, left.replace("left", "right")) for left in names if "left" in left]
        flips = [(left, right) for left, right in pairs if right in names]
        metadata |= {"keypoint_names": tuple(names), "keypoint_flip_map": tuple(flips)}
    register_coco_instances(name, metadata, str(annotations), str(images))


def read_image(file_name: str, format: str | None = None) -> np.ndarray:
    """Detectron2's reader, but 16 bits are scaled where its own clips, and a damaged PNG fails where its own is black.

    Raises:
        UserError: unreadable image.
    """
    return detection_utils.convert_PIL_to_numpy(open_upright(file_name), format)


class TrainingBatches:
    """This rank's endless batches, stock Detectron2's for the same seed, from batch ``start`` on.

    Stock's loader begins its stream anew when a run resumes, and draws resize and flip from a history of its own. Here
    the images of a batch and their random choices are functions of (seed, position). ``seed`` and ``start`` may be set
    until iteration begins.
    """

    def __init__(self, cfg: CfgNode, seed: int) -> None:
        self.seed, self.start = seed, 0
        self._workers = cfg.DATALOADER.NUM_WORKERS
        self._size = cfg.SOLVER.IMS_PER_BATCH // comm.get_world_size()
        self._mapper = DatasetMapper(cfg, True)  # type: ignore[call-arg]
        keypoints = cfg.MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE if cfg.MODEL.KEYPOINT_ON else 0
        records: Any = get_detection_dataset_dicts(
            cfg.DATASETS.TRAIN,
            filter_empty=cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS,
            min_keypoints=keypoints,
            proposal_files=cfg.DATASETS.PROPOSAL_FILES_TRAIN if cfg.MODEL.LOAD_PROPOSALS else None,
        )
        self._weights: Sequence[float] = [1.0] * len(records)
        if cfg.DATALOADER.SAMPLER_TRAIN == "RepeatFactorTrainingSampler":
            self._weights = RepeatFactorTrainingSampler.repeat_factors_from_category_frequency(
                records, cfg.DATALOADER.REPEAT_THRESHOLD, sqrt=cfg.DATALOADER.REPEAT_SQRT
            ).tolist()
        grouped = cfg.DATALOADER.ASPECT_RATIO_GROUPING
        self._wide = [record["width"] > record["height"] for record in records] if grouped else None
        self._records = DatasetFromList(records, copy=False)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        rank, world = comm.get_rank(), comm.get_world_size()
        batches = Batches(self._weights, self._wide, self._size, self.seed, rank, world, self.start)
        loader = ShieldedDataLoader(
            _Mapped(self._records, _OrError(self._mapper), self.seed),
            batch_sampler=batches,
            num_workers=self._workers,
            collate_fn=trivial_batch_collator,
        )
        yield from _raising(loader)


class _OrError:
    """A mapper that returns a UserError: raised in a worker it would lose its one line."""

    def __init__(self, mapper: Callable[[dict[str, Any]], Any]) -> None:
        self._mapper = mapper

    def __call__(self, record: dict[str, Any]) -> Any:
        try:
            return self._mapper(record)
        except UserError as error:
            return error
        except (OSError, SizeMismatchError) as error:
            return UserError(f"{record['file_name']} cannot be read: {error}")


def _raising(loader: Any) -> Iterator[list[Any]]:
    """A loader's batches; raises what `_OrError` returned."""
    for batch in loader:
        for record in batch:
            if isinstance(record, UserError):
                raise record
        yield batch


class _TestBatches:
    """A loader's batches, with the length that Detectron2 wants; they end early when a stop is requested."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[Any]]:
        return itertools.takewhile(lambda _: not stop_requested(), _raising(self._loader))


class _Mapped(Dataset):
    """Records by (position, index), mapped by Detectron2 under numpy's random state of (seed, position)."""

    def __init__(self, records: Dataset, mapper: Callable[[dict[str, Any]], Any], seed: int) -> None:
        self._records, self._mapper, self._seed = records, mapper, seed

    def name(self, item: tuple[int, int]) -> str:
        """The image file of an item."""
        return self._records[item[1]]["file_name"]

    def __getitem__(self, item: tuple[int, int]) -> dict[str, Any] | UserError:
        position, index = item
        words = [part & 0xFFFFFFFF for number in (self._seed, position) for part in (number, number >> 32)]
        np.random.seed(words)  # Detectron2's augmentations draw from the global state
        return self._mapper(self._records[index])


def test_batches(cfg: CfgNode, name: str) -> Any:
    """Stock's test batches of this rank, one image each; an unreadable image ends them with one line.

    They end early when a stop is requested: what was evaluated is then incomplete.
    """
    stock: Any = build_detection_test_loader(cfg, name, mapper=dict)  # type: ignore[call-arg, misc]  # its records
    loader = ShieldedDataLoader(
        _Mapped(stock.dataset, _OrError(DatasetMapper(cfg, False)), seed=0),  # type: ignore[call-arg]
        batch_sampler=[[(index, index)] for index in stock.sampler],
        num_workers=cfg.DATALOADER.NUM_WORKERS,
        collate_fn=trivial_batch_collator,
    )
    return _TestBatches(loader)
