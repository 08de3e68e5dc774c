"""The names of data sets in DATASETS.TRAIN and DATASETS.TEST, and the files that they stand for.

A name is one of COCO's (`coco_2017_train`, ..., under ``$DETECTRON2_DATASETS`` or ``datasets``), or
`coco:ANNOTATIONS.json:IMAGE_FOLDER`, which may end in `:skip_bad`. The Detectron2 engine also accepts any name in
Detectron2's DatasetCatalog (see `catalog`).
"""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pretrain.common.errors import UserError, suggest_name
from pretrain.common.files import expand, suggest_making

from . import catalog

COCO_SPLITS = {  # name: (image folder, annotations), under the root's coco/; Detectron2's names
    f"{prefix}coco_{year}_{split}": (f"{split}{year}", f"annotations/{kind}_{split}{year}.json")
    for prefix, kind in (("", "instances"), ("keypoints_", "person_keypoints"))
    for year in ("2014", "2017")
    for split in ("train", "val")
}


@dataclass(frozen=True)
class Source:
    """A data set of DATASETS.TRAIN or DATASETS.TEST, located but not read.

    Attributes:
        name: as in the config.
        annotations: the file in COCO's format; None if only Detectron2's catalog can read the data set.
        images: the folder that contains its images.
        skip_bad: bad records are skipped rather than refused.
    """

    name: str
    annotations: Path | None
    images: Path
    skip_bad: bool = False


def is_file_name(name: str) -> bool:
    """Return whether a data set is named by its two paths."""
    return name.startswith("coco:")


def is_catalog_name(name: str) -> bool:
    """Return whether only Detectron2's DatasetCatalog can know a name in DATASETS.TRAIN or DATASETS.TEST."""
    return not is_file_name(name) and name not in COCO_SPLITS


def check_not_in_catalog(names: Iterable[str]) -> None:
    """Raise UserError for a name that the torchvision engine does not know."""
    for name in filter(is_catalog_name, names):
        problem = f"data set {name!r} is not coco:ANNOTATIONS.json:IMAGE_FOLDER nor {', '.join(COCO_SPLITS)}"
        remedy = "other names of Detectron2's DatasetCatalog need --engine detectron2"
        raise UserError(f"{problem}{suggest_name(name, COCO_SPLITS)}; {remedy}")


def resolve(name: str, folder: str | Path) -> str:
    """Return a data set's name with the paths that are relative to ``folder`` made absolute.

    Names that do not contain their paths, and paths that begin with a variable or a home, are left as they are.
    """
    fields = name.split(":")
    if not is_file_name(name) or len(fields) < 3:
        return name
    paths = [path if path[:1] in ("", "$", "~") else os.path.join(folder, path) for path in fields[1:3]]
    return ":".join([fields[0], *paths, *fields[3:]])


def locate_data_set(name: str, folder: str | Path = "") -> Source:
    """Find the files of a data set in DATASETS.TRAIN or DATASETS.TEST.

    Args:
        folder: the folder of relative paths (default: the working folder).

    Raises:
        UserError: unknown name, or files that are not where they are expected.
    """
    if is_file_name(name):
        fields = name.split(":")
        if len(fields) not in (3, 4) or not all(fields) or fields[3:] not in ([], ["skip_bad"]):
            raise UserError(f"data set {name!r} must be coco:ANNOTATIONS.json:IMAGE_FOLDER, or the same with :skip_bad")
        annotations = Path(folder, expand(fields[1]))
        images = Path(folder, expand(fields[2]))
        hint = f" of {name!r}; put it there, or set coco:ANNOTATIONS.json:IMAGE_FOLDER in DATASETS"
    elif name in COCO_SPLITS:
        root = Path(folder, os.environ.get("DETECTRON2_DATASETS", "datasets"), "coco")
        split, file = COCO_SPLITS[name]
        annotations = root / file
        images = root / split
        hint = f" of {name}; COCO's annotations/ and {split}/ belong in {root}; or set DETECTRON2_DATASETS"
    else:
        files = catalog.find_files(name)
        if files is None:
            return Source(name, None, Path())
        annotations, images = files
        hint = f" of {name}"
    if not os.path.isfile(annotations):
        raise UserError(f"no annotation file at {annotations}{hint}{suggest_making(annotations)}")
    if not os.path.isdir(images):
        raise UserError(f"no image folder at {images}{hint}{suggest_making(images)}")
    return Source(name, annotations, images, skip_bad=name.endswith(":skip_bad"))


def find_checked_copy(name: str, output_dir: str | Path) -> Path:
    """Return the path of the copy that contains a data set's good records."""
    return Path(output_dir) / "datasets" / f"{folder_name(name)}_checked.json"


def folder_name(name: str) -> str:
    """Return a short and unique name for files about a data set: two annotation files may have the same base name."""
    if not is_file_name(name):
        return name
    _, annotations, images, *_ = name.split(":")
    paths = f"{os.path.abspath(annotations)}:{os.path.abspath(images)}"
    return f"{Path(annotations).stem}_{hashlib.sha256(paths.encode(errors='surrogateescape')).hexdigest()[:8]}"
