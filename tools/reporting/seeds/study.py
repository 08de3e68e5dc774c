"""Scores of pipelines and sweeps over seeds: the mean of each branch and its 95% interval (Student's t)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.stages.completion import is_from_final_checkpoint, read_kind

from ..document import Table
from ..files import Pipeline, Place, RunCollection, find_runs
from ..protocols import describe, list_differences
from ..runs import RANKME, TASK_NAMES, BackboneScore, Score, read_scores
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
        remarks: the probes whose scores were not all measured with the same settings, and these settings.
    """

    name: str
    baseline: str
    seeds: Sequence[str]
    scores: dict[str, dict[str, dict[str, float]]]
    folders: list[Path] = field(default_factory=list)
    random: str = ""
    remarks: list[str] = field(default_factory=list)

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
    """Arrange the available scores of a pipeline by branch and seed; of several test sets, the first one counts.

    Branches that were scored on different data have no score in common. Incomplete stages have none.
    """
    scores = list(scores)
    random = {pipeline.stages[s.folder].branch for s in scores if s.folder in pipeline.stages and s.origin.is_random}
    name = random.pop() if len(random) == 1 else ""
    study = Study(pipeline.folder.name, pipeline.baseline, pipeline.seeds, {}, random=name)
    first = {score.folder: score for score in reversed(scores)}
    measured: dict[str, dict[Place, Score]] = {}
    for folder in _list_complete(pipeline, collection):
        if folder not in first:
            continue
        place = pipeline.stages[folder]
        columns = first[folder].list_columns(place.stage)
        if columns:
            study.folders.append(folder)
        for column in columns:
            measured.setdefault(column, {})[place] = first[folder]
    if "kNN top-1" in measured:
        measured.pop(_PRETRAINING_KNN, None)
    kinds = [*_PROBES, RANKME, *(f"{task} AP" for task in TASK_NAMES.values())]
    for column in sorted(measured, key=lambda column: [*(kind in column for kind in kinds), True].index(True)):
        _add_column(study, column, measured[column])
    return study


def _list_complete(pipeline: Pipeline, collection: RunCollection) -> Iterator[Path]:
    """Yield the run folders of a pipeline's complete stages, if they are from the final checkpoint of their branch."""
    results = {run.folder: run.results for run in collection.runs}
    trainings = {
        (place.branch, place.seed): folder
        for folder, place in pipeline.stages.items()
        if read_kind(folder).trains_backbone
    }
    for folder, place in pipeline.stages.items():
        training = trainings.get((place.branch, place.seed))
        if folder not in results or folder in pipeline.incomplete:
            continue
        if not training or is_from_final_checkpoint(results[folder], training):  # else an earlier one's
            yield folder


def _add_column(study: Study, column: str, measured: Mapping[Place, Score]) -> None:
    """Add the values of a column, or of one column per data set if not all were scored on the same one."""
    tests = {score.test for score in measured.values()}
    for place, score in measured.items():
        is_apart = len(tests) > 1 and column != RANKME
        name = f"{score.test}: {column}" if is_apart else column
        value = score.list_columns(place.stage)[column]
        study.scores.setdefault(name, {}).setdefault(place.branch, {})[place.seed] = value
    if column == RANKME:
        return
    for test in tests:  # of detectors, `branches` shows the settings that differ
        probed = {p: s.protocol for p, s in measured.items() if s.test == test and isinstance(s, BackboneScore)}
        different = list_differences([*probed.values()])
        branches: dict[str, dict[str, None]] = {}
        for place, protocol in probed.items():
            branches.setdefault(describe(protocol, different), {})[place.branch] = None
        if different:
            settings = "; ".join(f"{text} for {', '.join(names)}" for text, names in branches.items())
            study.remarks.append(f"{column} was not measured with the same settings in all branches: {settings}.")


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
        interval = " and its interval (Welch)" if len(study.seeds) > 1 else ""
        text += f"; in parentheses, the difference from {study.baseline}{interval}"
    counts = {len(seeds) for branches in study.scores.values() for seeds in branches.values()}
    text += ". A cell with fewer seeds says how many (n)." if counts - {len(study.seeds)} else "."
    return Table(study.name, study.remarks, ["", *columns], rows, [text])


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
