"""Collect the results of runs into tables, next to a paper's numbers if the protocol is the paper's.

    python tools/report.py runs/demo --output report.html --output report.md
    python tools/report.py runs/*

Scores share a table only if they were measured on the same data, and a column only if their protocol is the same. The
protocol of a detector consists of the config keys that change the result, and the engine with its version. An .html
file is one page that needs no other file; it adds curves, and the checkpoint, commit and machine of each run.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # makes the packages importable when run as a file

from pretrain.common.command_line import Parser, run_command_line
from pretrain.common.errors import UserError, escape_control
from pretrain.common.files import atomic_write, check_writable
from pretrain.common.run.lease import claim
from tools.reporting import cost, duplicates, paper_tables
from tools.reporting.document import Report, render_json, render_markdown
from tools.reporting.drawing.figures import draw_figures, draw_maps
from tools.reporting.drawing.page import render_page
from tools.reporting.files import find_runs, shorten_names
from tools.reporting.runs import BackboneScore, DetectorScore, read_scores
from tools.reporting.seeds.study import build_study, build_table
from tools.reporting.tables import build_detection_tables, build_probe_tables, build_rows
from tools.stages.options import add_arguments, read_arguments
from tools.stages.report import Report as ReportStage


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, ReportStage.Options)
    return run(read_arguments(ReportStage.Options, parser.parse_args(argv)))


def run(options: ReportStage.Options) -> int:
    """Print the report of the runs in some folders, write it to the output files, and return 0."""
    for file in options.output:
        check_writable(file)
    pages = [file for file in options.output if Path(file).suffix.lower() == ".html"]
    texts = [file for file in options.output if file not in pages]
    with tempfile.TemporaryDirectory() as temporary:
        main_file = (texts or [Path(temporary, "report.md")])[0] if options.output else ""
        report = gather(options.folders, main_file)
        text = render_markdown(report)
        print(render_json(report) if options.json else text, end="")
        for file in options.output:
            with claim(Path(file).parent, "a report", file=Path(file).name):  # removes files that a killed report left
                atomic_write(file, render_page(report) if file in pages else text)
    figures = [f"figure: {figure.file}" for figure in [*report.feature_maps, *report.figures] if texts]
    for line in [*figures, *(f"report: {file}" for file in options.output)]:
        print(escape_control(line), file=sys.stderr if options.json else sys.stdout)
    if report.collection.unreadable and not report.scores:
        raise UserError("no result could be read; the lines under 'Unreadable files' say why")
    return 0


def gather(folders: Sequence[str | Path], output: str | Path = "") -> Report:
    """Collect the content of a report of the runs in ``folders``.

    Args:
        output: file of the report; figures are drawn next to it. If empty, none are drawn.

    Raises:
        UserError: a folder does not exist, or there is nothing to report in any of them.
    """
    collection = find_runs([Path(folder) for folder in folders])
    scores = duplicates.add_clean_scores(read_scores(collection), collection)
    if not (collection.runs or collection.unreadable or collection.incomplete):
        raise UserError(escape_control(f"no results.json in {', '.join(map(str, folders))}; start a run there first"))
    backbones = [score for score in scores if isinstance(score, BackboneScore)]
    detections = [score for score in scores if isinstance(score, DetectorScore)]
    rows = build_rows(backbones, [Path(os.path.abspath(folder)) for folder in folders])
    names = shorten_names([*(row.folder for row in rows), *(score.folder for score in detections)])
    studies = [build_study(pipeline, collection, scores) for pipeline in collection.pipelines if pipeline.seeds]
    studies = [study for study in studies if study.scores]
    tables = [
        *map(build_table, studies),
        *build_probe_tables(rows, names),
        *build_detection_tables(detections, names),
        *paper_tables.build_tables(scores),
        *cost.build_tables(collection.runs),
    ]
    if not output:
        return Report(tables, [], collection, scores)
    maps = draw_maps(collection, scores, Path(output))
    return Report(tables, draw_figures(collection, studies, detections, Path(output)), collection, scores, maps)


if __name__ == "__main__":
    run_command_line(main)
