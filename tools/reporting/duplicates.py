"""Scores without the test images that are nearly training images, by the tables that make_data.py duplicates wrote.

Nothing is predicted again: the stored predictions on the other test images are scored. A table belongs to a run if its
test images, and the training images with which it compares them, are those of the run.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from pretrain.common.config.yaml_io import flatten, parse_yaml
from pretrain.common.errors import UserError
from pretrain.common.files import read_json

from .files import Run, RunCollection
from .runs import Clean, DetectorScore, Score


@dataclass(frozen=True)
class DuplicateTable:
    """A table of test images that are nearly training images, and the data sets that were compared."""

    file: Path
    content: Mapping[str, Any]

    def covers(self, digests: Mapping[str, str], split: str, name: str) -> bool:
        """Return whether the images of its ``split``, train or test, are those of a run's data set."""
        digest = digests.get(name)
        # A data set that the run did not read, such as COCO's own, is known by its name.
        return bool(digest) and digest in (self.content[f"{split}_digest"], self.content[split])


def read_tables(collection: RunCollection) -> list[DuplicateTable]:
    """Read the tables in the folders of a report; name those that cannot be read in ``unreadable``."""
    tables: list[DuplicateTable] = []
    for file in collection.duplicates:
        try:
            content = read_json(file)
        except UserError as error:
            collection.unreadable.append(str(error))
            continue
        missing = sorted({"train", "test", "train_digest", "test_digest", "pairs"} - content.keys())
        if missing:
            collection.unused.append(f"{file} lacks {missing[0]}: make it again with make_data.py duplicates")
        else:
            tables.append(DuplicateTable(file, content))
    return tables


def add_clean_scores(scores: Sequence[Score], collection: RunCollection) -> list[Score]:
    """Return the scores, those of a detector with its score on the images that no table lists.

    A table that belongs to no run gets a line in ``unused``, a score that cannot be computed one in ``unreadable``.
    """
    tables = read_tables(collection)
    used: set[Path] = set()
    results: list[Score] = []
    digests = {folder: _read_digests(folder) for folder in {score.folder for score in scores if tables}}
    for score in scores:
        if not isinstance(score, DetectorScore):
            results.append(score)
            continue
        matching = [table for table in tables if _is_about(table, score, digests[score.folder])]
        used |= {table.file for table in matching}
        if matching:
            (run,) = (run for run in collection.runs if run.folder == score.folder)
            compared = [name for name in score.trained_on if _compares(matching, digests[score.folder], name)]
            try:
                score = replace(score, clean=_score_without(run, score, matching, compared))
            except (UserError, KeyError, TypeError) as error:
                collection.unreadable.append(f"{score.folder} cannot be scored without duplicates: {error}")
        results.append(score)
    for table in tables:
        if table.file not in used:
            compared = f"{table.content['test']} with {table.content['train']}"
            reason = "no run in this report has a record that it was trained and tested on these images"
            collection.unused.append(f"{table.file} compares {compared}, but {reason}")
    return results


def _read_digests(folder: Path) -> dict[str, str]:
    """Read the digests of the data sets of a run; those of an evaluation and its training are in two folders."""
    from transfer.coco.data import DIGESTS  # imports much

    folders = [folder.parent, folder] if folder.name == "eval_only" else [folder]
    digests: dict[str, str] = {}
    for path in (part / DIGESTS for part in folders):
        digests |= read_json(path) if path.is_file() else {}
    return digests


def _is_about(table: DuplicateTable, score: DetectorScore, digests: Mapping[str, str]) -> bool:
    is_of_training = any(_compares([table], digests, name) for name in score.trained_on)
    return is_of_training and table.covers(digests, "test", score.test)


def _compares(tables: Iterable[DuplicateTable], digests: Mapping[str, str], name: str) -> bool:
    """Return whether a table compares the training set ``name``."""
    return any(table.covers(digests, "train", name) for table in tables)


def _score_without(run: Run, score: DetectorScore, tables: Sequence[DuplicateTable], compared: list[str]) -> Clean:
    """Score the stored predictions on the test images that no table lists."""
    from transfer.coco import data, names, results

    config = dict(flatten(parse_yaml(run.results["config"])))
    content = data.read_checked(names.locate_data_set(score.test), score.folder).content
    listed = {pair["test"] for table in tables for pair in table.content["pairs"]}
    excluded = _find_ids(content["images"], listed)
    predictions = read_json(score.folder / score.predictions, list)
    detections = [record for record in predictions if record["image_id"] not in excluded]
    remaining = {
        **content,
        "images": [image for image in content["images"] if image["id"] not in excluded],
        "annotations": [record for record in content["annotations"] if record["image_id"] not in excluded],
    }
    rows: results.Metrics = {}
    if excluded and remaining["images"]:
        tasks = [task for task in results.TASKS if task in run.results["datasets"][score.test]]
        sigmas = config["TEST.KEYPOINT_OKS_SIGMAS"]
        rows = results.evaluate(remaining, detections, tasks, sigmas, config["TEST.DETECTIONS_PER_IMAGE"])
    metrics = {f"{task}/{name}": value for task, row in rows.items() for name, value in row.items()}
    not_compared = [name for name in score.trained_on if name not in compared]
    files = [str(table.file) for table in tables]
    return Clean(len(excluded), len(content["images"]), compared, not_compared, files, metrics)


def _find_ids(images: Sequence[Mapping[str, Any]], paths: set[str]) -> set[Any]:
    """Return the ids of the images whose file name is the end of one of the paths."""
    ids = {image["file_name"]: image["id"] for image in images}
    seen: set[Any] = set()
    for path in paths:
        parts = PurePath(path).parts
        names = ["/".join(parts[start:]) for start in range(len(parts))]
        seen.update({ids[name] for name in (path, *names) if name in ids})
    return seen
