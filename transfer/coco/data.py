"""Data sets in COCO's format: standard names, or any other by two paths; checked before a run starts.

A name in DATASETS.TRAIN or DATASETS.TEST is one of COCO's (`coco_2017_train`, ..., under ``$DETECTRON2_DATASETS`` or
``datasets``), or `coco:ANNOTATIONS.json:IMAGE_FOLDER`. Bad records of the latter end the run before it starts;
`coco:ANNOTATIONS.json:IMAGE_FOLDER:skip_bad` skips them and says how many. The Detectron2 engine also takes any name in
Detectron2's DatasetCatalog (see `catalog`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from pretrain.common.errors import UserError, nearest
from pretrain.common.image_io import open_upright
from pretrain.common.run_folder import atomic_write, read_json

from . import catalog
from .check import SECTIONS, Problem, box_format_problem, check, leave_out
from .keypoints import check_flips

_SPLITS = {  # name: (image folder, annotations), under the root's coco/; Detectron2's names
    f"{prefix}coco_{year}_{split}": (f"{split}{year}", f"annotations/{kind}_{split}{year}.json")
    for prefix, kind in (("", "instances"), ("keypoints_", "person_keypoints"))
    for year in ("2014", "2017")
    for split in ("train", "val")
}
_LARGE_BYTES = 16 * 2**20  # takes about a second to read and check


@dataclass(frozen=True)
class CocoSet:
    """Where a data set is, and what to do with its bad records (COCO's own releases are not checked before a run)."""

    annotations: Path
    images: Path
    standard: bool
    skip_bad: bool = False


def in_catalog(name: str) -> bool:
    """Whether only Detectron2's DatasetCatalog can know a name in DATASETS.TRAIN or DATASETS.TEST."""
    return not name.startswith("coco:") and name not in _SPLITS


def refuse_catalog(names: Iterable[str]) -> None:
    """Raises UserError for a name that the torchvision engine does not know."""
    for name in filter(in_catalog, names):
        raise UserError(
            f"data set {name!r} is not coco:ANNOTATIONS.json:IMAGE_FOLDER nor {', '.join(_SPLITS)}"
            f"{nearest(name, _SPLITS)}; other names of Detectron2's DatasetCatalog need --engine detectron2"
        )


def find(name: str) -> CocoSet | None:
    """The data set of a name in DATASETS.TRAIN or DATASETS.TEST; None: one of Detectron2's catalog without files.

    Raises:
        UserError: unknown name, or files that are not where they are expected.
    """
    if name.startswith("coco:"):
        words = name.split(":")
        if len(words) not in (3, 4) or not all(words) or words[3:] not in ([], ["skip_bad"]):
            raise UserError(f"data set {name!r} is not coco:ANNOTATIONS.json:IMAGE_FOLDER or ...:skip_bad")
        found = CocoSet(Path(words[1]), Path(words[2]), standard=False, skip_bad=len(words) == 4)
        hint = f" of {name!r}, read as coco:ANNOTATIONS.json:IMAGE_FOLDER"
    elif name in _SPLITS:
        root = Path(os.environ.get("DETECTRON2_DATASETS", "datasets"))
        images, annotations = _SPLITS[name]
        found = CocoSet(root / "coco" / annotations, root / "coco" / images, standard=True)
        hint = f" of {name}; COCO's annotations/ and {images}/ belong in {root / 'coco'}; or set DETECTRON2_DATASETS"
    else:
        if (files := catalog.files(name, _SPLITS)) is None:
            return None
        found, hint = CocoSet(*files, standard=False), f" of {name}"
    if not os.path.isfile(found.annotations):
        raise UserError(f"no annotation file at {found.annotations}{hint}")
    if not os.path.isdir(found.images):
        raise UserError(f"no image folder at {found.images}{hint}")
    return found


def resolve(name: str) -> tuple[Path, Path]:
    """The annotation file and the image folder of a name in DATASETS.TRAIN or DATASETS.TEST (see `find`).

    Raises:
        UserError: as `find`, or a data set without an annotation file.
    """
    if (found := find(name)) is None:
        raise UserError(f"data set {name} has no annotation file; Detectron2's DatasetCatalog has its records")
    return found.annotations, found.images


def truth(name: str, output_dir: str | Path) -> tuple[Path, Path]:
    """What the predictions on a prepared set of DATASETS.TEST are compared with: annotation file and image folder."""
    return resolve(name) if find(name) else (checked_copy(name, output_dir), Path())


def folder_name(name: str) -> str:
    """A short and unique name for files about a data set: two annotation files may have the same base name."""
    if not name.startswith("coco:"):
        return name
    annotations, images = resolve(name)
    paths = f"{os.path.abspath(annotations)}:{os.path.abspath(images)}"
    return f"{annotations.stem}_{hashlib.sha256(paths.encode(errors='surrogateescape')).hexdigest()[:8]}"


def checked_copy(name: str, output_dir: str | Path) -> Path:
    """The annotation file in a run folder that `prepare` writes: without the records that were skipped, or of a data
    set that has no file.
    """
    return Path(output_dir) / "datasets" / f"{folder_name(name)}_checked.json"


def prepare(cfg: CfgNode, log: Callable[[str], None] = print) -> CfgNode:
    """Finds and checks every data set of a config before the first iteration.

    Returns:
        ``cfg``; where records were skipped, the data set's name leads to a copy without them in OUTPUT_DIR/datasets.

    Raises:
        UserError: no such data set, bad records (unless they may be skipped), another number of categories, other
            categories than another data set's.
    """
    cfg = cfg.clone()
    cfg.defrost()
    done: dict[str, str] = {}
    categories: dict[str, list[str]] = {}
    for name in dict.fromkeys((*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)):
        done[name], names = _prepare_one(name, cfg, log)
        categories |= {name: names} if names else {}
    standard = next((name for name in done if name not in categories), "")
    if standard and categories:  # all of COCO's own sets have the same categories: one large file is enough
        categories[standard] = category_names(read(resolve(standard)[0]))
    check_same_categories(categories)
    cfg.DATASETS.TRAIN = tuple(done[name] for name in cfg.DATASETS.TRAIN)
    cfg.DATASETS.TEST = tuple(done[name] for name in cfg.DATASETS.TEST)
    cfg.freeze()
    return cfg


def refuse_unreadable(names: Iterable[str], num_classes: int) -> None:
    """Checks categories, and decodes the first and the last image, where that is fast: `prepare` checks every record.

    Raises:
        UserError: an image cannot be read, or the categories are not those of another data set or of the config.
    """
    categories: dict[str, list[str]] = {}
    for name in names:
        found = find(name)
        if found is None or found.skip_bad or (not found.standard and _is_large(found.annotations)):
            continue
        if found.standard:
            listed = sorted(name for name in os.listdir(found.images) if name.endswith(".jpg"))
            images = [found.images / listed[end] for end in (0, -1) if listed]  # not from the file, which is large
        else:
            content = _parse(found.annotations)
            if any(True for _ in check(content)):
                continue  # prepare names the records
            images = [found.images / content["images"][end]["file_name"] for end in (0, -1) if content["images"]]
            categories[name] = category_names(content)
            _check_count(len(categories[name]), num_classes, str(found.annotations))
        for path in images:
            open_upright(str(path))
    check_same_categories(categories)


def _is_large(annotations: Path) -> bool:
    return annotations.stat().st_size > _LARGE_BYTES


def category_names(content: Mapping[str, Any]) -> list[str]:
    """The categories' names in the order of their ids, which is the order of the detector's labels."""
    return [category["name"] for category in sorted(content["categories"], key=lambda category: category["id"])]


def check_same_categories(names: Mapping[str, Sequence[str]]) -> None:
    """Data set -> its `category_names`: a label means the same in all of them.

    Raises:
        UserError: two data sets differ; labels would be matched by their order alone.
    """
    first, *others = names.items() or [("", ())]
    for name, given in others:
        for label, (a, b) in enumerate(zip_longest(first[1], given)):
            if a != b:
                raise UserError(
                    f"category {label + 1} in the order of ids is {a!r} in {first[0]}, but {b!r} in {name}; "
                    "give the data sets of DATASETS.TRAIN and DATASETS.TEST the same categories in the same order"
                )


def _prepare_one(name: str, cfg: CfgNode, log: Callable[[str], None]) -> tuple[str, list[str]]:
    """The name to use instead, and the categories' names (none for COCO's own, whose large files are not read)."""
    found = find(name)
    classes = cfg.MODEL.ROI_HEADS.NUM_CLASSES
    if found is None:
        judged = name in cfg.DATASETS.TEST and catalog.has_coco_metrics(name)
        copy = checked_copy(name, cfg.OUTPUT_DIR) if judged else None
        names = catalog.prepare(name, copy)
        _check_count(len(names), classes, name)
        return name, names
    if in_catalog(name):
        names = category_names(read(found.annotations))
        if (own := catalog.unmapped_classes(name)) is not None:
            check_same_categories({f"the thing_classes of {name}": own, str(found.annotations): names})
        _check_count(len(names), classes, name)
        return name, names
    if found.standard:
        _check_count(1 if name.startswith("keypoints_") else 80, classes, name)
        return name, []
    content = _parse(found.annotations)
    _check_kinds(content, cfg, found.annotations)
    keypoints = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS if cfg.MODEL.KEYPOINT_ON else 0
    if text := box_format_problem(content):
        raise UserError(f"{found.annotations}: {text}")
    is_flipped = cfg.MODEL.KEYPOINT_ON and cfg.INPUT.RANDOM_FLIP == "horizontal" and name in cfg.DATASETS.TRAIN
    problems = list(check(content, found.images, masks=cfg.MODEL.MASK_ON, keypoints=keypoints))
    if problems and not found.skip_bad:
        shown = "; ".join(problem.text for problem in problems[:5])
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError(f"{found.annotations}: {shown}{more}; fix them, or add :skip_bad to skip these records")
    if problems:
        target = checked_copy(name, cfg.OUTPUT_DIR)
        if ":" in str(target):
            raise UserError(f"OUTPUT_DIR {cfg.OUTPUT_DIR} has a colon, which :skip_bad cannot use; name another folder")
        content = leave_out(content, problems) | {"left_out": _left_out(found, target, problems)}
        atomic_write(target, json.dumps(content))
        log(content["left_out"]["summary"])
        for problem in problems[:20]:
            log(f"  {problem.text}")
        name = f"coco:{target}:{found.images}"
    if is_flipped:
        check_flips(content, str(found.annotations))
    _check_count(len(content["categories"]), classes, str(found.annotations))
    return name, category_names(content)


def _check_kinds(content: Mapping[str, Any], cfg: CfgNode, where: Path) -> None:
    """Refuses data without a single mask (or keypoints), which were made for another detector."""
    for key, field in (("MASK_ON", "segmentation"), ("KEYPOINT_ON", "keypoints")):
        records = content["annotations"]
        if cfg.MODEL[key] and records and not any(isinstance(r, dict) and r.get(field) for r in records):
            raise UserError(f"{where}: none of its {len(records)} objects has {field}; set MODEL.{key} False")


def _left_out(found: CocoSet, target: Path, problems: Sequence[Problem]) -> dict[str, Any]:
    """What a cleaned copy records about itself; the engines put the summary into the run's log."""
    counts = Counter(problem.section for problem in problems)
    numbers = ", ".join(f"{n} {section}" for section, n in counts.items())
    summary = f"{found.annotations}: skipped bad records: {numbers}; {target} lists them under left_out"
    return {"summary": summary, "records": [problem.text for problem in problems]}


@functools.cache
def say_once(say: Callable[[str], None], text: str) -> None:
    """Logs ``text`` once per process: the engines read a test set before every evaluation."""
    say(text)


def read(annotations: str | Path) -> dict[str, Any]:
    """The content of a COCO annotation file (of a cleaned copy: with ``left_out``, see `prepare`).

    Raises:
        UserError: missing, not JSON, without images, annotations and categories, or with a record that would crash a
            reader or pycocotools.
    """
    content = _parse(annotations)
    if problem := next(check(content), None):
        raise UserError(
            f"{annotations}: {problem.text}; correct it, or name the data set coco:ANNOTATIONS:IMAGES:skip_bad"
        )
    return content


def _parse(annotations: str | Path) -> dict[str, Any]:
    """`read` for `check`, which names every bad record itself."""
    content = read_json(annotations)
    for section in SECTIONS:
        if not isinstance(content.get(section), list):
            raise UserError(f"{annotations} has no list of {section}; COCO's format has {', '.join(SECTIONS)}")
    return content


def _check_count(categories: int, num_classes: int, where: str) -> None:
    if categories != num_classes:
        raise UserError(
            f"{where} has {categories} categories; set MODEL.ROI_HEADS.NUM_CLASSES {categories}, not {num_classes}"
        )
