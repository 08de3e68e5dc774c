"""Collect the results of runs into tables, next to a paper's numbers if the protocol is the paper's.

    python tools/report.py runs/demo --output report.html --output report.md
    python tools/report.py runs/*

Scores share a table only if they were measured on the same data, and a column only if their protocol is the same. The
protocol of a detector consists of the config keys that change the result, and the engine with its version. An .html
file is one page that needs no other file; it adds curves, and the checkpoint, commit and machine of each run.
"""

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

if __name__ == "__main__":  # run as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from pretrain.common.command_line import run_program

    run_program("tools.report")

from pretrain.common.command_line import Parser
from pretrain.common.errors import UserError, escape_control
from pretrain.common.files import atomic_write, check_writable
from pretrain.common.run.lease import claim
from pretrain.common.shell import shorten_path
from tools.reporting import cost, duplicates, paper_tables
from tools.reporting.document import Report, render_json, render_lists, render_markdown, render_section
from tools.reporting.drawing.figures import draw_figures, draw_maps
from tools.reporting.drawing.page import render_page
from tools.reporting.files import RunCollection, find_runs, shorten_names
from tools.reporting.runs import BackboneScore, DetectorScore, read_scores
from tools.reporting.seeds import branches
from tools.reporting.seeds.headline import build_headline
from tools.reporting.seeds.power import build_power_table
from tools.reporting.seeds.study import build_study, build_table
from tools.reporting.seeds.verdicts import build_verdict_table, compare_branches
from tools.reporting.tables import build_detection_tables, build_probe_tables, build_rows
from tools.stages.options import add_arguments, read_arguments
from tools.stages.report import Report as ReportStage

_PAGES = (".html", ".htm")
_TEXTS = (".md", ".markdown", ".txt")
_DIFFERENCE = 2.0  # between branches, in points of AP or accuracy, that further seeds should show


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, ReportStage.Options)
    return run(read_arguments(ReportStage.Options, parser.parse_args(argv)))


def run(options: ReportStage.Options) -> int:
    """Print the report of the runs in some folders, write it to the output files, and return 0."""
    if options.power is not None and not 0 < options.power < math.inf:
        raise UserError(f"--power is {options.power:g}; name the difference that the seeds should show, such as 2")
    for file in options.output:
        if Path(file).suffix.lower() not in (*_PAGES, *_TEXTS):  # such as results.json, which belongs to a run
            raise UserError(
                f"--output is {file}; its name must end in {', '.join(_PAGES)} or, for Markdown, {_TEXTS[0]}"
            )
        check_writable(file, "--output")
    pages = [file for file in options.output if Path(file).suffix.lower() in _PAGES]
    texts = [file for file in options.output if file not in pages]
    with tempfile.TemporaryDirectory() as temporary:
        main_file = (texts or [Path(temporary, "report.md")])[0] if options.output else ""
        report = build_report(options.folders, main_file, options.power or _DIFFERENCE)
        text = render_markdown(report)
        shown = text if texts else render_markdown(replace(report, figures=[], feature_maps=[]))  # a page contains them
        print(_select_answer(report, options) or (render_json(report) if options.json else shown), end="")
        for file in options.output:
            with claim(Path(file).parent, "a report", file=Path(file).name):  # removes files that a killed report left
                atomic_write(file, render_page(report, Path(file)) if file in pages else text)
    figures = [figure.file for figure in [*report.feature_maps, *report.figures] if texts]
    lines = [f"figure: {shorten_path(file)}" for file in figures]
    for line in [*lines, *(f"report: {shorten_path(file)}" for file in options.output)]:
        print(escape_control(line), file=sys.stderr if options.json else sys.stdout)
    if report.collection.unreadable and not report.scores:
        raise UserError("no result could be read; the lines under 'Unreadable files' say why")
    return 0


def _select_answer(report: Report, options: ReportStage.Options) -> str:
    """Return what --verdicts and --power ask for, as Markdown; empty without them.

    These are tables, and what is missing in them: files that could not be read, and incomplete runs.

    Raises:
        UserError: no pipeline of the report has seeds, or none has scores of two branches.
    """
    if not (options.verdicts or options.power):
        return ""
    tables = [*(report.verdicts if options.verdicts else ()), *(report.powers if options.power else ())]
    problem = ""
    if not tables:
        problem = f"no pipeline with SEEDS and scores in {', '.join(options.folders)}; add SEEDS to its file"
    elif not any(table.rows for table in tables):
        problem = f"no score of two branches in {', '.join(options.folders)}, so nothing can be compared"
    if problem:
        raise UserError(
            ". ".join([problem, *(f"{title}: {'; '.join(lines)}" for title, lines in report.missing.items())])
        )
    sections = [render_section(table) for table in tables if table.rows]
    return escape_control("\n".join([*sections, *render_lists(report.missing)]))


def build_report(folders: Sequence[str | Path], output: str | Path = "", difference: float = _DIFFERENCE) -> Report:
    """Collect the content of a report of the runs in ``folders``.

    Args:
        output: file of the report; figures are drawn next to it. If empty, none are drawn.
        difference: difference between branches that further seeds should show.

    Raises:
        UserError: a folder does not exist, or there is nothing to report in any of them.
    """
    collection = find_runs([Path(folder) for folder in folders])
    scores = duplicates.add_clean_scores(read_scores(collection), collection)
    if not (collection.runs or collection.unreadable or collection.incomplete):
        raise UserError(escape_control(f"no results.json in {', '.join(map(str, folders))}; start a run there first"))
    absolute = [Path(os.path.abspath(folder)) for folder in folders]
    backbones = [score for score in scores if isinstance(score, BackboneScore)]
    detections = [score for score in scores if isinstance(score, DetectorScore)]
    rows = build_rows(backbones, absolute)
    names = shorten_names([*(row.folder for row in rows), *(score.folder for score in detections)])
    studies = [build_study(pipeline, collection, scores) for pipeline in collection.pipelines]
    seeded = [study for study in studies if study.seeds and study.scores]
    verdicts = [build_verdict_table(study) for study in seeded]
    plans = zip(studies, collection.pipelines, strict=True)
    powers = [build_power_table(study, collection.runs, plan, difference) for study, plan in plans if study in seeded]
    differences = [branches.build_table(pipeline, collection, scores) for pipeline in collection.pipelines]
    tables = [
        *map(build_table, seeded),
        *(table for table in verdicts if table.rows),
        *filter(None, differences),
        *build_probe_tables(rows, names),
        *build_detection_tables(detections, names),
        *paper_tables.build_tables(scores),
        *powers,
        *cost.build_tables(collection.runs),
    ]
    report = Report(
        tables,
        collection,
        scores,
        title=_choose_title(collection, absolute),
        headline=build_headline(studies, detections),
        comparisons=[asdict(comparison) for study in studies for comparison in compare_branches(study)],
        verdicts=verdicts,
        powers=powers,
    )
    if output:
        report.feature_maps = draw_maps(collection, scores, Path(output))
        report.figures = draw_figures(collection, seeded, detections, Path(output))
    return report


def _choose_title(collection: RunCollection, folders: Sequence[Path]) -> str:
    """Return the names of the pipelines if every run belongs to one; otherwise those of the first folders."""
    if collection.pipelines and all(
        any(pipeline.folder in run.folder.parents for pipeline in collection.pipelines) for run in collection.runs
    ):
        return ", ".join(pipeline.folder.name for pipeline in collection.pipelines)
    names = [folder.name for folder in folders]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
