"""Scores of pipelines and sweeps over seeds: the mean of each branch and its 95% interval (Student's t)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.stages.completion import is_from_final_checkpoint, read_kind

from ..document import Table
from ..files import Pipeline, RunCollection, find_runs
from ..runs import RANKME, TASK_NAMES, Score, read_scores
from .statistics import compare_means, count_decimals, format_mean

FLOOR = 1.0  # AP below which a detector has hardly found an object
_PROBES = ("kNN top-1", "linear top-1")
_PRETRAINING_KNN = "kNN top-1 after pretraining"


@dataclass(frozen=True)
class Study:
    """Scores of a pipeline or sweep; without SEEDS, its seeds are empty and each branch has one score, of seed "".

    Attributes:
        baseline: the branch that others are compared with; empty if there is none.
        seeds: all seeds that the file lists, complete or not.
        scores: name of the score -> branch -> seed -> value.
        folders: run folders with a score.
        random: the branch of random weights, if there is exactly one.
    """

    name: str
    baseline: str
    seeds: Sequence[str]
    scores: dict[str, dict[str, dict[str, float]]]
    folders: list[Path] = field(default_factory=list)
    random: str = ""

    @property
    def reference(self) -> str:
        """The branch that verdicts compare others with; empty if there is none."""
        return self.baseline or self.random

    @property
    def compared(self) -> dict[str, dict[str, dict[str, float]]]:
        """The scores by which branches are judged: all but RankMe, of which neither more nor less is better."""
        return {score: branches for score, branches in self.scores.items() if score != RANKME}

    def is_at_floor(self, score: str) -> bool:
        """Return whether a score is an AP that is hardly above 0 in every branch and seed."""
        values = [value for seeds in self.scores[score].values() for value in seeds.values()]
        return score.endswith(" AP") and max(values) < FLOOR


def read_study(folder: Path) -> Study | None:
    """Return the available scores of the pipeline or sweep in ``folder``, or None if it has no SEEDS."""
    collection = find_runs([folder])
    scores = read_scores(collection)
    pipeline = next((one for one in collection.pipelines if one.folder == folder.absolute()), None)
    return build_study(pipeline, collection, scores) if pipeline and pipeline.seeds else None


def build_study(pipeline: Pipeline, collection: RunCollection, scores: Iterable[Score]) -> Study:
    """Arrange the available scores of a pipeline by branch and seed; of several test sets, the first one counts."""
    scores = list(scores)
    random = {pipeline.stages[s.folder].branch for s in scores if s.folder in pipeline.stages and s.origin.is_random}
    name = random.pop() if len(random) == 1 else ""
    study = Study(pipeline.folder.name, pipeline.baseline, pipeline.seeds, {}, random=name)
    results = {run.folder: run.results for run in collection.runs}
    trainings = {
        (place.branch, place.seed): folder
        for folder, place in pipeline.stages.items()
        if read_kind(folder).trains_backbone
    }
    first = {score.folder: score for score in reversed(scores)}
    for folder, place in pipeline.stages.items():
        training = trainings.get((place.branch, place.seed))
        if folder not in first:
            continue
        if training and not is_from_final_checkpoint(results[folder], training):  # an earlier one's
            continue
        columns = first[folder].list_columns(place.stage)
        if columns:
            study.folders.append(folder)
        for column, value in columns.items():
            study.scores.setdefault(column, {}).setdefault(place.branch, {})[place.seed] = value
    if "kNN top-1" in study.scores:
        study.scores.pop(_PRETRAINING_KNN, None)
    kinds = [*_PROBES, RANKME, *(f"{task} AP" for task in TASK_NAMES.values())]
    for column in sorted(study.scores, key=lambda column: [*(kind in column for kind in kinds), True].index(True)):
        study.scores[column] = study.scores.pop(column)
    return study


def build_table(study: Study, columns: Iterable[str] = ()) -> Table:
    """Build a row per branch and a column per score (``columns``, or all of them)."""
    columns = list(columns) or list(study.scores)
    names = dict.fromkeys(name for column in columns for name in study.scores[column])
    rows = [[name, *(_format_cell(study, column, name) for column in columns)] for name in names]
    if len(study.seeds) == 1:
        text = f"Seed {study.seeds[0]} alone, so without an interval"
    else:
        text = f"Mean ± 95% interval (Student's t) over seeds {', '.join(study.seeds)}"
    if study.baseline:
        text += f"; in parentheses, the difference from {study.baseline} and its interval (Welch)"
    counts = {len(seeds) for branches in study.scores.values() for seeds in branches.values()}
    text += ". A cell with fewer seeds says how many (n)." if counts - {len(study.seeds)} else "."
    return Table(study.name, [], ["", *columns], rows, [text])


def _format_cell(study: Study, column: str, name: str) -> str:
    branches = study.scores[column]
    if name not in branches:
        return "-"
    digits = count_decimals(column, branches)
    text = format_mean(list(branches[name].values()), digits)
    if len(branches[name]) < len(study.seeds):
        text += f" [n {len(branches[name])}]"
    change = compare_means(branches[name], branches.get(study.baseline, {}))
    if name != study.baseline and change:
        text += f" ({change.text(digits)})"
    return text
