"""Data sets in COCO's format: standard names, or any other by two paths; checked before a run starts.

A name in DATASETS.TRAIN or DATASETS.TEST is one of COCO's (`coco_2017_train`, ..., under ``$DETECTRON2_DATASETS`` or
``datasets``), or `coco:ANNOTATIONS.json:IMAGE_FOLDER`. Bad records end the run before it starts;
`coco:ANNOTATIONS.json:IMAGE_FOLDER:skip_bad` skips them and says how many. COCO's own files of 2017 are not checked.
Both engines read the copy of a `coco:` data set that `prepare` writes into OUTPUT_DIR.
The Detectron2 engine also accepts any name in Detectron2's DatasetCatalog (see `catalog`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from pretrain.common.config.yaml_io import get
from pretrain.common.errors import UserError, did_you_mean, shorten_list
from pretrain.common.files import atomic_write, existing_file, read_json

from ..config import classes_key
from . import catalog
from .check import SECTIONS, SMALL, box_format_problem, check, drop_bad, share_of_small_boxes, unify
from .keypoints import is_flippable

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
CLASSES = "classes.json"  # in a run folder: the names of the detector's classes, in the order of its labels
Classes = Mapping[str, Sequence[str]]  # a data set's name, or a run's `CLASSES` -> `category_names`


@dataclass(frozen=True)
class CocoSet:
    """Where a data set is, and whether its bad records are skipped."""

    annotations: Path
    images: Path
    skip_bad: bool = False


def in_catalog(name: str) -> bool:
    """Whether only Detectron2's DatasetCatalog can know a name in DATASETS.TRAIN or DATASETS.TEST."""
    return not name.startswith("coco:") and name not in _SPLITS


def check_not_in_catalog(names: Iterable[str]) -> None:
    """Raises UserError for a name that the torchvision engine does not know."""
    for name in filter(in_catalog, names):
        raise UserError(
            f"data set {name!r} is not coco:ANNOTATIONS.json:IMAGE_FOLDER nor {', '.join(_SPLITS)}"
            f"{did_you_mean(name, _SPLITS)}; other names of Detectron2's DatasetCatalog need --engine detectron2"
        )


def find(name: str) -> CocoSet | None:
    """The data set of a name in DATASETS.TRAIN or DATASETS.TEST; None: one of Detectron2's catalog without files.

    Raises:
        UserError: unknown name, or files that are not where they are expected.
    """
    if name.startswith("coco:"):
        parts = name.split(":")
        if len(parts) not in (3, 4) or not all(parts) or parts[3:] not in ([], ["skip_bad"]):
            raise UserError(f"data set {name!r} is not coco:ANNOTATIONS.json:IMAGE_FOLDER or ...:skip_bad")
        data_set = CocoSet(Path(parts[1]), Path(parts[2]), skip_bad=len(parts) == 4)
        hint = f" of {name!r}, read as coco:ANNOTATIONS.json:IMAGE_FOLDER"
    elif name in _SPLITS:
        root = Path(os.environ.get("DETECTRON2_DATASETS", "datasets"))
        images, annotations = _SPLITS[name]
        data_set = CocoSet(root / "coco" / annotations, root / "coco" / images)
        hint = f" of {name}; COCO's annotations/ and {images}/ belong in {root / 'coco'}; or set DETECTRON2_DATASETS"
    else:
        if (files := catalog.files(name)) is None:
            return None
        data_set, hint = CocoSet(*files), f" of {name}"
    if not os.path.isfile(data_set.annotations):
        raise UserError(f"no annotation file at {data_set.annotations}{hint}")
    if not os.path.isdir(data_set.images):
        raise UserError(f"no image folder at {data_set.images}{hint}")
    return data_set


def resolve(name: str, output_dir: str | Path) -> tuple[Path, Path]:
    """The annotation file and the image folder of a data set that `prepare` has checked: the file is the copy in
    OUTPUT_DIR, if there is one.

    Raises:
        UserError: as `find`, or this machine does not see the copy.
    """
    data_set, copy = find(name), checked_copy(name, output_dir)
    if data_set is None:
        return copy, Path()
    has_copy = data_set.skip_bad or copy.is_file()
    return existing_file(copy, f"copy of {name}") if has_copy else data_set.annotations, data_set.images


def checked_copy(name: str, output_dir: str | Path) -> Path:
    return Path(output_dir) / "datasets" / f"{folder_name(name)}_checked.json"


def folder_name(name: str) -> str:
    """A short and unique name for files about a data set: two annotation files may have the same base name."""
    if not name.startswith("coco:"):
        return name
    _, annotations, images, *_ = name.split(":")
    paths = f"{os.path.abspath(annotations)}:{os.path.abspath(images)}"
    return f"{Path(annotations).stem}_{hashlib.sha256(paths.encode(errors='surrogateescape')).hexdigest()[:8]}"


def prepare(
    cfg: CfgNode, names: Sequence[str], log: Callable[[str], None] = print, recorded: Classes | None = None
) -> list[str]:
    """Finds and checks data sets before the first iteration, and writes the copies that `resolve` names.

    Args:
        recorded: of `preflight.recorded_classes`.

    Returns:
        The names of the detector's classes, in the order of its labels.

    Raises:
        UserError: no such data set, bad records (unless they may be skipped), or as `check_classes`.
    """
    prepared = {name: _prepare_one(name, cfg, log) for name in dict.fromkeys(names)}
    classes = {**(recorded or {}), **{name: labels for name, (labels, _) in prepared.items()}}
    check_classes(cfg, classes)
    train, test = (
        {image for name in split if name in prepared for image in prepared[name][1]}
        for split in (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST)
    )
    if shared := sorted(train & test):
        log(f"metrics are of training images: DATASETS.TRAIN and DATASETS.TEST share {shorten_list(shared)}")
    return list(next(iter(classes.values()), ()))


def check_early(cfg: CfgNode, names: Iterable[str], recorded: Classes | None = None) -> None:
    """Checks those data sets that are small before a job is started or queued; arguments and errors of `prepare`."""
    categories = dict(recorded or {})
    for name in names:
        data_set = find(name)
        if data_set is not None and data_set.annotations.stat().st_size < _LARGE_BYTES:
            content, _ = _checked(name, data_set, cfg, decode=False)
            categories[name] = category_names(content)
    check_classes(cfg, categories)


def category_names(content: Mapping[str, Any]) -> list[str]:
    """The categories' names in the order of their ids, which is the order of the detector's labels."""
    return [category["name"] for category in sorted(content["categories"], key=lambda category: category["id"])]


def check_same_categories(names: Classes, remedy: str = "give both the same categories in the same order") -> None:
    """Raises UserError where two differ, and names the first difference: labels are matched by their order alone."""
    (first, labels), *others = names.items() or [("", ())]
    for name, given in others:
        if len(labels) != len(given):
            (small, few), (large, many) = sorted([(first, labels), (name, given)], key=lambda item: len(item[1]))
            extra = shorten_list([repr(label) for label in many if label not in few])
            raise UserError(f"category {extra} is in {large}, but not in {small}; {remedy}")
        for n, (a, b) in enumerate(zip(labels, given, strict=True), 1):
            if a != b:
                raise UserError(f"category {n} in the order of ids is {a!r} in {first}, but {b!r} in {name}; {remedy}")


def check_classes(cfg: CfgNode, names: Classes) -> None:
    """Checks that a label means the same in all data sets, and that the detector has as many.

    Raises:
        UserError: two data sets differ, or the number of classes does.
    """
    if cfg.MODEL.META_ARCHITECTURE == "ProposalNetwork":  # has no classes
        return
    check_same_categories(names)
    key = classes_key(cfg)
    for name, labels in names.items():
        if len(labels) != get(cfg, key):
            raise UserError(f"{name} has {len(labels)} categories; set {key} {len(labels)}, not {get(cfg, key)}")


def _prepare_one(name: str, cfg: CfgNode, log: Callable[[str], None]) -> tuple[list[str], set[str]]:
    """The names of the categories, and the paths of the images; a set whose files are not read is its own image."""
    data_set = find(name)
    copy = checked_copy(name, cfg.OUTPUT_DIR)
    if data_set is None:
        by_coco = catalog.metadata(name).get("evaluator_type") not in catalog.OTHER_EVALUATORS
        return catalog.prepare(name, copy if name in cfg.DATASETS.TEST and by_coco else None), {name}
    if data_set.annotations.stat().st_size == _RELEASED_BYTES.get(data_set.annotations.name):
        return ["person"] if "person_keypoints" in data_set.annotations.name else _coco_names(), {name}
    content, notes = _checked(name, data_set, cfg, decode=name in cfg.DATASETS.TEST)
    if name.startswith("coco:"):  # Detectron2 reads others from their own files
        atomic_write(copy, json.dumps(content))
    for note in notes:
        log(f"{data_set.annotations}: {note}")
    pixels, most, folder = cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST, os.path.realpath(data_set.images)
    if (share := share_of_small_boxes(content, pixels, most)) >= 0.01:
        log(
            f"{data_set.annotations}: {share:.0%} of its boxes are narrower than {SMALL} pixels at INPUT.MIN_SIZE_TEST "
            f"{pixels} and MAX_SIZE_TEST {most}, and will hardly be found; raise INPUT.MIN_SIZE_* and MAX_SIZE_*"
        )
    return category_names(content), {os.path.join(folder, image["file_name"]) for image in content["images"]}


def _checked(name: str, data_set: CocoSet, cfg: CfgNode, *, decode: bool) -> tuple[dict[str, Any], list[str]]:
    """A data set's good records as the engines read them (see `unify`), and what to log about the others.

    Raises:
        UserError: bad records that are not skipped, or data that are not for this detector.
    """
    model, where = cfg.MODEL, str(data_set.annotations)
    content = read(where)
    if not content["categories"]:
        raise UserError(f"{where} has no categories: the export is empty; export the data again, with their classes")
    keypoints = model.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS if model.KEYPOINT_ON else 0
    folder = None if in_catalog(name) else data_set.images  # Detectron2's catalog may map names to other files
    strict = name not in _SPLITS  # COCO's files of 2014 have polygons of two points and boxes without height
    needed = {"masks": model.MASK_ON and strict, "keypoints": keypoints, "strict": strict, "decode": decode}
    problems = list(check(content, folder, **needed))
    texts = [problem.text for problem in problems]
    if problems and not data_set.skip_bad:
        raise UserError(
            f"{where}: {shorten_list(texts)}; fix them, or add :skip_bad to coco:ANNOTATIONS:IMAGES to skip them"
        )
    content = unify(drop_bad(content, problems), masks=model.MASK_ON, keypoints=model.KEYPOINT_ON)
    if not (content["images"] and content["categories"]):
        raise UserError(f"{where} has no images or no categories left: {shorten_list(texts) or 'correct the file'}")
    if text := box_format_problem(content):
        raise UserError(f"{where}: {text}")
    labels = category_names(content)
    if repeated := next((label for label in labels if labels.count(label) > 1), ""):
        ids = [category["id"] for category in content["categories"] if category["name"] == repeated]
        raise UserError(f"{where}: categories {ids} are all called {repeated!r}; make them one, or rename them")
    if in_catalog(name):
        known = catalog.metadata(name)
        if known.get("thing_classes") and not known.get("thing_dataset_id_to_contiguous_id"):  # by the order of ids
            check_same_categories({f"the thing_classes of {name}": known.thing_classes, where: labels})
    is_flipped = model.KEYPOINT_ON and cfg.INPUT.RANDOM_FLIP == "horizontal" and name in cfg.DATASETS.TRAIN
    if is_flipped and not in_catalog(name) and not is_flippable(content):
        raise UserError(
            f"{where}: its keypoint names do not distinguish left from right, alike in all categories; give each "
            'category "flip": [["LEFT", "RIGHT"], ...], or set INPUT.RANDOM_FLIP none'
        )
    objects = [record for record in content["annotations"] if not record["iscrowd"]]
    notes = [] if objects else ["it has no objects, or only crowds (iscrowd 1): nothing can be scored"]
    if name in cfg.DATASETS.TRAIN:
        if not objects and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS:
            crowds = " but crowds (iscrowd 1), which are not trained on; set iscrowd 0"
            raise UserError(f"{where} has no objects{crowds if content['annotations'] else ': annotate its images'}")
        least = keypoints and model.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE
        if least and not any(visible > 0 for record in objects for visible in record["keypoints"][2::3]):
            raise UserError(f"{where}: no keypoint is labeled; give those that are a visibility of 1 or 2")
        has_rle = any(isinstance(record.get("segmentation"), dict) for record in objects)
        if has_rle and cfg.INPUT.MASK_FORMAT == "polygon":
            raise UserError(f"{where} has masks in RLE, not polygons; set INPUT.MASK_FORMAT bitmask")
    if problems:
        numbers = ", ".join(f"{n} {section}" for section, n in Counter(p.section for p in problems).items())
        copy = checked_copy(name, cfg.OUTPUT_DIR)
        notes += [f"skipped bad records: {numbers}; {copy} lists them under left_out", *texts[:20]]
    return content | {"left_out": texts}, notes


def read(annotations: str | Path) -> dict[str, Any]:
    """The content of a COCO annotation file, whose records `prepare` checks.

    Raises:
        UserError: missing, not JSON, or without images, annotations and categories.
    """
    content = read_json(annotations)
    for section in SECTIONS:
        if not isinstance(content.get(section), list):
            raise UserError(f"{annotations} has no list of {section}; COCO's format has {', '.join(SECTIONS)}")
    return content


def _coco_names() -> list[str]:
    """The names of COCO's 80 categories, without reading its large files."""
    from torchvision.models.detection import FasterRCNN_ResNet50_FPN_Weights  # slow to import

    unused = ("__background__", "N/A")
    return [name for name in FasterRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"] if name not in unused]
