"""Content of a report, and its Markdown. The HTML page (`page`) shows the same tables and figures."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

import tabulate

from pretrain.common.errors import escape_control
from pretrain.common.files import json_text

from .files import Collection
from .runs import DetectorScore, Score

tabulate.MIN_PADDING = 0  # headings are no wider than they need to be, so that a table fits into a terminal


@dataclass(frozen=True)
class Table:
    """A table with a heading.

    Attributes:
        notes: sentences above the table.
        head: names of the columns; the first column names the row.
        rows: cells as text; ``-`` means that there is no value.
    """

    title: str
    notes: Sequence[str]
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """A PNG file with a heading."""

    title: str
    notes: Sequence[str]
    alt: str
    file: Path


def render_figure(figure: Figure) -> str:
    """Return a figure as Markdown, linked by its file name, because it is in the folder of the report."""
    link = quote(figure.file.name, errors="surrogateescape")
    return f"## {figure.title}\n\n{_render_bullets(figure.notes)}\n![{figure.alt}]({link})\n"


@dataclass
class Report:
    """Tables and figures that Markdown and page show, and the runs and scores that they were made from.

    The report begins with ``feature_maps`` and ends with ``figures``.
    """

    tables: list[Table]
    figures: list[Figure]
    collection: Collection
    scores: list[Score]
    feature_maps: list[Figure] = field(default_factory=list)

    @property
    def lists(self) -> dict[str, list[str]]:
        """Map headings to lines: files that could not be read or are not used, and incomplete runs."""
        lists = {"Unreadable files": self.collection.unreadable, "Incomplete runs": self.collection.incomplete}
        lists["Tables of duplicates that are not used"] = self.collection.unused
        return {title: lines for title, lines in lists.items() if lines}


def render_markdown(report: Report) -> str:
    """Return the report as Markdown."""
    blocks = ["# Results\n", *map(render_figure, report.feature_maps)]
    for table in report.tables:
        blocks.append(f"## {_join_lines(table.title)}\n\n{_render_bullets(table.notes)}\n{render_table(table)}\n")
    blocks += map(render_figure, report.figures)
    blocks += [f"## {title}\n\n{_render_bullets(lines)}" for title, lines in report.lists.items()]
    return escape_control("\n".join(blocks))


def render_json(report: Report) -> str:
    """Return the scores as JSON, and the lists of unreadable files and incomplete runs."""
    scores = [{**asdict(score), **_list_missing(score), "folder": str(score.folder)} for score in report.scores]
    lists = {"unreadable": report.collection.unreadable, "incomplete": report.collection.incomplete}
    lists["unused"] = report.collection.unused
    return json_text({"scores": scores, **lists}, indent=2) + "\n"


def _list_missing(score: Score) -> dict[str, Any]:
    """Return the empty fields of a detector's score that this score lacks: in JSON, all scores have the same keys."""
    return {item.name: item.default for item in fields(DetectorScore) if not hasattr(score, item.name)}


def render_table(table: Table) -> str:
    """Return the cells of a table as Markdown."""
    cells = [[_join_lines(cell).replace("|", "\\|") for cell in line] for line in (table.head, *table.rows)]
    align = ["left", *["right"] * (len(table.head) - 1)]
    return tabulate.tabulate(cells[1:], cells[0], "pipe", disable_numparse=True, colalign=align if table.rows else None)


def _join_lines(text: str) -> str:
    return " ".join(text.split())


def _render_bullets(lines: Iterable[str]) -> str:
    return "".join(f"- {_join_lines(line)}\n" for line in lines)
