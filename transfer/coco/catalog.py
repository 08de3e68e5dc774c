"""Data sets by their names in Detectron2's DatasetCatalog: built-in ones, and those that a user's module registers.

The Detectron2 engine trains on the records that they return. The ``evaluator_type`` of their metadata selects the
evaluation: coco, which compares with their ``json_file`` if they have one and otherwise with their own records, or one
of `OTHER_EVALUATORS`.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

from pretrain.common.config import extensions
from pretrain.common.errors import UserError, one_line, suggest_name
from pretrain.common.files import atomic_write, json_text

OTHER_EVALUATORS = ("pascal_voc", "lvis")


def read_metadata(name: str) -> Any:
    """Return Detectron2's metadata of a data set.

    Raises:
        UserError: no such name, or Detectron2 is not installed.
    """
    known: list[str] = []
    if importlib.util.find_spec("detectron2") is not None:
        extensions.load()
        from detectron2.data import DatasetCatalog, MetadataCatalog  # slow to import

        known = DatasetCatalog.list()
    if name not in known:
        problem = f"data set {name!r} is neither coco:ANNOTATIONS.json:IMAGE_FOLDER nor in Detectron2's DatasetCatalog"
        raise UserError(f"{problem}; --import the module that registers it{suggest_name(name, known)}")
    return MetadataCatalog.get(name)


def find_files(name: str) -> tuple[Path, Path] | None:
    """Return the annotation file in COCO's format and the image folder of a data set that has them.

    Raises:
        UserError: as `read_metadata`, or files or packages that the data set needs are missing.
    """
    data_set = read_metadata(name)
    kind = data_set.get("evaluator_type", "")
    if kind == "coco" and data_set.get("json_file"):
        return Path(data_set.json_file), Path(data_set.get("image_root", ""))
    if kind == "lvis" and importlib.util.find_spec("lvis") is None:
        raise UserError(f"{name} needs lvis; run: pip install --no-deps lvis (its dependencies bring another OpenCV)")
    needed = data_set.get("json_file") or data_set.get("dirname")  # LVIS has the former, Pascal VOC the latter
    if needed and not os.path.exists(needed):
        raise UserError(f"no {needed} of {name}; set DETECTRON2_DATASETS to the folder of its data (default: datasets)")
    return None


def check_evaluator(name: str) -> None:
    """Raise UserError for a data set whose metrics the Detectron2 engine does not compute."""
    kind = read_metadata(name).get("evaluator_type", "")
    if kind not in ("coco", *OTHER_EVALUATORS):
        known = ", ".join(("coco", *OTHER_EVALUATORS))
        raise UserError(f"evaluator_type of {name} is {kind!r}; set one of {known} in MetadataCatalog.get({name!r})")


def prepare(name: str, copy: Path | None) -> list[str]:
    """Load a data set without COCO files once before the first iteration, to check that it can be read.

    Args:
        copy: the path to write its records to in COCO's format, for the evaluation. If None, nothing is written.

    Returns:
        The categories' names in the order of their labels.

    Raises:
        UserError: records that cannot be read, or no categories.
    """
    from detectron2.data import DatasetCatalog
    from detectron2.data.datasets.coco import convert_to_coco_dict

    try:
        DatasetCatalog.get(name)
    except (OSError, ValueError, LookupError, AttributeError, SyntaxError) as error:  # SyntaxError: a damaged XML file
        raise UserError(f"data set {name} cannot be read ({one_line(error)}); restore its files") from error
    classes: list[str] = list(read_metadata(name).get("thing_classes") or ())
    if not classes:
        raise UserError(f"data set {name} has no categories; set MetadataCatalog.get({name!r}).thing_classes")
    if copy:
        atomic_write(copy, json_text({"annotations": [], **convert_to_coco_dict(name)}))
    return classes
