"""Reads annotation files in COCO's format and selects the records that both engines read alike."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from pretrain.common.errors import UserError, count_noun, shorten_list
from pretrain.common.files import read_json
from pretrain.common.image_checks.class_names import warn_of_alike

from . import catalog
from .checks.bad_records import (
    SECTIONS,
    Problem,
    Rules,
    drop_bad,
    find_box_format_problem,
    find_problems,
    normalize,
)
from .checks.classes import category_names, check_same_categories
from .checks.missing_files import suggest_file
from .keypoints import is_flippable
from .names import COCO_SPLITS, Source, is_catalog_name

log = logging.getLogger(__name__)


def read_annotations(annotations: str | Path, *, needs_objects: bool = True) -> dict[str, Any]:
    """Read a COCO annotation file, without a check of its records.

    Args:
        needs_objects: refuse a file without annotations, such as those that describe COCO's test images.

    Raises:
        UserError: missing, not JSON, or without one list of images, annotations and categories each.
    """

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) < len(pairs):
            keys = [key for key, _ in pairs]
            for section in SECTIONS:
                if keys.count(section) > 1:
                    raise UserError(f"{annotations} has {section} twice, of which one would not be read; merge both")
        return record

    content = read_json(annotations, build=build)
    if not needs_objects:
        content.setdefault("annotations", [])
    for section in SECTIONS:
        if not isinstance(content.get(section), list):
            raise UserError(f"{annotations} has no list of {section}; COCO's format has {', '.join(SECTIONS)}")
    return content


def select_good_records(
    source: Source, content: Mapping[str, Any], cfg: CfgNode, *, decode: bool
) -> tuple[dict[str, Any], list[str]]:
    """Select a data set's good records as the engines read them (see `normalize`).

    Args:
        content: what `read_annotations` returns.
        decode: decode the images; see `read_upright_size`.

    Returns:
        The content with these records, and a description of each bad one.

    Raises:
        UserError: bad records that are not skipped, or data that are not for this detector.
    """
    model = cfg.MODEL
    path = str(source.annotations)
    for section, what in (("categories", "classes"), ("images", "images")):
        if not content[section]:
            raise UserError(f"{path} has no {section}: the export is empty; export the data again, with its {what}")
    keypoints = model.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS if model.KEYPOINT_ON else 0
    folder = (
        None if is_catalog_name(source.name) else source.images
    )  # Detectron2's catalog may map names to other files
    strict = source.name not in COCO_SPLITS  # COCO's files of 2014 have polygons of two points and boxes without height
    problems = find_problems(content, folder, Rules(model.MASK_ON and strict, keypoints, strict, decode))
    texts = [problem.text for problem in problems]
    _check_some_good(path, content, problems, folder)
    if problems and not source.skip_bad:
        remedy = "fix them, or skip them (coco:ANNOTATIONS:IMAGES:skip_bad)"
        raise UserError(f"{path} has {count_noun(len(texts), 'bad record')}: {shorten_list(texts, '; ')}; {remedy}")
    whole = drop_bad(content, problems)
    content = normalize(whole, masks=model.MASK_ON, keypoints=model.KEYPOINT_ON)
    if not (content["images"] and content["categories"]):
        raise UserError(f"{path} has no images or no categories left: {shorten_list(texts) or 'correct the file'}")
    box_problem = find_box_format_problem(content)
    if box_problem:
        raise UserError(f"{path}: {box_problem}")
    _check_categories(source, content, cfg)
    objects = [record for record in content["annotations"] if not record["iscrowd"]]
    if source.name in cfg.DATASETS.TRAIN:
        _check_trainable(path, content, objects, cfg, texts)
    return content if strict else whole, texts  # Detectron2 reads COCO's files as they are


def _check_some_good(
    path: str, content: Mapping[str, Any], problems: Sequence[Problem], folder: str | Path | None
) -> None:
    """Raise UserError if all images, all categories or all annotations are bad: skipping them would leave nothing."""
    section = problems[0].section if problems else ""  # those of later sections may follow from it
    if not problems or sum(problem.section == section for problem in problems) < len(content[section]):
        return
    remedy = "correct the file"
    image = content[section][0]
    name = image.get("file_name") if section == "images" and folder and isinstance(image, dict) else None
    if isinstance(name, str) and not os.path.exists(os.path.join(folder or "", name)):
        remedy = "correct the file" if suggest_file(folder or "", name) else f"is {folder} the folder of its images?"
    raise UserError(f"{path}: no {SECTIONS[section]} can be used: {problems[0].text}; {remedy}")


def _check_categories(source: Source, content: Mapping[str, Any], cfg: CfgNode) -> None:
    """Raise UserError for names that occur twice, that a catalog orders otherwise, or keypoints that cannot flip."""
    path = str(source.annotations)
    labels = category_names(content)
    repeated = next((label for label in labels if labels.count(label) > 1), "")
    if repeated:
        ids = [category["id"] for category in content["categories"] if category["name"] == repeated]
        raise UserError(f"{path}: categories {ids} are all called {repeated!r}; merge or rename them")
    warn_of_alike(labels, path)
    if is_catalog_name(source.name):
        known = catalog.read_metadata(source.name)
        if known.get("thing_classes") and not known.get("thing_dataset_id_to_contiguous_id"):  # by the order of ids
            check_same_categories({f"the thing_classes of {source.name}": known.thing_classes, path: labels})
        return
    flips = cfg.INPUT.RANDOM_FLIP == "horizontal" and source.name in cfg.DATASETS.TRAIN
    if cfg.MODEL.KEYPOINT_ON and flips and not is_flippable(content):
        problem = "its keypoint names do not distinguish left from right, or differ between categories"
        remedy = 'give each category "flip": [["LEFT", "RIGHT"], ...], or set INPUT.RANDOM_FLIP none'
        raise UserError(f"{path}: {problem}; {remedy}")


def _check_trainable(
    path: str,
    content: Mapping[str, Any],
    objects: Sequence[Mapping[str, Any]],
    cfg: CfgNode,
    skipped: Sequence[str],
) -> None:
    """Raise UserError if nothing can be learned from the objects, or their masks are in the wrong format."""
    if not objects and skipped and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS:
        raise UserError(f"{path} has no objects left: {shorten_list(skipped, '; ')}; fix them")
    if not objects and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS:
        crowds = " but crowds (iscrowd 1), which are not trained on; set iscrowd 0"
        raise UserError(f"{path} has no objects{crowds if content['annotations'] else ': annotate its images'}")
    needs_keypoints = cfg.MODEL.KEYPOINT_ON and cfg.MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE
    if needs_keypoints and not any(visible > 0 for record in objects for visible in record["keypoints"][2::3]):
        raise UserError(f"{path}: no keypoint is labeled; set the visibility of labeled ones to 1 or 2")
    has_rle = any(isinstance(record.get("segmentation"), dict) for record in objects)
    if has_rle and cfg.INPUT.MASK_FORMAT == "polygon":
        raise UserError(f"{path} has masks in RLE, not polygons; set INPUT.MASK_FORMAT bitmask")
