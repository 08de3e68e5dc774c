"""The Detectron2 engine's data: data sets named by two paths, their records, and the mapper of records."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from detectron2.data import (
    DatasetCatalog,
    DatasetFromList,
    DatasetMapper,
    MetadataCatalog,
    detection_utils,
    get_detection_dataset_dicts,
)
from detectron2.data.datasets import register_coco_instances
from detectron2.data.samplers import RepeatFactorTrainingSampler
from detectron2.data.transforms import ResizeShortestEdge
from fvcore.common.config import CfgNode
from PIL import Image

from pretrain.common import images
from pretrain.common.errors import UserError, one_line

from ..coco.data import CocoSet, read_annotations
from ..coco.keypoints import flip_pairs, keypoint_names
from ..registries import MAPPERS
from ..samplers import Mapper, ModelInput, Record


def register(data_set: CocoSet, cfg: CfgNode) -> None:
    """Register a data set named by two paths with Detectron2, which already knows every other name."""
    if data_set.name in DatasetCatalog:
        return
    metadata: dict[str, Any] = {}
    if cfg.MODEL.KEYPOINT_ON:
        content = read_annotations(data_set.annotations)
        pairs = tuple(flip_pairs(content) or ())
        metadata = {"keypoint_names": tuple(keypoint_names(content)), "keypoint_flip_map": pairs}
    register_coco_instances(data_set.name, metadata, str(data_set.annotations), str(data_set.images))


def build_mapper(cfg: CfgNode, is_train: bool) -> Mapper:
    """Build the mapper of records to the model's input: Detectron2's, or the user's that INPUT.MAPPER names."""
    mapper: Any = MAPPERS[cfg.INPUT.MAPPER] if cfg.INPUT.MAPPER else DatasetMapper
    if not is_train:  # Detectron2's would look for the keypoints' names in the training set, to flip images
        cfg = cfg.clone()
        cfg.defrost()
        cfg.MODEL.KEYPOINT_ON = False
    return partial(_map, mapper(cfg, is_train))


def _map(mapper: Callable[[Any], Any], record: Record, seeds: tuple[int, int]) -> ModelInput:
    """Map a record under NumPy's random state of ``seeds``."""
    adapt_detectron2()  # this process may be a new one of the loader
    words = [word & 0xFFFFFFFF for seed in seeds for word in (seed, seed >> 32)]
    np.random.seed(words)  # Detectron2's augmentations draw from the global state
    path = record["file_name"]
    try:
        image = mapper(record)
    except (OSError, detection_utils.SizeMismatchError) as error:
        raise UserError(f"{path} cannot be read: {error}; replace the image, or correct its annotations") from error
    if image is None:
        raise UserError(f"INPUT.MAPPER returned nothing for {path}; return a record")
    return image


def read_image(file_name: str, format: str | None = None) -> np.ndarray:
    """Read an image as Detectron2 does, except that 16 bits are scaled, not clipped, and a damaged PNG is an error.

    Raises:
        UserError: unreadable image.
    """
    pixels = images.read_image(file_name)
    if format == "BGR":
        return pixels[:, :, ::-1]
    return detection_utils.convert_PIL_to_numpy(Image.fromarray(pixels), format)


_output_shape = ResizeShortestEdge.get_output_shape


def get_output_shape(oldh: int, oldw: int, short_edge_length: int, max_size: int) -> tuple[int, int]:
    """Return Detectron2's resized (height, width), at least one pixel each, which 3000 x 2 would not keep."""
    height, width = _output_shape(oldh, oldw, short_edge_length, max_size)
    return max(1, height), max(1, width)


def adapt_detectron2() -> None:
    """Replace two functions of Detectron2, which its mappers and its test-time augmentation call, in this process."""
    detection_utils.read_image = read_image
    ResizeShortestEdge.get_output_shape = staticmethod(get_output_shape)


def load_training_records(cfg: CfgNode) -> tuple[Sequence[Record], list[float]]:
    """Load the registered records of DATASETS.TRAIN that training uses, and their repeat factors.

    Raises:
        UserError: no image is left, or Detectron2 rejects a set of its catalog.
    """
    try:
        records: Any = get_detection_dataset_dicts(
            cfg.DATASETS.TRAIN,
            filter_empty=cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS,
            min_keypoints=cfg.MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE if cfg.MODEL.KEYPOINT_ON else 0,
        )
    except AssertionError as error:
        names = ", ".join(cfg.DATASETS.TRAIN)
        raise UserError(f"{names} cannot be trained on: {one_line(error)}; correct the records") from error
    repeat_factors = [1.0] * len(records)
    if cfg.DATALOADER.SAMPLER_TRAIN == "RepeatFactorTrainingSampler":
        repeat_factors = RepeatFactorTrainingSampler.repeat_factors_from_category_frequency(
            records, cfg.DATALOADER.REPEAT_THRESHOLD, sqrt=cfg.DATALOADER.REPEAT_SQRT
        ).tolist()
    packed: Any = DatasetFromList(records, copy=False)  # one block of bytes, which forked workers share
    return packed, repeat_factors


def load_test_records(name: str) -> Sequence[Record]:
    """Load the records of a data set in DATASETS.TEST."""
    records: Any = get_detection_dataset_dicts(name, filter_empty=False)
    packed: Any = DatasetFromList(records, copy=False)
    return packed


def read_category_ids(data_set: CocoSet) -> list[int]:
    """Read the category ids of a data set whose records were loaded, in the order of the labels."""
    labels = MetadataCatalog.get(data_set.name).get("thing_dataset_id_to_contiguous_id")
    if labels:
        return sorted(labels, key=labels.__getitem__)
    content = read_annotations(data_set.annotations)
    return sorted(category["id"] for category in content["categories"])  # the labels are in the order of the ids
