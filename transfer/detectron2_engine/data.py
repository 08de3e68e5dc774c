"""The Detectron2 engine's data: data sets named by two paths, and batches from any position of Detectron2's stream."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from detectron2.data import DatasetCatalog, DatasetFromList, DatasetMapper, detection_utils, get_detection_dataset_dicts
from detectron2.data.datasets import register_coco_instances
from detectron2.data.samplers import InferenceSampler, RepeatFactorTrainingSampler
from detectron2.data.transforms import AugInput
from detectron2.utils import comm
from fvcore.common.config import CfgNode
from torch.utils.data import Dataset

from pretrain.common.errors import UserError
from pretrain.common.image_io import open_upright
from pretrain.common.interrupt import stop_requested
from pretrain.common.workers import ShieldedDataLoader

from .. import MAPPERS
from ..coco.data import find, read
from ..coco.keypoints import flip_pairs, keypoint_names
from ..samplers import Batches


def register(name: str, *, keypoints: bool = False) -> None:
    """Registers a data set named by two paths with Detectron2, which already knows every other name.

    Args:
        keypoints: reads their names.
    """
    if name in DatasetCatalog or (found := find(name)) is None:
        return
    metadata: dict[str, Any] = {}
    if keypoints:
        content = read(found.annotations)
        pairs = tuple(flip_pairs(content) or ())
        metadata = {"keypoint_names": tuple(keypoint_names(content)), "keypoint_flip_map": pairs}
    register_coco_instances(name, metadata, str(found.annotations), str(found.images))


def build_mapper(cfg: CfgNode, is_train: bool) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What maps a record to the model's input: this engine's `Mapper`, or the user's that INPUT.MAPPER names."""
    mapper: Any = MAPPERS[cfg.INPUT.MAPPER] if "MAPPER" in cfg.INPUT else Mapper
    return mapper(cfg, is_train)


def read_image(file_name: str, format: str | None = None) -> np.ndarray:
    """An image as Detectron2 reads it, except that 16 bits are scaled, not clipped, and a damaged PNG is an error.

    Raises:
        UserError: unreadable image.
    """
    return detection_utils.convert_PIL_to_numpy(open_upright(file_name), format)


class Mapper(DatasetMapper):
    """Detectron2's mapper with this project's `read_image`."""

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any]:
        """Args: dataset_dict: of Detectron2's format; it is modified."""
        record = dataset_dict
        augmented = AugInput(read_image(record["file_name"], self.image_format))
        detection_utils.check_image_size(record, augmented.image)
        transforms = self.augmentations(augmented)
        image: Any = augmented.image
        record["image"] = torch.as_tensor(np.ascontiguousarray(image.transpose(2, 0, 1)))
        if self.proposal_topk is not None:
            detection_utils.transform_proposals(record, image.shape[:2], transforms, proposal_topk=self.proposal_topk)
        if not self.is_train:
            record.pop("annotations", None)
        elif "annotations" in record:
            self._transform_annotations(record, transforms, image.shape[:2])
        return record


class TrainingBatches:
    """The training images, and endless batches of them for this rank: Detectron2's own for the same seed.

    The images of a batch and their random choices are functions of (seed, position in the stream). Detectron2's loader
    restarts its stream when a run resumes, and its resizes and flips depend on all earlier ones.
    """

    def __init__(self, cfg: CfgNode) -> None:
        self._size = cfg.SOLVER.IMS_PER_BATCH // comm.get_world_size()
        self._mapper = build_mapper(cfg, True)
        try:
            records: Any = get_detection_dataset_dicts(
                cfg.DATASETS.TRAIN,
                filter_empty=cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS,
                min_keypoints=cfg.MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE if cfg.MODEL.KEYPOINT_ON else 0,
                proposal_files=cfg.DATASETS.PROPOSAL_FILES_TRAIN if cfg.MODEL.LOAD_PROPOSALS else None,
            )
        except AssertionError as error:
            if "No valid data found" not in str(error):
                raise
            raise UserError(f"no image of {', '.join(cfg.DATASETS.TRAIN)} has annotations to train on") from error
        self._weights: Sequence[float] = [1.0] * len(records)
        if cfg.DATALOADER.SAMPLER_TRAIN == "RepeatFactorTrainingSampler":
            self._weights = RepeatFactorTrainingSampler.repeat_factors_from_category_frequency(
                records, cfg.DATALOADER.REPEAT_THRESHOLD, sqrt=cfg.DATALOADER.REPEAT_SQRT
            ).tolist()
        grouped = cfg.DATALOADER.ASPECT_RATIO_GROUPING
        self._wide = [record["width"] > record["height"] for record in records] if grouped else None
        self._records = DatasetFromList(records, copy=False)

    def __len__(self) -> int:
        """Images."""
        return len(self._records)

    def batches(self, *, seed: int, start: int, workers: int) -> Iterator[list[dict[str, Any]]]:
        """The batches from number ``start`` on."""
        rank, world = comm.get_rank(), comm.get_world_size()
        batches = Batches(self._weights, self._wide, self._size, seed, rank, world, start)
        return _load(_Mapped(self._records, self._mapper, seed), batches, workers)


class TestBatches:
    """This rank's share of a data set in DATASETS.TEST, one image per batch.

    The batches end early when a stop is requested: what was evaluated is then incomplete.
    """

    def __init__(self, cfg: CfgNode, name: str) -> None:
        self._workers = cfg.DATALOADER.NUM_WORKERS
        self._mapper = build_mapper(cfg, False)
        proposals = dict(zip(cfg.DATASETS.TEST, cfg.DATASETS.PROPOSAL_FILES_TEST, strict=False))
        records: Any = get_detection_dataset_dicts(
            name, filter_empty=False, proposal_files=[proposals[name]] if cfg.MODEL.LOAD_PROPOSALS else None
        )
        self._records = DatasetFromList(records, copy=False)
        self._share = list(InferenceSampler(len(self._records)))

    def __len__(self) -> int:
        return len(self._share)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        batches = [[(index, index)] for index in self._share]
        loaded = _load(_Mapped(self._records, self._mapper, seed=0), batches, self._workers)
        return itertools.takewhile(lambda _: not stop_requested(), loaded)


class _Mapped(Dataset):
    """Records by (position, index), mapped under NumPy's random state of (seed, position).

    A bad record becomes a UserError. If it were raised in a worker process, it would arrive as a traceback instead of
    one line.
    """

    def __init__(self, records: Dataset, mapper: Callable[[dict[str, Any]], dict[str, Any]], seed: int) -> None:
        self._records, self._mapper, self._seed = records, mapper, seed

    def __getitem__(self, item: tuple[int, int]) -> dict[str, Any] | UserError:
        position, index = item
        words = [part & 0xFFFFFFFF for number in (self._seed, position) for part in (number, number >> 32)]
        np.random.seed(words)  # Detectron2's augmentations draw from the global state
        record = self._records[index]
        path = record["file_name"]
        try:
            mapped = self._mapper(record)
        except UserError as error:
            return error
        except (OSError, detection_utils.SizeMismatchError) as error:
            return UserError(f"{path} cannot be read: {error}")
        return UserError(f"INPUT.MAPPER returned nothing for {path}; return a record") if mapped is None else mapped


def _load(dataset: _Mapped, batches: Iterable[list[tuple[int, int]]], workers: int) -> Iterator[list[dict[str, Any]]]:
    """Yields the batches; raises the UserError of a bad record."""
    loader = ShieldedDataLoader(dataset, batch_sampler=batches, num_workers=workers, collate_fn=list)
    for batch in loader:
        for record in batch:
            if isinstance(record, UserError):
                raise record
        yield batch
