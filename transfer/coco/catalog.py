"""Data sets by their names in Detectron2's DatasetCatalog: its own, and those that a module of the user's registers.

The Detectron2 engine trains on the records that they return. It evaluates by the ``evaluator_type`` of their metadata:
coco, against their ``json_file`` if they have one, and else against their own records; or one of `OTHER_EVALUATORS`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pretrain.common import extensions
from pretrain.common.errors import UserError, nearest, one_line, shortlist
from pretrain.common.run_folder import atomic_write, json_text

OTHER_EVALUATORS = ("pascal_voc", "lvis")
_FIELDS = ("file_name", "height", "width", "image_id")


def metadata(name: str, others: Iterable[str] = ()) -> Any:
    """Detectron2's metadata of a data set.

    Args:
        others: names that may have been meant.

    Raises:
        UserError: no such name, or Detectron2 is not installed.
    """
    known: list[str] = []
    if importlib.util.find_spec("detectron2") is not None:
        extensions.load()
        from detectron2.data import DatasetCatalog, MetadataCatalog  # slow to import

        known = DatasetCatalog.list()
    if name not in known:
        raise UserError(
            f"data set {name!r} is not coco:ANNOTATIONS.json:IMAGE_FOLDER, and is not in Detectron2's DatasetCatalog; "
            f"--import the module that registers it{nearest(name, [*known, *others])}"
        )
    return MetadataCatalog.get(name)


def files(name: str, others: Iterable[str] = ()) -> tuple[Path, Path] | None:
    """The annotation file in COCO's format and the image folder of a data set that has them; see `metadata`."""
    data_set = metadata(name, others)
    kind = data_set.get("evaluator_type", "")
    if kind == "coco" and data_set.get("json_file"):
        return Path(data_set.json_file), Path(data_set.get("image_root", ""))
    place = "datasets/, or in the folder that DETECTRON2_DATASETS names"
    if kind == "pascal_voc":
        listing = Path(data_set.dirname, "ImageSets", "Main", f"{data_set.split}.txt")
        if not listing.is_file():
            raise UserError(f"no list of images at {listing} of {name}; VOC's VOC2007/ and VOC2012/ belong in {place}")
    if kind == "lvis":
        if importlib.util.find_spec("lvis") is None:
            raise UserError(f"{name} needs: pip install --no-deps lvis (its requirements would bring a second OpenCV)")
        if not Path(data_set.json_file).is_file():
            raise UserError(
                f"no annotations at {data_set.json_file} of {name} (lvisdataset.org has them; the images are COCO's, "
                f"in coco/ beside lvis/); both belong in {place}"
            )
    return None


def unmapped_classes(name: str) -> list[str] | None:
    """The names of a data set's labels, unless its metadata map labels to the ids of its file, or have no names."""
    found = metadata(name)
    return None if found.get("thing_dataset_id_to_contiguous_id") else found.get("thing_classes")


def refuse_other_evaluators(name: str) -> None:
    """Raises UserError for a data set whose metrics the Detectron2 engine does not compute."""
    if (kind := metadata(name).get("evaluator_type", "")) not in ("coco", *OTHER_EVALUATORS):
        raise UserError(
            f"DATASETS.TEST has {name}, whose evaluator_type is {kind!r}; supported are coco and "
            f"{' and '.join(OTHER_EVALUATORS)}: set it in MetadataCatalog.get({name!r})"
        )


def has_coco_metrics(name: str) -> bool:
    return metadata(name).get("evaluator_type") not in OTHER_EVALUATORS


def prepare(name: str, copy: Path | None) -> list[str]:
    """Checks the records of a data set without files, before the first iteration reads them.

    Args:
        copy: where to write them in COCO's format, for the evaluation.

    Returns:
        The categories' names in the order of their labels.

    Raises:
        UserError: metadata or records lack what the engine reads.
    """
    from detectron2.data import DatasetCatalog
    from detectron2.data.datasets.coco import convert_to_coco_dict

    found = metadata(name)
    try:
        records = DatasetCatalog.get(name)
    except (OSError, ValueError, LookupError, AttributeError, SyntaxError) as error:  # also of a damaged XML file
        raise UserError(f"data set {name} cannot be read ({one_line(error)}); restore its files") from error
    classes: list[str] = list(found.get("thing_classes") or ())
    if not classes:
        raise UserError(f"data set {name} has no categories; set MetadataCatalog.get({name!r}).thing_classes")
    for index, record in enumerate(records):
        if missing := [field for field in _FIELDS if field not in record]:
            raise UserError(f"record {index} of data set {name} lacks {shortlist(missing)}; add what Detectron2 reads")
        for label in (one.get("category_id") for one in record.get("annotations", ())):
            if label not in range(len(classes)):
                raise UserError(
                    f"record {index} of data set {name} has category_id {label}; it must be from 0 to "
                    f"{len(classes) - 1}, a position in thing_classes"
                )
    if copy:
        atomic_write(copy, json_text({"annotations": [], **convert_to_coco_dict(name)}))
    return classes
