"""Puts the results of runs into tables, next to a paper's numbers where the protocol is the paper's.

    python tools/report.py runs/demo --output report.html --output report.md
    python tools/report.py runs/*

Scores share a table only if they are of the same data, and a column only if their protocol is the same. The protocol of
a detector is the part of its config that changes the result, and the engine with its version. An .html file is one page
that needs nothing else; it adds curves, and what each run was made from and with.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file: the packages lie one folder up

from pretrain.common.errors import UserError, printable, run_command_line
from pretrain.common.lock import claim
from pretrain.common.run_folder import atomic_write, check_writable
from tools.reporting import comparison, cost, seeds
from tools.reporting.document import Report, markdown
from tools.reporting.figures import draw
from tools.reporting.files import find, short_names
from tools.reporting.page import page
from tools.reporting.runs import Detection, Item, parse
from tools.reporting.tables import detection_tables, probe_tables, rows_of


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    return write(args.folders, args.output)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of this command and of `launch.py report`."""
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="run folders, or folders of them")
    parser.add_argument(
        "--output", default=[], action="append", metavar="FILE",
        help="also write the report to this file: .html is a page, any other name Markdown; may be given several times",
    )  # fmt: skip


def write(folders: Sequence[str], output: Sequence[str]) -> int:
    """Prints the report of the runs in ``folders``, and writes it to the files ``output``; returns the exit status."""
    for file in output:
        check_writable(file)
    pages = [file for file in output if Path(file).suffix.lower() == ".html"]
    texts = [file for file in output if file not in pages]
    with tempfile.TemporaryDirectory() as temporary:
        report = gather(folders, (texts or [Path(temporary, "report.md")])[0] if output else "")
        text = markdown(report)
        print(text, end="")
        for file in output:
            with claim(Path(file).parent, "a report", of=Path(file).name):  # removes what a killed report left
                atomic_write(file, page(report) if file in pages else text)
    pictures = [f"picture: {picture.file}" for picture in report.pictures if texts]
    for line in [*pictures, *(f"report: {file}" for file in output)]:
        print(printable(line))
    if report.found.unread and not report.items:
        raise UserError("no result could be read; the lines under 'Not read' say why")
    return 0


def gather(folders: Sequence[str | Path], pictures_beside: str | Path = "") -> Report:
    """Everything that a report of the runs in ``folders`` shows.

    Args:
        pictures_beside: a file; pictures of scores and predictions are drawn next to it. Empty: none are drawn.

    Raises:
        UserError: a folder that does not exist, or nothing to report in any of them.
    """
    found = find([Path(folder) for folder in folders])
    items: list[Item] = []
    for run in found.runs:
        try:
            items += parse(run)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            found.unread.append(f"{run.folder / 'results.json'} cannot be shown: {what}")
    if not (found.runs or found.unread or found.not_done):
        raise UserError(printable(f"no results.json in {', '.join(map(str, folders))}; start a run there first"))
    rows = rows_of(items, [Path(os.path.abspath(folder)) for folder in folders])
    detections = [item for item in items if isinstance(item, Detection)]
    names = short_names([*(row.folder for row in rows), *(run.folder for run in detections)])
    studies = [study for plan in found.plans if (study := seeds.read_study(plan.folder)) and study.scores]
    tables = [
        *map(seeds.table, studies), *probe_tables(rows, names), *detection_tables(detections, names),
        *comparison.tables(items), *cost.table(found.runs),
    ]  # fmt: skip
    pictures = draw(found, studies, detections, Path(pictures_beside)) if pictures_beside else []
    return Report(tables, pictures, found, items)


if __name__ == "__main__":
    run_command_line(main)
