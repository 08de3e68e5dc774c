"""Puts the results of runs into tables, beside a paper's numbers where the protocol is the paper's.

    python tools/report.py runs/demo --output report.md
    python tools/report.py runs/*

Scores share a table only if they are of the same data, and a column only if their protocol is the same. The protocol of
a detector is the part of its config that changes the result, and the engine with its version.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a file: the packages lie one folder up

import tabulate  # noqa: E402

from pretrain.common.errors import UserError, run_command_line  # noqa: E402
from pretrain.common.run_folder import atomic_write, refuse_unwritable  # noqa: E402
from tools.reporting import papers  # noqa: E402
from tools.reporting import seeds as over_seeds  # noqa: E402
from tools.reporting.files import Found, find, short_names  # noqa: E402
from tools.reporting.pictures import Pictures, draw  # noqa: E402
from tools.reporting.runs import (  # noqa: E402
    Detection,
    Origin,
    Pretraining,
    Probe,
    Protocol,
    differing,
    parse,
    words,
)

_TASKS = {"bbox": "box", "segm": "mask", "keypoints": "keypoint"}
_METRICS = ("AP", "AP50", "AP75")
_SCORES = {"kNN": ("top1",), "linear": ("top1", "top5")}
_ABOUT = ["run", "method", "backbone", "pretrained on", "epochs", "seed"]
tabulate.MIN_PADDING = 0  # headings are no wider than they need to be, so that a table fits into a terminal


@dataclass
class Row:
    """One frozen backbone: a pretraining with its probes, or probes of the same weights from elsewhere.

    Attributes:
        folder: what the row is named after.
        pretraining: None where the weights came from elsewhere.
    """

    folder: Path
    origin: Origin
    probes: list[Probe] = field(default_factory=list)
    pretraining: Pretraining | None = None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="run folders, or folders of them")
    parser.add_argument("--output", default="", metavar="FILE", help="also write the Markdown to this file")
    args = parser.parse_args(argv)
    if args.output:
        refuse_unwritable(args.output)
    text, is_readable, pictures = render(args.folders, args.output)
    print(text, end="")
    if args.output:
        atomic_write(args.output, text)
        print(*(_printable(f"picture: {path}") for path in pictures), _printable(f"report: {args.output}"), sep="\n")
    if not is_readable:
        raise UserError("no result could be read; the lines under 'Not read' say why")
    return 0


def render(folders: Sequence[str | Path], output: str | Path = "") -> tuple[str, bool, list[Path]]:
    """The report as Markdown, False if there are results of which none could be read, and the pictures it links.

    Args:
        output: the file for the report. Pictures of predictions are drawn beside it; empty: none are drawn.

    Raises:
        UserError: a folder that does not exist, or nothing to report in any of them.
    """
    found = find([Path(folder) for folder in folders])
    good: list[Pretraining | Probe | Detection] = []
    unreadable = 0
    for run in found.runs:
        try:
            good += parse(run)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            found.unread.append(f"{run.folder / 'results.json'} cannot be shown: {what}")
            unreadable += 1
    if not (found.runs or found.unread or found.not_done):
        raise UserError(_printable(f"no results.json in {', '.join(map(str, folders))}; start a run there first"))
    rows = _rows(good, [Path(os.path.abspath(folder)) for folder in folders])
    detections = [item for item in good if isinstance(item, Detection)]
    names = short_names([*(row.folder for row in rows), *(run.folder for run in detections)])
    pictures = draw(found.pipelines, detections, Path(output)) if output else Pictures()
    tables = [*_seed_tables(found), *_probe_tables(rows, names), *_detection_tables(detections, names)]
    parts = ["# Results\n", *tables, *pictures.parts]
    for title, lines in (("Not read", found.unread + pictures.unread), ("Not done", found.not_done)):
        if lines:
            parts.append(f"## {title}\n\n" + "\n".join(f"- {' '.join(line.split())}" for line in lines) + "\n")
    return _printable("\n".join(parts)), len(found.runs) > unreadable or not found.unread, pictures.written


def _seed_tables(found: Found) -> Iterable[str]:
    for folder in found.pipelines:
        try:
            study = over_seeds.read_study(folder)
        except UserError as error:
            found.unread.append(str(error))
            continue
        if study and study.scores:
            yield f"## {study.name}\n\n{over_seeds.explanation(study)}\n{over_seeds.table(study)}\n"


def _rows(items: Sequence[Pretraining | Probe | Detection], given: Sequence[Path]) -> list[Row]:
    """A row per pretraining, with the probes of its final weights, and a row per other probed weights."""
    rows: list[Row] = []
    for item in items:
        if isinstance(item, Pretraining):
            folder = item.folder.parent if item.folder.name == "pretrain" else item.folder  # a pipeline's branch
            probes = [item.probe] if item.probe else []
            rows.append(Row(folder, item.origin, probes, item))
    others: dict[tuple[Path, str], Row] = {}
    for probe in (item for item in items if isinstance(item, Probe)):
        owner = max(rows, key=lambda row: _kinship(probe, row), default=None)
        if owner is None or not _kinship(probe, owner):
            parent = probe.folder.parent
            is_branch = not any(folder.is_relative_to(parent) for folder in given)
            folder, weights = parent if is_branch else probe.folder, probe.origin.sha256 or str(probe.origin)
            owner = others.setdefault((folder, weights), Row(folder, probe.origin))
        owner.probes.append(probe)
    for row in others.values():  # several weights were probed in one folder
        if sum(other.folder == row.folder for other in (*rows, *others.values())) > 1:
            row.folder = row.probes[0].folder
    position = {item.folder: place for place, item in enumerate(items)}
    return sorted((*rows, *others.values()), key=lambda row: position[(row.pretraining or row.probes[0]).folder])


def _kinship(probe: Probe, row: Row) -> int:
    """2: a probe of the row's final weights beside or inside its folder; 1: recorded as coming from it; 0: neither."""
    own = row.pretraining
    if own is None or probe.origin.method != own.origin.method or probe.steps not in (None, own.steps):
        return 0
    if own.folder in (probe.folder.parent, probe.folder.parent / "pretrain"):
        return 2
    recorded = probe.origin.config.get("OUTPUT_DIR")
    return int(recorded is not None and recorded == own.origin.config.get("OUTPUT_DIR"))


def _probe_tables(rows: Sequence[Row], names: dict[Path, str]) -> Iterable[str]:
    for scored_on in dict.fromkeys(probe.scored_on for row in rows for probe in row.probes):
        mine = [replace(row, probes=[p for p in row.probes if p.scored_on == scored_on]) for row in rows]
        yield _probe_table(scored_on, [row for row in mine if row.probes], names)
    unscored = [_about(row, names) for row in rows if not row.probes]
    if unscored:
        notes = ["- Its data have no labels."]
        yield f"## Pretraining without scores\n\n{_table(notes, _ABOUT, unscored)}"


def _about(row: Row, names: dict[Path, str]) -> list[str]:
    o = row.origin
    return [cell or "-" for cell in (names[row.folder], o.method or o.source, o.arch, o.data, o.epochs, o.seed)]


def _probe_table(scored_on: str, rows: Sequence[Row], names: dict[Path, str]) -> str:
    """A row per backbone, a column per protocol and score; a heading names what distinguishes its protocol."""
    head, notes, refused = list(_ABOUT), [], defaultdict(list)
    lines = [_about(row, names) for row in rows]
    for kind, scores in _SCORES.items():
        protocols = _distinct(probe.protocol for row in rows for probe in row.probes if probe.kind == kind)
        different = differing(protocols)
        if protocols:
            notes.append(f"- {kind}: {words(protocols[0], [name for name in protocols[0] if name not in different])}.")
        for protocol in protocols:
            cells = [[p for p in row.probes if (p.kind, p.protocol) == (kind, protocol)] for row in rows]
            for score in scores:
                which = f" ({words(protocol, different)})" if different else ""
                head.append(f"{kind} {score.replace('top', 'top-')}{which}")
                for line, probes in zip(lines, cells, strict=True):
                    line.append(_numbers([probe.scores.get(score) for probe in probes]))
            verdicts = [_linear_result(row, probes) for row, probes in zip(rows, cells, strict=True)]
            for row, verdict in zip(rows, verdicts, strict=True):
                refused[verdict.table, verdict.reason].append(names[row.folder])
            if any(verdict.numbers for verdict in verdicts):
                head += ["paper's top-1", "difference"]
                for line, probes, verdict in zip(lines, cells, verdicts, strict=True):
                    top1 = verdict.numbers["top1"] if verdict.numbers else None
                    line += [_numbers([top1]), _numbers([_minus(p.scores["top1"], top1) for p in probes], "+.1f")]
                tables = dict.fromkeys(verdict.table for verdict in verdicts if verdict.numbers)
                notes.append(f"- Paper: {', '.join(tables)}.")
    notes += _refusals(refused)
    title = f"## Frozen features: accuracy on the validation images of {scored_on}, in percent"
    return f"{title}\n\n{_table(notes, head, lines)}"


def _linear_result(row: Row, probes: Sequence[Probe]) -> papers.Verdict:
    """The verdict on probes by one protocol; a probe's record of its checkpoint is preferred to the folder's config."""
    if not probes or probes[0].kind != "linear":
        return papers.Verdict()
    return papers.linear_result(probes[0].origin if probes[0].origin.config else row.origin, probes[0])


def _detection_tables(runs: Sequence[Detection], names: dict[Path, str]) -> Iterable[str]:
    """Yields one table per protocol; protocols with the same headline are told apart by the keys that differ."""
    for headline in dict.fromkeys(run.headline for run in runs):
        alike = [run for run in runs if run.headline == headline]
        protocols = _distinct(run.protocol for run in alike)
        different = differing(protocols)
        for protocol in protocols:
            detail = words(protocol, different) if different else ""
            yield _detection_table([run for run in alike if run.protocol == protocol], detail, names)


def _detection_table(runs: Sequence[Detection], detail: str, names: dict[Path, str]) -> str:
    (detector, *protocol), task = runs[0].headline, papers.TASKS[runs[0].detector]
    tasks = [task for task in _TASKS if any(task in run.metrics for run in runs)]
    head = ["run", "method", "pretrained on", "epochs", "seed"]
    head += [f"{_TASKS[t]} {name}" for t in tasks for name in _METRICS]
    verdicts, refused = [papers.detection_result(run) for run in runs], defaultdict(list)
    is_compared = any(verdict.numbers for verdict in verdicts)
    head += [f"paper's {_TASKS[task]} {name}" for name in _METRICS if is_compared]
    lines = []
    for run, verdict in zip(runs, verdicts, strict=True):
        o, name = run.origin, names[run.folder]
        refused[verdict.table, verdict.reason].append(name)
        cells = [name + (" (evaluation only)" if run.evaluated_only else "")]
        cells += [cell or "-" for cell in (o.method, o.data, o.epochs, o.seed)]
        cells += [_numbers([run.metrics.get(t, {}).get(metric)]) for t in tasks for metric in _METRICS]
        for metric in _METRICS if is_compared else ():
            paper, ours = (verdict.numbers or {}).get(metric), run.metrics.get(task, {}).get(metric)
            cells.append(f"{_numbers([paper])} ({_numbers([_minus(ours, paper)], '+.1f')})" if paper else "-")
        lines.append(cells)
    notes = [f"- {'; '.join(protocol)}{f'; {detail}' if detail else ''}. AP from 0 to 100."]
    if is_compared:
        table = next(verdict.table for verdict in verdicts if verdict.numbers)
        notes.append(f"- Paper: {table}; in parentheses the difference to it. 0.3 AP is ordinary variation.")
        if runs[0].engine != "detectron2":
            notes.append("- The paper's engine is Detectron2, this table's is not.")
    weights = [f"{names[run.folder]}: {run.origin.source}" for run in runs if run.origin.source]
    notes += [f"- Weights: {'; '.join(weights)}."] if weights else []
    notes += _refusals(refused)
    return f"## {detector[0].upper()}{detector[1:]}\n\n{_table(notes, head, lines)}"


def _refusals(refused: Mapping[tuple[str, str], Sequence[str]]) -> list[str]:
    return [f"- Not compared with {table}: {', '.join(runs)}: {why}." for (table, why), runs in refused.items() if why]


def _distinct(protocols: Iterable[Protocol]) -> list[Protocol]:
    found: list[Protocol] = []
    for protocol in protocols:
        if protocol not in found:
            found.append(protocol)
    return found


def _table(notes: Sequence[str], head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Notes and a table. What is the same for every pretraining is a note instead of a column."""
    dropped: dict[int, set[str]] = {}
    for place, name in enumerate(head):
        values = {line[place] for line in lines if (line[1], line[place]) != ("random", "-")}
        if name in _ABOUT[2:] and len(values) < 2:
            dropped[place] = values
    shared = [f"{head[place]} {value}" for place, values in dropped.items() for value in values if value != "-"]
    notes = [*([f"- Every pretraining: {', '.join(shared)}."] if shared else []), *notes]
    cells = [[cell for place, cell in enumerate(line) if place not in dropped] for line in (head, *lines)]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in cells]
    align = ["left", *["right"] * (len(cells[0]) - 1)]
    table = tabulate.tabulate(cells[1:], cells[0], "pipe", disable_numparse=True, colalign=align)
    return "\n".join(notes) + f"\n\n{table}\n"


def _numbers(values: Sequence[float | None], form: str = ".1f") -> str:
    """One number, or several if a run was probed more than once by one protocol; ``-`` for none."""
    return " / ".join(dict.fromkeys(f"{value:{form}}" for value in values if value is not None)) or "-"


def _minus(ours: float | None, published: float | None) -> float | None:
    return None if ours is None or published is None else ours - published


def _printable(text: str) -> str:
    """Escapes bytes of a path that are not UTF-8, as in ``\\udcff``: they could not be printed otherwise."""
    return text.encode(errors="backslashreplace").decode()


if __name__ == "__main__":
    run_command_line(main)
