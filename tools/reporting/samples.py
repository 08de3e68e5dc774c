"""Groups that no pipeline names: detectors on shares of the labels, the papers' rows, and JCL's Fig. 3."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from . import papers
from .document import Table
from .files import Found, short_names
from .groups import Samples, counted
from .runs import Detection, words
from .tables import TASK_NAMES, Row, linear_result

_SUBSET = re.compile(r"(?:^|[/:])([\d.]+)pct_fold(\d+)\.json(?::|$)")
_SCHEDULE = ("SOLVER.STEPS", "SOLVER.MAX_ITER", "SOLVER.WARMUP_ITERS")  # which may depend on the share
_SIMILARITY = {"similarity_mean": "similarity", "similarity_std": "std of similarity", "variance_mean": "variance",
               "variance_std": "std of variance"}  # fmt: skip


# Shares of the labels, by `make_data.py subset`


def shares(runs: Sequence[Detection]) -> Iterable[Table]:
    """Yields one table per detector, test set and protocol that was trained on at least two shares."""
    groups: dict[str, list[tuple[float, str, Detection]]] = {}
    for run in runs:
        train, *more = run.protocol["DATASETS.TRAIN"]
        if (match := _SUBSET.search(train)) and not more and not run.evaluated_only:
            by_share = ("DATASETS.TRAIN", *_SCHEDULE)
            protocol = sorted((key, value) for key, value in run.protocol.items() if key not in by_share)
            member = (float(match[1]), match[2], run)
            groups.setdefault(repr((run.headline[0], run.test, protocol)), []).append(member)
    for members in groups.values():
        yield from _shares_of(sorted(members, key=lambda member: member[0]))


def _shares_of(members: Sequence[tuple[float, str, Detection]]) -> Iterable[Table]:
    first, names = members[0][-1], _starts([run for *_, run in members])
    task, schedules, left_out = papers.TASKS[first.detector], {}, 0
    scores: dict[str, dict[str, Samples]] = {}
    for share, fold, run in members:
        schedule = [run.protocol[key] for key in _SCHEDULE]
        ap = run.metrics.get(task, {}).get("AP")
        if schedules.setdefault(share, schedule) != schedule:
            left_out += 1
        elif ap is not None:
            line = scores.setdefault(names[_identity(run)], {})
            line.setdefault(f"{share:g}%", {}).setdefault(fold, []).append(ap)
    columns = [f"{share:g}%" for share in schedules if any(f"{share:g}%" in line for line in scores.values())]
    if len(columns) < 2:
        return
    notes = [
        f"{first.headline[0]}, tested on {first.test}: {TASK_NAMES[task]} AP (from 0 to 100), mean and 95% interval "
        "(Student's t) over folds (n); the seeds of a fold count by their mean. A share is one of the training images, "
        "with their labels."
    ]
    if left_out:
        notes.append(f"Left out, because another run of their share has another schedule: {left_out}.")
    yield Table(
        f"AP over the share of labels: {first.detector}", notes, ["initialization", *columns],
        [[name, *(counted(line.get(column, {})) for column in columns)] for name, line in scores.items()],
    )  # fmt: skip


def _identity(run: Detection) -> str:
    """What runs that differ only in their seed have in common."""
    origin = run.origin
    config = {key: value for key, value in origin.config.items() if key not in ("SEED", "OUTPUT_DIR")}
    return repr((origin.method or origin.source, origin.data, origin.epochs, origin.altered, sorted(config.items())))


def _starts(runs: Sequence[Detection]) -> dict[str, str]:
    """Identity -> the initialization in words; those with the same text are numbered."""
    names: dict[str, str] = {}
    for run in runs:
        origin = run.origin
        parts = [origin.method or origin.source, origin.data, origin.epochs, origin.altered]
        name = ", ".join(filter(None, parts)) or "unknown"
        if (identity := _identity(run)) not in names:
            same = sum(other.partition(" (config ")[0] == name for other in names.values())
            names[identity] = f"{name} (config {same + 1})" if same else name
    return names


# The papers' tables


class _Measured(NamedTuple):
    """A run of ours that is comparable to a row of a paper.

    Attributes:
        sample: its checkpoint, whose runs count once, by their mean; a detector from random weights counts itself.
        engine: of a detector, else empty.
    """

    verdict: papers.Verdict
    scores: Mapping[str, float | None]
    sample: str
    engine: str


def published(rows: Sequence[Row], runs: Sequence[Detection]) -> Iterable[Table]:
    """A table per published one that has a row with a comparable run, in whole, and per engine of ours."""
    measured = []
    for row in rows:
        for probe in row.probes:
            sample = probe.origin.sha256 or str(row.folder)
            measured.append(_Measured(linear_result(row, [probe]), probe.scores, sample, ""))
    for run in runs:
        scores, sample = run.metrics.get(papers.TASKS[run.detector], {}), run.origin.sha256 or str(run.folder)
        measured.append(_Measured(papers.detection_result(run), scores, sample, run.engine))
    measured = [one for one in measured if one.verdict.numbers]
    for name, engine in dict.fromkeys((one.verdict.table, one.engine) for one in measured):
        yield _published(name, engine, [one for one in measured if (one.verdict.table, one.engine) == (name, engine)])


def _published(name: str, engine: str, measured: Sequence[_Measured]) -> Table:
    head, cells = ["published row"], []
    metrics = list(measured[0].verdict.numbers or {})
    for metric in metrics:
        head += [f"paper's {metric}", f"our {metric}", "difference"]
    for row in papers.rows_of(name):
        cells.append([_label(row)])
        for metric in metrics:
            samples: Samples = {}
            for one in measured:
                if one.verdict.row == row and (value := one.scores.get(metric)) is not None:
                    samples.setdefault(one.sample, []).append(value)
            ours = fmean(map(fmean, samples.values())) if samples else None
            difference = f"{ours - float(row[metric]):+.1f}" if row[metric] and ours is not None else "-"
            cells[-1] += [row[metric] or "-", counted(samples), difference]
    notes = [
        "Ours: the mean ± 95% interval (Student's t) over checkpoints whose configs are those of the row's recipes; "
        "several runs of one checkpoint are one sample, their mean."
    ]
    if engine not in ("", "detectron2"):
        notes.append("The paper's engine is Detectron2, this table's is not.")
    return Table(f"Published: {name}{f', engine {engine}' if engine else ''}", notes, head, cells)


def _label(row: Mapping[str, str]) -> str:
    if "init" in row:
        return f"{TASK_NAMES[row['task']]}: {row['init']}"
    return ", ".join(filter(None, (row["name"], Path(row["pretrain"]).stem, row["overrides"])))


# JCL's Fig. 3: how similar the views of an image are


def similarities(found: Found) -> Iterable[Table]:
    """A table per protocol; a run that is damaged is named in ``found.unread``."""
    runs = [run for run in found.runs if run.results.get("stage") == "distributions"]
    names, tables = short_names([run.folder for run in runs]), dict[str, list[list[str]]]()
    for run in runs:
        try:
            results: dict[str, Any] = run.results
            protocol = {**results["protocol"], **{key: results[key] for key in ("augmentations", "images")}}
            for label, row in results["runs"].items():
                cells = [f"{row[key]:.3g}" if "variance" in key else f"{row[key]:.4f}" for key in _SIMILARITY]
                tables.setdefault(words(protocol, protocol), []).append([f"{names[run.folder]}: {label}", *cells])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            found.unread.append(f"{run.folder / 'results.json'} cannot be shown: it lacks {error}")
    for protocol, rows in tables.items():
        note = f"Per image, over its views: mean cosine similarity and mean variance; {protocol}."
        yield Table("Similarity of an image's views (JCL, Fig. 3)", [note], ["run", *_SIMILARITY.values()], rows)
