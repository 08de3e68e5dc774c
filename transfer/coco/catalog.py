"""Data sets by their names in Detectron2's DatasetCatalog: built-in ones, and those that a user's module registers.

The Detectron2 engine trains on the records that they return. The ``evaluator_type`` of their metadata selects the
evaluation: coco, which compares with their ``json_file`` if they have one and otherwise with their own records, or one
of `OTHER_EVALUATORS`.
"""

import contextlib
import importlib.util
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrain.common.config import extensions
from pretrain.common.errors import UserError, count_noun, one_line, suggest_name

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
    for key in ("json_file", "dirname", "image_dir", "gt_dir"):  # LVIS's, Pascal VOC's, and Cityscapes' two
        path = data_set.get(key)
        if path and not os.path.exists(path):
            remedy = "set DETECTRON2_DATASETS to the folder of its data (default: datasets)"
            raise UserError(f"no {path} of {name}; {remedy}")
    return None


def find_evaluator(name: str) -> str:
    """Return the kind of a data set's metrics: coco, or one of `OTHER_EVALUATORS` (or of others)."""
    return read_metadata(name).get("evaluator_type", "")


def check_evaluator(name: str) -> None:
    """Raise UserError for a data set whose metrics the Detectron2 engine does not compute."""
    kind = find_evaluator(name)
    if kind not in ("coco", *OTHER_EVALUATORS):
        known = ", ".join(("coco", *OTHER_EVALUATORS))
        raise UserError(f"evaluator_type of {name} is {kind!r}; set one of {known} in MetadataCatalog.get({name!r})")


def read_entries(name: str, *, is_trained_on: bool, is_tested: bool) -> list[Any]:
    """Read what the catalog has for a data set.

    Args:
        is_trained_on: every image needs a list of annotations.
        is_tested: read the files of Pascal VOC as its evaluator will, too.

    Raises:
        UserError: entries that cannot be read or trained on, or no categories.
    """
    from detectron2.data import DatasetCatalog
    from detectron2.data.build import print_instances_class_histogram

    with _translate_errors(name):
        _try_readers(name, is_tested=is_tested)
        entries: Any = list(DatasetCatalog.get(name))
    classes = list(read_metadata(name).get("thing_classes") or ())
    if not classes:
        raise UserError(f"data set {name} has no categories; set MetadataCatalog.get({name!r}).thing_classes")
    if not entries:
        raise UserError(f"data set {name} has no images; restore its files")
    annotated = [entry for entry in entries if "annotations" in entry]
    if is_trained_on and len(annotated) < len(entries):
        raise UserError(f"data set {name} has images without annotations of objects (boxes); name another set")
    with _translate_errors(name):
        print_instances_class_histogram(annotated, classes)  # which checks the labels
    return entries


def list_categories(name: str) -> list[dict[str, Any]]:
    """Return COCO's category records of a data set that was read, in the order of its labels."""
    metadata = read_metadata(name)
    ids = {label: key for key, label in metadata.get("thing_dataset_id_to_contiguous_id", {}).items()}
    return [{"id": ids.get(label, label), "name": text} for label, text in enumerate(metadata.thing_classes)]


def convert(name: str) -> dict[str, Any]:
    """Return a data set in COCO's format."""
    from detectron2.data.datasets.coco import convert_to_coco_dict

    with _translate_errors(name):
        return {"annotations": [], **convert_to_coco_dict(name)}


@contextlib.contextmanager
def _translate_errors(name: str) -> Iterator[None]:
    """Raise UserError in place of what Detectron2's readers, or a user's, raise for files that they cannot read."""
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        remedy = "install it, or convert the data to COCO's format (coco:ANNOTATIONS.json:IMAGE_FOLDER)"
        raise UserError(f"data set {name} needs a package that is missing ({one_line(error)}); {remedy}") from error
    except (OSError, ValueError, LookupError, AttributeError, TypeError, AssertionError, SyntaxError) as error:
        # SyntaxError: a damaged XML file
        frame = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{one_line(error)}; {Path(frame.filename).name}:{frame.lineno}"
        remedy = "restore its files, or correct its records"
        raise UserError(f"data set {name} cannot be read ({cause}); {remedy}") from error


def _try_readers(name: str, *, is_tested: bool) -> None:
    """Call the readers that fail late or unclearly on the files of one of Detectron2's own data sets."""
    metadata = read_metadata(name)
    kind = metadata.get("evaluator_type", "")
    if kind == "pascal_voc":
        _try_voc(metadata, is_tested=is_tested)
    elif kind == "cityscapes_instance":
        _try_cityscapes(metadata)


def _try_voc(metadata: Any, *, is_tested: bool) -> None:
    """Read the files of a Pascal VOC set as its evaluator does, which needs more of them than the training."""
    from detectron2.evaluation.pascal_voc_evaluation import parse_rec

    parse_rec.cache_clear()  # an earlier run's
    image_list = Path(metadata.dirname, "ImageSets", "Main", f"{metadata.split}.txt")
    ids = [line.strip() for line in image_list.read_text().splitlines()]
    if len(ids) < 2:
        raise UserError(f"{image_list} has {count_noun(len(ids), 'image')}, but Detectron2's reader needs at least two")
    for image_id in ids if is_tested else ():
        file = os.path.join(metadata.dirname, "Annotations/", f"{image_id}.xml")
        try:
            parse_rec(file)
        except OSError as error:
            raise UserError(f"{image_list} has a line {image_id!r}, but {one_line(error)}; correct the list") from error
        except (ValueError, AttributeError, TypeError, SyntaxError) as error:
            needed = "objects need <pose>, <truncated>, <difficult>, and a <bndbox> of whole numbers"
            problem = f"Detectron2's evaluator cannot read {file} ({one_line(error)})"
            raise UserError(f"{problem}; {needed}") from error


def _try_cityscapes(metadata: Any) -> None:
    """Read the first image of Cityscapes in this process: of an error in a process of its own, the reader hangs."""
    from detectron2.data.datasets import cityscapes

    files: Any = cityscapes._get_cityscapes_files(metadata.image_dir, metadata.gt_dir)
    cityscapes._cityscapes_files_to_dict(files[0], from_json=True, to_polygons=True)
