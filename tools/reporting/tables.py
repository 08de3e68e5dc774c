"""Tables of a report: all scores of a table were measured on the same data, those of a column with one protocol."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pretrain.common.errors import count_noun
from tools.stages.completion import find_recorded_kind
from transfer.coco.ceiling import describe_ceiling

from .document import Table
from .origins import Origin
from .paper_tables import Verdict, find_published
from .protocols import Protocol, describe, list_differences
from .runs import TASK_NAMES, BackboneScore, Clean, DetectorScore

_METRICS = ("AP", "AP50", "AP75")
_ORIGIN_COLUMNS = ["run", "method", "backbone", "pretrained on", "epochs", "seed"]


@dataclass
class BackboneRow:
    """One backbone: a pretraining run with its probes, or probes of the same weights from elsewhere.

    Attributes:
        folder: folder that names the row.
        scores: the pretraining run's comes first; it may have none.
    """

    folder: Path
    origin: Origin
    scores: list[BackboneScore]


def build_rows(scores: Sequence[BackboneScore], report_folders: Sequence[Path]) -> list[BackboneRow]:
    """Build a row per pretraining, with the probes of its final weights, and a row per other probed weights."""
    pretrained: list[BackboneRow] = []
    for score in scores:
        if score.is_of_pretraining:
            folder = score.folder.parent if score.folder.name == score.stage else score.folder  # a pipeline's branch
            pretrained.append(BackboneRow(folder, score.origin, [score]))
    probed: dict[tuple[Path, str], BackboneRow] = {}
    for score in scores:
        if score.is_of_pretraining or not score.kind:
            continue
        writers = [row for row in pretrained if score.origin.sha256 == row.origin.sha256]
        row = max(writers, key=lambda row: len(os.path.commonpath([row.folder, score.folder])), default=None)
        if row is None:
            parent = score.folder.parent  # of a branch, unless the report is about the folder itself
            folder = score.folder if any(folder.is_relative_to(parent) for folder in report_folders) else parent
            weights = score.origin.sha256 or str(score.origin)
            row = probed.setdefault((folder, weights), BackboneRow(folder, score.origin, []))
        row.scores.append(score)
    rows = [*pretrained, *probed.values()]
    for row in probed.values():  # several weights were probed in one folder
        if sum(other.folder == row.folder for other in rows) > 1:
            row.folder = row.scores[0].folder
    position = {score.folder: index for index, score in enumerate(scores)}
    return sorted(rows, key=lambda row: position[row.scores[0].folder])


def build_probe_tables(rows: Sequence[BackboneRow], names: dict[Path, str]) -> Iterable[Table]:
    """Yield one table per data set that was scored, and one of the pretraining runs without a score."""
    for test in dict.fromkeys(score.test for row in rows for score in row.scores if score.test):
        scored = [replace(row, scores=[score for score in row.scores if score.test == test]) for row in rows]
        yield _build_probe_table(test, [row for row in scored if row.scores], names)
    unscored = [row for row in rows if not any(score.test for score in row.scores)]
    if unscored:
        head = list(_ORIGIN_COLUMNS)
        lines = [_describe_origin(row, names) for row in unscored]
        note = "Their data have no labels or no val split; set DATA.PROBE_TRAIN and DATA.VAL to other data."
        settings = _add_rankme(head, lines, unscored)
        folders = {names[row.folder]: row.folder for row in unscored}
        yield _build_table("Pretraining without accuracy", [note], head, lines, settings, folders)


def _add_rankme(head: list[str], lines: Sequence[list[str]], rows: Sequence[BackboneRow]) -> list[str]:
    """Add a column of RankMe if a pretraining run has it; return the note that explains it."""
    values = [[score.metrics.get("rankme") for score in row.scores] for row in rows]
    if not any(value is not None for row in values for value in row):
        return []
    head.append("RankMe")
    for line, row in zip(lines, values, strict=True):
        line.append(_format_values(row))
    return ["RankMe: effective rank of the embeddings of training images; comparable on the same images only."]


def _describe_origin(row: BackboneRow, names: dict[Path, str]) -> list[str]:
    o = row.origin
    return [cell or "-" for cell in (names[row.folder], o.method or o.source, o.arch, o.data, o.epochs, o.seed)]


def _build_probe_table(test: str, rows: Sequence[BackboneRow], names: dict[Path, str]) -> Table:
    """Build a row per backbone and a column per protocol and metric; headings name the settings that differ."""
    head = list(_ORIGIN_COLUMNS)
    settings: list[str] = []
    lines = [_describe_origin(row, names) for row in rows]
    shown = {score.kind: find_recorded_kind(score.stage).metrics for row in rows for score in row.scores}
    for kind, metrics in sorted(shown.items()):
        protocols = _drop_duplicates(score.protocol for row in rows for score in row.scores if score.kind == kind)
        different = list_differences(protocols)
        if protocols:
            common = [name for name in protocols[0] if name not in different]
            settings.append(f"{kind}: {describe(protocols[0], common)}.")
        for protocol in protocols:
            detail = f" ({describe(protocol, different)})" if different else ""
            for metric in metrics:
                head.append(f"{kind} {metric.replace('top', 'top-')}{detail}")
                for line, row in zip(lines, rows, strict=True):
                    scores = [score for score in row.scores if (score.kind, score.protocol) == (kind, protocol)]
                    line.append(_format_values([score.metrics.get(metric) for score in scores]))
    settings += _add_rankme(head, lines, rows)
    verdicts = [(names[row.folder], find_published(score)) for row in rows for score in row.scores]
    title = f"Accuracy on the validation images of {test}, in percent"
    folders = {names[row.folder]: row.folder for row in rows}
    return _build_table(title, [], head, lines, [*settings, *_explain_refusals(verdicts)], folders)


def build_detection_tables(runs: Sequence[DetectorScore], names: dict[Path, str]) -> Iterable[Table]:
    """Yield one table per protocol; the keys that differ distinguish protocols with the same headline."""
    for headline in dict.fromkeys(run.headline for run in runs):
        same_headline = [run for run in runs if run.headline == headline]
        protocols = _drop_duplicates(run.protocol for run in same_headline)
        different = list_differences(protocols)
        for protocol in protocols:
            detail = describe(protocol, different) if different else ""
            yield _build_detection_table([run for run in same_headline if run.protocol == protocol], detail, names)


def _build_detection_table(runs: Sequence[DetectorScore], detail: str, names: dict[Path, str]) -> Table:
    detector, *protocol = runs[0].headline
    tasks = [task for task in TASK_NAMES if any(f"{task}/AP" in run.metrics for run in runs)]
    head = ["run", "method", "pretrained on", "epochs", "seed"]
    more = sorted({name for run in runs for name in run.metrics if name.partition("/")[2].startswith("AP@")})
    columns = [f"{task}/{name}" for task in tasks for name in _METRICS] + more
    head += [f"{TASK_NAMES[task]} {name}" for task, _, name in (column.partition("/") for column in columns)]
    clean_columns = [f"{task}/AP" for task in tasks if any(run.clean and run.clean.metrics for run in runs)]
    head += [f"{TASK_NAMES[column.partition('/')[0]]} AP without duplicates" for column in clean_columns]
    lines = []
    for run in runs:
        o = run.origin
        cells = [names[run.folder] + (" (evaluation only)" if run.evaluated_only else "")]
        cells += [cell or "-" for cell in (o.method, o.data, o.epochs, o.seed)]
        cells += [_format_values([run.metrics.get(column)]) for column in columns]
        clean_metrics = run.clean.metrics if run.clean else {}
        cells += [_format_values([clean_metrics.get(column)]) for column in clean_columns]
        lines.append(cells)
    notes = [f"{'; '.join(protocol)}{f'; {detail}' if detail else ''}. AP from 0 to 100."]
    weights = [f"{names[run.folder]}: {run.origin.source}" for run in runs if run.origin.source]
    settings = [f"Weights: {'; '.join(weights)}."] if weights else []
    ended = [f"{names[run.folder]} {run.ended_early}" for run in runs if run.ended_early]
    notes += [f"Ended early: {'; '.join(ended)}."] if ended else []
    notes += _explain_ceilings(runs, tasks)
    notes += dict.fromkeys(_describe_clean(run.clean) for run in runs if run.clean)
    notes += dict.fromkeys(f"{remark}." for run in runs for remark in run.remarks)
    settings += _explain_refusals([(names[run.folder], find_published(run)) for run in runs])
    folders = {line[0]: run.folder for line, run in zip(lines, runs, strict=True)}
    return _build_table(f"{detector[0].upper()}{detector[1:]}", notes, head, lines, settings, folders)


def _explain_ceilings(runs: Sequence[DetectorScore], tasks: Sequence[str]) -> list[str]:
    """Explain once that the images have more objects than predictions count, where they do."""
    lines: dict[str, None] = {}
    for task in tasks:
        for run in runs:
            names = ("images_over_limit", "AP_ceiling", "AR_ceiling")
            ceiling = {name: run.metrics.get(f"{task}/{name}") for name in names}
            if ceiling["AP_ceiling"] is not None:
                lines[f"{describe_ceiling(task, ceiling, run.test)}."] = None
    return list(lines)


def _describe_clean(clean: Clean) -> str:
    """Say how many test images are nearly training images, and which were compared."""
    number = f"{clean.excluded:,} of {count_noun(clean.total, 'test image')} {'is' if clean.excluded == 1 else 'are'}"
    images = f"{number} nearly equal to images of {', '.join(clean.compared)} ({', '.join(clean.files)})"
    exception = f"; not compared with {', '.join(clean.not_compared)}" if clean.not_compared else ""
    return f"Duplicates: {images}{exception}."


def _explain_refusals(verdicts: Iterable[tuple[str, Verdict]]) -> list[str]:
    refused: dict[tuple[str, str], dict[str, None]] = {}
    for run, verdict in verdicts:
        if verdict.reason:
            refused.setdefault((verdict.table, verdict.reason), {})[run] = None
    return [f"Not compared with {table}: {', '.join(runs)}: {why}." for (table, why), runs in refused.items()]


def _drop_duplicates(protocols: Iterable[Protocol]) -> list[Protocol]:
    distinct: list[Protocol] = []
    for protocol in protocols:
        if protocol not in distinct:
            distinct.append(protocol)
    return distinct


def _build_table(
    title: str,
    notes: Sequence[str],
    head: Sequence[str],
    lines: Sequence[Sequence[str]],
    settings: Sequence[str],
    folders: Mapping[str, Path],
) -> Table:
    """Build a table; values that all pretraining runs have in common become a note instead of a column."""
    dropped: dict[int, set[str]] = {}
    for index, name in enumerate(head):
        values = {line[index] for line in lines if (line[1], line[index]) != ("random", "-")}
        if name in _ORIGIN_COLUMNS[2:] and len(values) < 2:
            dropped[index] = values
    common = [f"{head[index]} {value}" for index, values in dropped.items() for value in values if value != "-"]
    if common:
        notes = [f"Every pretraining run: {', '.join(common)}.", *notes]
    cells = [[cell for index, cell in enumerate(line) if index not in dropped] for line in (head, *lines)]
    return Table(title, notes, cells[0], cells[1:], settings, folders)


def _format_values(values: Sequence[float | None]) -> str:
    """Return one number, or several if a backbone was probed more than once with one protocol; ``-`` for none."""
    return " / ".join(dict.fromkeys(f"{value:.1f}" for value in values if value is not None)) or "-"
