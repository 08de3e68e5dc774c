"""The data sets of a run as objects: each is located, read and checked once, and held.

Bad records end the run before it starts; `coco:ANNOTATIONS.json:IMAGE_FOLDER:skip_bad` skips them and says how many.
Images to test on, and those that may be skipped, are decoded once; of other training images, the header and the end are
read. COCO's own files of 2017 are not checked. Rank 0 writes a copy of a checked `coco:` set into OUTPUT_DIR, which the
other ranks and the report read.
"""

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from pretrain.common.errors import UserError, count_noun, shorten_list
from pretrain.common.files import atomic_write, check_file, sha256, write_json
from pretrain.common.image_checks.equal_files import digest_files, list_shared_files, read_sizes
from pretrain.common.weights.provenance import Provenance

from . import catalog
from .checks.bad_records import find_bad_files, resolve_paths
from .checks.classes import Classes, category_names, check_classes, read_coco_names
from .checks.pretraining_images import compare_with_pretraining
from .checks.unchanged import check_unchanged
from .keypoints import list_named_keypoints
from .names import Source, find_checked_copy, is_catalog_name, is_file_name, locate_data_set
from .reading import read_annotations, select_good_records
from .records import DataSet, PackedList, describe_unscored, pack

_RELEASED_BYTES = {  # COCO's own files, which need no check
    "instances_train2017.json": 469_785_474,
    "instances_val2017.json": 19_987_840,
    "person_keypoints_train2017.json": 238_884_731,
    "person_keypoints_val2017.json": 10_020_657,
}
DIGESTS = "datasets/digests.json"  # in OUTPUT_DIR: what `digest_files` returns for each set, or the set's name
log = logging.getLogger(__name__)


class DataSets(Mapping[str, DataSet]):
    """The data sets of a run by name: located when this is made, then each read and checked once.

    Rank 0 calls `check_small` (before a job is started or queued) and `check`; then every rank calls `read_rest`.
    """

    def __init__(self, cfg: CfgNode, names: Iterable[str]) -> None:
        """Locate the data sets.

        Raises:
            UserError: unknown name, or files that are not where they are expected.
        """
        self.cfg = cfg
        names = list(dict.fromkeys(names))
        located = {
            name: locate_data_set(name) for name in sorted(names, key=is_catalog_name)
        }  # slow: Detectron2's catalog
        self.sources = {name: located[name] for name in names}
        self._opened: dict[str, DataSet] = {}

    def __getitem__(self, name: str) -> DataSet:
        return self._opened[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)

    def check_small(self, recorded: Classes | None = None, large_bytes: int = 16 * 2**20) -> None:
        """Read and check the sets that are read in about a second, without decoding their images.

        Args:
            recorded: what `preflight.read_recorded_classes` returns.
            large_bytes: size of an annotation file that takes longer.

        Raises:
            UserError: as `check`.
        """
        for name, source in self.sources.items():
            if source.annotations and source.annotations.stat().st_size < large_bytes and not _is_released(source):
                self._opened[name] = self._open_file(source, decode=False)
        self._check_classes(dict(recorded or {}))

    def check(self, output_dir: str | Path, recorded: Classes | None = None, *, is_resumed: bool = False) -> list[str]:
        """Read and check all sets except COCO's own files; decode images; write the copies of the good records.

        Args:
            recorded: what `preflight.read_recorded_classes` returns.
            is_resumed: the training sets must be those that the run in ``output_dir`` was started with.

        Returns:
            The names of the detector's classes, in the order of its labels.

        Raises:
            UserError: bad records (unless they may be skipped), changed ones, or as `check_classes`.
        """
        classes = dict(recorded or {})
        for name, source in self.sources.items():
            if _is_released(source):
                classes[name] = ["person"] if "person_keypoints" in str(source.annotations) else read_coco_names()
            else:
                self._opened[name] = self._open(source)
        classes = self._check_classes(classes)
        self._warn_of_unused_classes(classes)
        for name, data_set in self._opened.items():
            if is_resumed and name in self.cfg.DATASETS.TRAIN and is_file_name(name):
                check_unchanged(name, data_set.content, find_checked_copy(name, output_dir), self.cfg)
        for name, data_set in self._opened.items():
            _write_copy(data_set, output_dir)
            if name in self.cfg.DATASETS.TEST and data_set.images is not None and not data_set.num_objects:
                log.info(describe_unscored(name))
        self._compare_images(output_dir)
        return list(next(iter(classes.values()), ()))

    def read_rest(self, output_dir: str | Path) -> None:
        """Read the sets that this rank has not checked: rank 0's copies, and COCO's own files.

        Raises:
            UserError: this machine does not see them.
        """
        for name, source in self.sources.items():
            if name not in self._opened:
                self._opened[name] = read_checked(source, output_dir)

    def list_digests(self, output_dir: str | Path) -> dict[str, str]:
        """Return the SHA-256 of the file that each set is read from, or its number of images if there is none."""
        paths = {name: _find_checked_file(source, output_dir) for name, source in self.sources.items()}
        return {
            name: sha256(path) if path else count_noun(len(self[name].entries or ()), "image")
            for name, path in paths.items()
        }

    def _open(self, source: Source) -> DataSet:
        """Read and check a set."""
        name = source.name
        is_tested = name in self.cfg.DATASETS.TEST
        if not is_catalog_name(name):
            return self._open_file(source, decode=is_tested or source.skip_bad)
        is_trained_on = name in self.cfg.DATASETS.TRAIN
        entries = PackedList(catalog.read_entries(name, is_trained_on=is_trained_on, is_tested=is_tested))
        evaluator = catalog.find_evaluator(name)
        if not self.cfg.INPUT.MAPPER:  # the user's may read something else
            _check_files(name, entries, decode=is_tested and evaluator == "coco")
        if source.annotations:
            data_set = self._open_file(source, decode=False)
        elif is_tested and evaluator == "coco":
            data_set = pack(source, catalog.convert(name), [])
        else:
            return _name_entries(source, entries)
        return dataclasses.replace(data_set, entries=entries)

    def _open_file(self, source: Source, *, decode: bool) -> DataSet:
        """Read and check a file in COCO's format; one that is open already, only to decode its images."""
        name = source.name
        opened = self._opened.get(name)
        if opened and not decode:
            return opened
        is_trained_on = name in self.cfg.DATASETS.TRAIN
        content = opened.content if opened else _read_file(source, needs_objects=is_trained_on)
        content, skipped = select_good_records(source, content, self.cfg, decode=decode)
        if decode and name in self.cfg.DATASETS.TEST:
            _warn_of_federated(name, content)
        return pack(source, content, [*(opened.skipped if opened else ()), *skipped])

    def _check_classes(self, classes: dict[str, Sequence[str]]) -> dict[str, Sequence[str]]:
        """Check the classes and keypoints of the open sets, and of ``classes``; return all classes by data set."""
        keypoints: dict[str, list[str]] = {}
        for name in filter(self._opened.__contains__, self):
            categories = {"categories": self[name].categories}
            classes[name] = category_names(categories)
            keypoints[name] = list_named_keypoints(categories) if self.cfg.MODEL.KEYPOINT_ON else []
        check_classes(self.cfg, classes, keypoints)
        return classes

    def _warn_of_unused_classes(self, classes: Mapping[str, Sequence[str]]) -> None:
        """Log the classes of which no training image has an object, such as the parent of all in some exports."""
        names = list(self.cfg.DATASETS.TRAIN)
        data_sets = [self._opened[name] for name in names if name in self._opened and is_file_name(name)]
        if not names or len(data_sets) < len(names):
            return
        unused = [text for text in classes[names[0]] if not any(data_set.count_objects(text) for data_set in data_sets)]
        if unused:
            what = f"DATASETS.TRAIN has no object of {shorten_list(unused)}, so nothing is learned of that"
            log.warning(f"{what}; what is no class should not be among the categories")

    def _compare_images(self, output_dir: str | Path) -> None:
        """Log the test images that are training images; write the digests of the data sets' images."""
        sizes = {name: _read_sizes(self._opened[name]) if name in self._opened else {name: 0} for name in self}
        digests = {name: name if name in paths else digest_files(paths) for name, paths in sizes.items()}
        write_json(Path(output_dir) / DIGESTS, digests)
        train = {path: size for name in self.cfg.DATASETS.TRAIN for path, size in sizes.get(name, {}).items()}
        test = {path: size for name in self.cfg.DATASETS.TEST for path, size in sizes.get(name, {}).items()}
        shared = list_shared_files(train, test)
        if shared:
            what = f"DATASETS.TRAIN and DATASETS.TEST share {len(shared):,} of {len(test):,}: {shorten_list(shared)}"
            log.warning(f"metrics are computed on training images: {what}")


def warn_of_pretraining_images(test_sets: Iterable[DataSet], provenance: Provenance | None) -> None:
    """Log the images of the test sets that the weights with this record were pretrained on."""
    with_files = (data_set for data_set in test_sets if data_set.images is not None and data_set.source.annotations)
    compare_with_pretraining(
        {path: size for part in with_files for path, size in _read_sizes(part).items()}, provenance
    )


def read_checked(source: Source, output_dir: str | Path) -> DataSet:
    """Read a data set that was checked before: rank 0's copy in OUTPUT_DIR, or a file that needs no copy.

    Raises:
        UserError: this machine does not see the copy.
    """
    path = _find_checked_file(source, output_dir)
    data_set = pack(source, read_annotations(path, needs_objects=False), []) if path else DataSet(source, [])
    if not is_catalog_name(source.name):
        return data_set
    entries = PackedList(catalog.read_entries(source.name, is_trained_on=False, is_tested=False))
    return dataclasses.replace(data_set, entries=entries) if path else _name_entries(source, entries)


def _find_checked_file(source: Source, output_dir: str | Path) -> Path | None:
    """Return the file that a checked set is read from: its copy, or its own file; None if it has neither."""
    copy = find_checked_copy(source.name, output_dir)
    if source.skip_bad or copy.is_file():
        return check_file(copy, f"copy of {source.name}")
    return source.annotations


def _is_released(source: Source) -> bool:
    """Return whether this is one of COCO's own files, which need no check."""
    path = source.annotations
    return path is not None and path.stat().st_size == _RELEASED_BYTES.get(path.name)


def _read_file(source: Source, *, needs_objects: bool) -> dict[str, Any]:
    assert source.annotations
    return read_annotations(source.annotations, needs_objects=needs_objects)


def _warn_of_federated(name: str, content: Mapping[str, Any]) -> None:
    """Log that COCO's metrics take an image of LVIS for one in which all objects of all categories are annotated."""
    fields = {"neg_category_ids", "not_exhaustive_category_ids"} & {key for image in content["images"] for key in image}
    if any(category.get("frequency") in ("r", "c", "f") for category in content["categories"]):
        fields.add("frequency")
    if fields:
        problem = f"{name} has LVIS's {', '.join(sorted(fields))}, but is scored as if all objects were annotated"
        log.warning(f"{problem}; name it lvis_v1_val (or another lvis_v1_*), which LVIS's metrics score")


def _name_entries(source: Source, entries: PackedList) -> DataSet:
    """Make a data set of the entries of Detectron2's catalog, whose metadata have its categories."""
    categories = catalog.list_categories(source.name)
    return DataSet(source, categories, entries=entries, evaluator=catalog.find_evaluator(source.name))


def _check_files(name: str, entries: PackedList, *, decode: bool) -> None:
    """Raise UserError for image files of a catalog's data set that Detectron2 cannot read."""
    problems = find_bad_files(entries, decode=decode)
    if problems:
        count = count_noun(len(problems), "bad image file")
        remedy = "restore them, or correct their records"
        raise UserError(f"data set {name} has {count}: {shorten_list(problems, '; ')}; {remedy}")


def _read_sizes(data_set: DataSet) -> dict[str, int]:
    """Return the sizes of the images in bytes by normalized path, or 0 by the set's name if it has no image folder."""
    if data_set.images is None or not data_set.source.annotations:
        return {data_set.name: 0}
    return read_sizes(resolve_paths(data_set.source.images, data_set.file_names))


def _write_copy(data_set: DataSet, output_dir: str | Path) -> None:
    """Write the copy of a set that is named by its files or has none; log its skipped and repeated records."""
    name = data_set.name
    copy = find_checked_copy(name, output_dir)
    content = data_set.content
    if data_set.images is not None and (is_file_name(name) or data_set.source.annotations is None):
        atomic_write(copy, json.dumps(content | {"skipped_records": data_set.skipped}))
    if data_set.skipped:
        count = count_noun(len(data_set.skipped), "bad record")
        log.info(f"{name}: skipped {count}, which {copy} lists: {shorten_list(data_set.skipped)}")
    boxes = [(record["image_id"], record["category_id"], *record["bbox"]) for record in content["annotations"]]
    repeated = [f"{box[2:]} of image {box[0]!r}" for box, count in Counter(boxes).items() if count > 1]
    if repeated:
        log.info(f"{name}: {len(repeated)} boxes occur more than once, and count as often: {shorten_list(repeated)}")
