"""Data sets in COCO's format: standard names, or any other by two paths; checked before a run starts.

A name in DATASETS.TRAIN or DATASETS.TEST is one of COCO's (`coco_2017_train`, ..., under ``$DETECTRON2_DATASETS`` or
``datasets``), or `coco:ANNOTATIONS.json:IMAGE_FOLDER`. Bad records end the run before it starts;
`coco:ANNOTATIONS.json:IMAGE_FOLDER:skip_bad` skips them and says how many. Images to test on, and those that may be
skipped, are decoded once; of other training images, the header and the end are read. COCO's own files of 2017 are not
checked.
Both engines read the copy of a `coco:` data set that `prepare_data_sets` writes into OUTPUT_DIR.
The Detectron2 engine also accepts any name in Detectron2's DatasetCatalog (see `catalog`).
"""

import dataclasses
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from pretrain.common.errors import UserError, count_noun, shorten_list, suggest_name
from pretrain.common.files import atomic_write, check_file, expand, read_json, suggest_making

from . import catalog, check
from .classes import Classes, category_names, check_classes, check_same_categories, read_coco_names
from .equal_files import find_equal_files
from .keypoints import is_flippable, list_named_keypoints

_SPLITS = {  # name: (image folder, annotations), under the root's coco/; Detectron2's names
    f"{prefix}coco_{year}_{split}": (f"{split}{year}", f"annotations/{kind}_{split}{year}.json")
    for prefix, kind in (("", "instances"), ("keypoints_", "person_keypoints"))
    for year in ("2014", "2017")
    for split in ("train", "val")
}
_RELEASED_BYTES = {  # COCO's own files, which need no check
    "instances_train2017.json": 469_785_474,
    "instances_val2017.json": 19_987_840,
    "person_keypoints_train2017.json": 238_884_731,
    "person_keypoints_val2017.json": 10_020_657,
}
_LARGE_BYTES = 16 * 2**20  # takes about a second to read and check
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CocoSet:
    """A data set of DATASETS.TRAIN or DATASETS.TEST with its files.

    Attributes:
        name: as in the config.
        annotations: the file that is read: the user's, or the checked copy (see `resolve_data_set`).
        images: the folder that contains its images.
        skip_bad: bad records are skipped rather than refused.
    """

    name: str
    annotations: Path
    images: Path
    skip_bad: bool = False


def in_catalog(name: str) -> bool:
    """Return whether only Detectron2's DatasetCatalog can know a name in DATASETS.TRAIN or DATASETS.TEST."""
    return not name.startswith("coco:") and name not in _SPLITS


def check_not_in_catalog(names: Iterable[str]) -> None:
    """Raise UserError for a name that the torchvision engine does not know."""
    for name in filter(in_catalog, names):
        problem = f"data set {name!r} is not coco:ANNOTATIONS.json:IMAGE_FOLDER nor {', '.join(_SPLITS)}"
        remedy = "other names of Detectron2's DatasetCatalog need --engine detectron2"
        raise UserError(f"{problem}{suggest_name(name, _SPLITS)}; {remedy}")


def find_data_set(name: str) -> CocoSet | None:
    """Find the files of a data set in DATASETS.TRAIN or DATASETS.TEST.

    Returns None for a data set in Detectron2's catalog that has no files in COCO's format.

    Raises:
        UserError: unknown name, or files that are not where they are expected.
    """
    if name.startswith("coco:"):
        fields = name.split(":")
        if len(fields) not in (3, 4) or not all(fields) or fields[3:] not in ([], ["skip_bad"]):
            raise UserError(f"data set {name!r} must be coco:ANNOTATIONS.json:IMAGE_FOLDER, or the same with :skip_bad")
        data_set = CocoSet(name, Path(expand(fields[1])), Path(expand(fields[2])), skip_bad=len(fields) == 4)
        hint = f" of {name!r}, read as coco:ANNOTATIONS.json:IMAGE_FOLDER"
    elif name in _SPLITS:
        root = Path(os.environ.get("DETECTRON2_DATASETS", "datasets")) / "coco"
        folder, file = _SPLITS[name]
        data_set = CocoSet(name, root / file, root / folder)
        hint = f" of {name}; COCO's annotations/ and {folder}/ belong in {root}; or set DETECTRON2_DATASETS"
    else:
        files = catalog.find_files(name)
        if files is None:
            return None
        data_set = CocoSet(name, *files)
        hint = f" of {name}"
    if not os.path.isfile(data_set.annotations):
        raise UserError(f"no annotation file at {data_set.annotations}{hint}{suggest_making(data_set.annotations)}")
    if not os.path.isdir(data_set.images):
        raise UserError(f"no image folder at {data_set.images}{hint}{suggest_making(data_set.images)}")
    return data_set


def resolve_data_set(name: str, output_dir: str | Path) -> CocoSet:
    """Find a data set that `prepare_data_sets` has checked, with its copy in OUTPUT_DIR as annotations if there is one.

    Raises:
        UserError: as `find_data_set`, or this machine does not see the copy.
    """
    data_set = find_data_set(name)
    copy = find_checked_copy(name, output_dir)
    if data_set is None:
        return CocoSet(name, copy, Path())
    if data_set.skip_bad or copy.is_file():
        return dataclasses.replace(data_set, annotations=check_file(copy, f"copy of {name}"))
    return data_set


def find_checked_copy(name: str, output_dir: str | Path) -> Path:
    """Return the path of the copy that contains a data set's good records."""
    return Path(output_dir) / "datasets" / f"{folder_name(name)}_checked.json"


def folder_name(name: str) -> str:
    """Return a short and unique name for files about a data set: two annotation files may have the same base name."""
    if not name.startswith("coco:"):
        return name
    _, annotations, images, *_ = name.split(":")
    paths = f"{os.path.abspath(annotations)}:{os.path.abspath(images)}"
    return f"{Path(annotations).stem}_{hashlib.sha256(paths.encode(errors='surrogateescape')).hexdigest()[:8]}"


def prepare_data_sets(
    cfg: CfgNode, names: Iterable[str], recorded: Classes | None = None, *, early: bool = False
) -> list[str]:
    """Check data sets before the first iteration, and write the copies that `resolve_data_set` returns.

    Args:
        recorded: what `preflight.read_recorded_classes` returns.
        early: check only the sets that are read in about a second, without decoding images, and write nothing.

    Returns:
        The names of the detector's classes, in the order of its labels.

    Raises:
        UserError: no such data set, bad records (unless they may be skipped), or as `check_classes`.
    """
    classes = dict(recorded or {})
    keypoints: dict[str, list[str]] = {}
    images: dict[str, set[str]] = {}
    for name in dict.fromkeys(names):
        data_set = find_data_set(name)
        size = data_set.annotations.stat().st_size if data_set else 0
        if early and (data_set is None or size >= _LARGE_BYTES):
            continue
        if data_set is None:
            is_scored_by_coco = catalog.read_metadata(name).get("evaluator_type") not in catalog.OTHER_EVALUATORS
            copy = find_checked_copy(name, cfg.OUTPUT_DIR) if name in cfg.DATASETS.TEST and is_scored_by_coco else None
            classes[name] = catalog.prepare(name, copy)
        elif size == _RELEASED_BYTES.get(data_set.annotations.name):
            classes[name] = ["person"] if "person_keypoints" in data_set.annotations.name else read_coco_names()
        else:
            decode = not early and (data_set.skip_bad or name in cfg.DATASETS.TEST)
            content = _read_good_records(data_set, cfg, decode=decode)
            classes[name] = category_names(content)
            keypoints[name] = list_named_keypoints(content) if cfg.MODEL.KEYPOINT_ON else []
            folder = os.path.realpath(data_set.images)
            images[name] = {os.path.join(folder, image["file_name"]) for image in content["images"]}
            if not early:
                _write_copy(data_set, cfg, content)
    check_classes(cfg, classes, keypoints)
    if not early:
        images = {name: images.get(name, {name}) for name in names}  # of a set that is not read, its name alone
        train = set().union(*(images.get(name, ()) for name in cfg.DATASETS.TRAIN))
        test = set().union(*(images.get(name, ()) for name in cfg.DATASETS.TEST))
        _report_shared_images(train, test)
    return list(next(iter(classes.values()), ()))


check_data_sets_early = partial(prepare_data_sets, early=True)  # before a job is started or queued


def _report_shared_images(train: set[str], test: set[str]) -> None:
    """Log the test images that are training images, by their path or their content, and their number."""
    equal = find_equal_files(train - test, test - train)
    shared = [*sorted(train & test), *(f"{path}, which equals {other}" for path, other in sorted(equal.items()))]
    if shared:
        what = f"DATASETS.TRAIN and DATASETS.TEST share {len(shared):,} of {len(test):,}: {shorten_list(shared)}"
        log.warning(f"metrics are computed on training images: {what}")


def _write_copy(data_set: CocoSet, cfg: CfgNode, content: Mapping[str, Any]) -> None:
    """Write the copy of a data set's good records; log its skipped and repeated records, and that it has no objects."""
    name = data_set.name
    copy = find_checked_copy(name, cfg.OUTPUT_DIR)
    if name.startswith("coco:"):  # Detectron2 reads others from their own files
        atomic_write(copy, json.dumps(content))
    skipped = content["skipped_records"]
    if skipped:
        count = count_noun(len(skipped), "bad record")
        log.info(f"{name}: skipped {count}, which {copy} lists: {shorten_list(skipped)}")
    if all(record["iscrowd"] for record in content["annotations"]):
        log.info(f"{name} has no objects, or only crowds (iscrowd 1): nothing can be scored")
    boxes = [(record["image_id"], record["category_id"], *record["bbox"]) for record in content["annotations"]]
    repeated = [f"{box[2:]} of image {box[0]!r}" for box, count in Counter(boxes).items() if count > 1]
    if repeated:
        log.info(f"{name}: {len(repeated)} boxes occur more than once, and count as often: {shorten_list(repeated)}")


def _read_good_records(data_set: CocoSet, cfg: CfgNode, *, decode: bool) -> dict[str, Any]:
    """Read a data set's good records as the engines do (see `normalize`), and list the bad ones in skipped_records.

    Raises:
        UserError: bad records that are not skipped, or data that are not for this detector.
    """
    model = cfg.MODEL
    path = str(data_set.annotations)
    content = read_annotations(path)
    if not content["categories"]:
        raise UserError(f"{path} has no categories: the export is empty; export the data again, with its classes")
    keypoints = model.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS if model.KEYPOINT_ON else 0
    folder = None if in_catalog(data_set.name) else data_set.images  # Detectron2's catalog may map names to other files
    strict = data_set.name not in _SPLITS  # COCO's files of 2014 have polygons of two points and boxes without height
    problems = check.find_problems(content, folder, check.Rules(model.MASK_ON and strict, keypoints, strict, decode))
    texts = [problem.text for problem in problems]
    if problems and not data_set.skip_bad:
        bad_images = [problem.text for problem in problems if problem.section == "images"]
        if bad_images and len(bad_images) == len(content["images"]):
            raise UserError(f"{path}: no image can be used: {bad_images[0]}; is {folder} the folder of its images?")
        remedy = "fix them, or skip them (coco:ANNOTATIONS:IMAGES:skip_bad)"
        raise UserError(f"{path} has {count_noun(len(texts), 'bad record')}: {shorten_list(texts, '; ')}; {remedy}")
    content = check.normalize(check.drop_bad(content, problems), masks=model.MASK_ON, keypoints=model.KEYPOINT_ON)
    if not (content["images"] and content["categories"]):
        raise UserError(f"{path} has no images or no categories left: {shorten_list(texts) or 'correct the file'}")
    box_problem = check.find_box_format_problem(content)
    if box_problem:
        raise UserError(f"{path}: {box_problem}")
    _check_categories(data_set, content, cfg)
    objects = [record for record in content["annotations"] if not record["iscrowd"]]
    if data_set.name in cfg.DATASETS.TRAIN:
        _check_trainable(path, content, objects, cfg)
    return content | {"skipped_records": texts}


def _check_categories(data_set: CocoSet, content: Mapping[str, Any], cfg: CfgNode) -> None:
    """Raise UserError for names that occur twice, that a catalog orders otherwise, or keypoints that cannot flip."""
    path = str(data_set.annotations)
    labels = category_names(content)
    repeated = next((label for label in labels if labels.count(label) > 1), "")
    if repeated:
        ids = [category["id"] for category in content["categories"] if category["name"] == repeated]
        raise UserError(f"{path}: categories {ids} are all called {repeated!r}; merge or rename them")
    if in_catalog(data_set.name):
        known = catalog.read_metadata(data_set.name)
        if known.get("thing_classes") and not known.get("thing_dataset_id_to_contiguous_id"):  # by the order of ids
            check_same_categories({f"the thing_classes of {data_set.name}": known.thing_classes, path: labels})
        return
    flips = cfg.INPUT.RANDOM_FLIP == "horizontal" and data_set.name in cfg.DATASETS.TRAIN
    if cfg.MODEL.KEYPOINT_ON and flips and not is_flippable(content):
        problem = "its keypoint names do not distinguish left from right, or differ between categories"
        remedy = 'give each category "flip": [["LEFT", "RIGHT"], ...], or set INPUT.RANDOM_FLIP none'
        raise UserError(f"{path}: {problem}; {remedy}")


def _check_trainable(path: str, content: Mapping[str, Any], objects: Sequence[Mapping[str, Any]], cfg: CfgNode) -> None:
    """Raise UserError if nothing can be learned from the objects, or their masks are in the wrong format."""
    if not objects and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS:
        crowds = " but crowds (iscrowd 1), which are not trained on; set iscrowd 0"
        raise UserError(f"{path} has no objects{crowds if content['annotations'] else ': annotate its images'}")
    needs_keypoints = cfg.MODEL.KEYPOINT_ON and cfg.MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE
    if needs_keypoints and not any(visible > 0 for record in objects for visible in record["keypoints"][2::3]):
        raise UserError(f"{path}: no keypoint is labeled; set the visibility of labeled ones to 1 or 2")
    has_rle = any(isinstance(record.get("segmentation"), dict) for record in objects)
    if has_rle and cfg.INPUT.MASK_FORMAT == "polygon":
        raise UserError(f"{path} has masks in RLE, not polygons; set INPUT.MASK_FORMAT bitmask")


def read_annotations(annotations: str | Path) -> dict[str, Any]:
    """Read a COCO annotation file, whose records `prepare_data_sets` checks.

    Raises:
        UserError: missing, not JSON, or without images, annotations and categories.
    """
    content = read_json(annotations)
    for section in check.SECTIONS:
        if not isinstance(content.get(section), list):
            raise UserError(f"{annotations} has no list of {section}; COCO's format has {', '.join(check.SECTIONS)}")
    return content
