"""The Detectron2 engine's data: data sets named by two paths, and batches from any position of Detectron2's stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from detectron2.data import DatasetCatalog, DatasetFromList, DatasetMapper, detection_utils, get_detection_dataset_dicts
from detectron2.data.datasets import register_coco_instances
from detectron2.data.samplers import InferenceSampler, RepeatFactorTrainingSampler
from detectron2.data.transforms import ResizeShortestEdge
from detectron2.utils import comm
from fvcore.common.config import CfgNode

from pretrain.common.errors import UserError, one_line
from pretrain.common.images import open_upright

from .. import MAPPERS
from ..coco.data import find, read, resolve
from ..coco.keypoints import flip_pairs, keypoint_names
from ..samplers import MappedRecords, index_batches, load


def register(name: str, cfg: CfgNode) -> None:
    """Registers a data set named by two paths with Detectron2, which already knows every other name."""
    if name in DatasetCatalog or find(name) is None:
        return
    data_set = resolve(name, cfg.OUTPUT_DIR)
    metadata: dict[str, Any] = {}
    if cfg.MODEL.KEYPOINT_ON:
        content = read(data_set.annotations)
        pairs = tuple(flip_pairs(content) or ())
        metadata = {"keypoint_names": tuple(keypoint_names(content)), "keypoint_flip_map": pairs}
    register_coco_instances(name, metadata, str(data_set.annotations), str(data_set.images))


def build_mapper(cfg: CfgNode, is_train: bool) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What maps a record to the model's input: Detectron2's, or the user's that INPUT.MAPPER names."""
    mapper: Any = MAPPERS[cfg.INPUT.MAPPER] if cfg.INPUT.get("MAPPER") else DatasetMapper
    if not is_train:  # Detectron2's would look for the keypoints' names in the training set, to flip images
        cfg = cfg.clone()
        cfg.defrost()
        cfg.MODEL.KEYPOINT_ON = False
    return mapper(cfg, is_train)


def read_image(file_name: str, format: str | None = None) -> np.ndarray:
    """An image as Detectron2 reads it, except that 16 bits are scaled, not clipped, and a damaged PNG is an error.

    Raises:
        UserError: unreadable image.
    """
    return detection_utils.convert_PIL_to_numpy(open_upright(file_name), format)


detection_utils.read_image = read_image  # which every mapper calls
_output_shape = ResizeShortestEdge.get_output_shape


def get_output_shape(oldh: int, oldw: int, short_edge_length: int, max_size: int) -> tuple[int, int]:
    """Return the resized (height, width) of Detectron2, at least one pixel each, which 3000 x 2 would not keep."""
    height, width = _output_shape(oldh, oldw, short_edge_length, max_size)
    return max(1, height), max(1, width)


ResizeShortestEdge.get_output_shape = staticmethod(get_output_shape)


def training_data(cfg: CfgNode) -> tuple[Callable[..., Iterator[list[dict[str, Any]]]], int]:
    """A function of (seed, start, workers) to this rank's endless batches from number ``start`` on; the images' number.

    The order is Detectron2's for the same seed. The images of a batch and their random choices are functions of (seed,
    position in the stream). Detectron2's loader restarts its stream when a run resumes, and its resizes and flips
    depend on all earlier ones.
    """
    for name in cfg.DATASETS.TRAIN:
        register(name, cfg)
    try:
        records: Any = get_detection_dataset_dicts(
            cfg.DATASETS.TRAIN,
            filter_empty=cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS,
            min_keypoints=cfg.MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE if cfg.MODEL.KEYPOINT_ON else 0,
            proposal_files=cfg.DATASETS.PROPOSAL_FILES_TRAIN if cfg.MODEL.LOAD_PROPOSALS else None,
        )
    except AssertionError as error:  # of a set of Detectron2's catalog
        raise UserError(f"{', '.join(cfg.DATASETS.TRAIN)} cannot be trained on: {one_line(error)}") from error
    weights: Sequence[float] = [1.0] * len(records)
    if cfg.DATALOADER.SAMPLER_TRAIN == "RepeatFactorTrainingSampler":
        weights = RepeatFactorTrainingSampler.repeat_factors_from_category_frequency(
            records, cfg.DATALOADER.REPEAT_THRESHOLD, sqrt=cfg.DATALOADER.REPEAT_SQRT
        ).tolist()
    grouped = cfg.DATALOADER.ASPECT_RATIO_GROUPING
    wide = [record["width"] > record["height"] for record in records] if grouped else None
    dataset = DatasetFromList(records, copy=False)
    mapper = build_mapper(cfg, True)
    rank, world = comm.get_rank(), comm.get_world_size()

    def batches(*, seed: int, start: int, workers: int) -> Iterator[list[dict[str, Any]]]:
        stream = index_batches(weights, wide, cfg.SOLVER.IMS_PER_BATCH // world, seed, rank, world, start)
        return load(MappedRecords(dataset, partial(_map, mapper, seed)), stream, workers)

    return batches, len(dataset)


def test_batches(cfg: CfgNode, name: str) -> tuple[Iterator[list[dict[str, Any]]], int]:
    """This rank's share of a data set in DATASETS.TEST, one image per batch, and the number of these images."""
    proposals = dict(zip(cfg.DATASETS.TEST, cfg.DATASETS.PROPOSAL_FILES_TEST, strict=False))
    records: Any = get_detection_dataset_dicts(
        name, filter_empty=False, proposal_files=[proposals[name]] if cfg.MODEL.LOAD_PROPOSALS else None
    )
    batches = [[(index, index)] for index in InferenceSampler(len(records))]
    return load(test_images(cfg, records), batches, cfg.DATALOADER.NUM_WORKERS), len(batches)


def test_images(cfg: CfgNode, records: list[dict[str, Any]]) -> MappedRecords:
    """Records as the model takes them in an evaluation."""
    return MappedRecords(DatasetFromList(records, copy=False), partial(_map, build_mapper(cfg, False), 0))


def _map(
    mapper: Callable[[dict[str, Any]], dict[str, Any]], seed: int, record: dict[str, Any], position: int
) -> dict[str, Any]:
    """Maps a record under NumPy's random state of (seed, position)."""
    seeds = [part & 0xFFFFFFFF for number in (seed, position) for part in (number, number >> 32)]
    np.random.seed(seeds)  # Detectron2's augmentations draw from the global state
    path = record["file_name"]
    try:
        mapped = mapper(record)
    except (OSError, detection_utils.SizeMismatchError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if mapped is None:
        raise UserError(f"INPUT.MAPPER returned nothing for {path}; return a record")
    return mapped
