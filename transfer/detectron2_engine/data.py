"""The Detectron2 engine's data: data sets named by two paths, their records, and the mapper of records."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from detectron2.data import (
    DatasetCatalog,
    DatasetFromList,
    DatasetMapper,
    MetadataCatalog,
    detection_utils,
)
from detectron2.data.build import filter_images_with_few_keypoints, filter_images_with_only_crowd_annotations
from detectron2.data.samplers import RepeatFactorTrainingSampler
from detectron2.data.transforms import ResizeShortestEdge
from detectron2.structures import BoxMode
from fvcore.common.config import CfgNode
from PIL import Image
from pycocotools import mask as coco_mask

from pretrain.common import images
from pretrain.common.errors import UserError

from ..coco.checks.masks import select_outlines
from ..coco.names import is_file_name
from ..coco.records import DataSet
from ..registries import MAPPERS
from ..training.samplers import Mapper, ModelInput, Record

_EXAMPLE = "example"  # the name of a data set with a made-up image


def register(data_set: DataSet, cfg: CfgNode) -> None:
    """Register a data set named by two paths with Detectron2, in place of an earlier run's; it knows all other names.

    Detectron2's mappers, and a user's, look for the metadata.
    """
    name = data_set.name
    if not is_file_name(name):
        return
    DatasetCatalog.pop(name, None)
    MetadataCatalog.pop(name, None)
    DatasetCatalog.register(name, partial(list_entries, data_set))
    names = {
        "thing_classes": [category["name"] for category in data_set.categories],
        "thing_dataset_id_to_contiguous_id": _map_labels(data_set),
    }
    if cfg.MODEL.KEYPOINT_ON:
        keypoint_names, pairs = data_set.find_keypoints()
        names |= {"keypoint_names": tuple(keypoint_names), "keypoint_flip_map": tuple(pairs)}
    files = {"json_file": str(data_set.source.annotations), "image_root": str(data_set.source.images)}
    MetadataCatalog.get(name).set(evaluator_type="coco", **files, **names)


def list_entries(data_set: DataSet) -> list[Any]:
    """Return a data set's images as Detectron2 reads them: those of its catalog, or of a file in COCO's format."""
    if data_set.entries is not None:
        return list(data_set.entries)
    labels = _map_labels(data_set)
    return [
        {
            "file_name": str(data_set.source.images / image["file_name"]),
            "height": image["height"],
            "width": image["width"],
            "image_id": image["id"],
            "annotations": [entry for record in annotations if (entry := convert_annotation(record, labels))],
        }
        for image, annotations in data_set.images or ()
    ]


def _map_labels(data_set: DataSet) -> dict[int, int]:
    """Return the label of each category id."""
    return {category["id"]: label for label, category in enumerate(data_set.categories)}


def convert_annotation(record: dict[str, Any], labels: dict[int, int]) -> dict[str, Any]:
    """Convert an annotation as Detectron2's `load_coco_json` does; return {} for one whose polygons have no area."""
    entry = {key: record[key] for key in ("iscrowd", "bbox") if key in record}
    mask: Any = record.get("segmentation")
    if mask:
        if not isinstance(mask, dict):
            mask = select_outlines(mask)
        elif isinstance(mask["counts"], list):
            uncompressed: Any = mask  # which pycocotools' stubs lack
            mask = coco_mask.frPyObjects(uncompressed, *mask["size"])
        if not mask:
            return {}
        entry["segmentation"] = mask
    if record.get("keypoints"):  # indices of pixels, whose centers are half a pixel further
        entry["keypoints"] = [value + 0.5 * (i % 3 != 2) for i, value in enumerate(record["keypoints"])]
    return entry | {"bbox_mode": BoxMode.XYWH_ABS, "category_id": labels[record["category_id"]]}


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


def load_training_records(
    cfg: CfgNode, data_sets: Mapping[str, DataSet]
) -> tuple[Sequence[Record], list[float], list[bool] | None]:
    """Return the entries of DATASETS.TRAIN that training uses, and what `Engine.load_training_set` returns of them."""
    entries: Any = [entry for name in cfg.DATASETS.TRAIN for entry in list_entries(data_sets[name])]
    if cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS:
        entries = filter_images_with_only_crowd_annotations(entries)
    if cfg.MODEL.KEYPOINT_ON:
        entries = filter_images_with_few_keypoints(entries, cfg.MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE)
    wide = None
    if cfg.DATALOADER.ASPECT_RATIO_GROUPING:
        wide = [entry["width"] > entry["height"] for entry in entries]
    return _pack(entries), compute_repeat_factors(cfg, entries), wide


def compute_repeat_factors(cfg: CfgNode, records: Sequence[Record]) -> list[float]:
    """Return how often each record occurs in a pass on average: with RepeatFactorTrainingSampler, rare ones do more."""
    if cfg.DATALOADER.SAMPLER_TRAIN != "RepeatFactorTrainingSampler":
        return [1.0] * len(records)
    content: Any = records
    return RepeatFactorTrainingSampler.repeat_factors_from_category_frequency(
        content, cfg.DATALOADER.REPEAT_THRESHOLD, sqrt=cfg.DATALOADER.REPEAT_SQRT
    ).tolist()


def example_config(cfg: CfgNode) -> CfgNode:
    """Return a config whose training set is a made-up one, with the metadata that the mapper reads."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg.DATASETS.TRAIN = (_EXAMPLE,)
    MetadataCatalog.pop(_EXAMPLE, None)
    names = [str(number) for number in range(cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS)]
    MetadataCatalog.get(_EXAMPLE).set(keypoint_names=names, keypoint_flip_map=())
    return cfg


def load_test_records(data_set: DataSet) -> Sequence[Record]:
    """Return the entries of a data set in DATASETS.TEST."""
    return _pack(list_entries(data_set))


def _pack(entries: list[Any]) -> Sequence[Record]:
    packed: Any = DatasetFromList(entries, copy=False)  # one block of bytes, which forked workers share
    return packed


def read_category_ids(data_set: DataSet) -> list[int]:
    """Return the category ids of a data set in the order of the labels."""
    labels = MetadataCatalog.get(data_set.name).get("thing_dataset_id_to_contiguous_id")
    if labels:
        return sorted(labels, key=labels.__getitem__)
    return [category["id"] for category in data_set.categories]
