"""Content of a report, and its Markdown. The HTML page (`page`) shows the same tables and figures."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

import tabulate

from pretrain.common.errors import escape_control
from pretrain.common.files import json_text
from pretrain.common.shell import shorten_path
from tools import GUIDE, ROOT

from .files import RunCollection
from .runs import DetectorScore, Score

tabulate.MIN_PADDING = 0  # headings are no wider than they need to be, so that a table fits into a terminal


@dataclass(frozen=True)
class Table:
    """A table with a heading.

    Attributes:
        notes: sentences above the table.
        head: names of the columns; the first column names the row.
        rows: cells as text; ``-`` means that there is no value.
        settings: sentences below the table: how the values were measured. The page folds them.
        folders: run folders that the page links, by the text of a row's first cell.
    """

    title: str
    notes: Sequence[str]
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    settings: Sequence[str] = ()
    folders: Mapping[str, Path] = field(default_factory=dict)


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

    The report begins with ``headline`` and ``feature_maps``, and ends with ``figures``.

    Attributes:
        title: names of the pipelines, or of the folders.
        headline: sentences that say what the scores show; empty if nothing is compared.
        comparisons: the comparisons of branches, as they are in JSON.
        verdicts: the tables of verdicts, one per pipeline with SEEDS.
        powers: the tables of how many seeds are needed.
    """

    tables: list[Table]
    collection: RunCollection
    scores: list[Score]
    figures: list[Figure] = field(default_factory=list)
    feature_maps: list[Figure] = field(default_factory=list)
    title: str = "Results"
    headline: Sequence[str] = ()
    comparisons: Sequence[Mapping[str, Any]] = ()
    verdicts: Sequence[Table] = ()
    powers: Sequence[Table] = ()

    @property
    def missing(self) -> dict[str, list[str]]:
        """Map headings to lines about scores that the report lacks."""
        lists = {"Unreadable files": self.collection.unreadable, "Incomplete runs": self.collection.incomplete}
        return {title: lines for title, lines in lists.items() if lines}

    @property
    def lists(self) -> dict[str, list[str]]:
        """Map headings to lines: those of ``missing``, figures that are not drawn, and files that are not used."""
        lists = {"Figures that are not drawn": self.collection.not_drawn}
        lists["Tables of duplicates that are not used"] = self.collection.unused
        return self.missing | {title: lines for title, lines in lists.items() if lines}


def render_markdown(report: Report) -> str:
    """Return the report as Markdown."""
    blocks = [f"# {_join_lines(report.title)}\n", *([_render_bullets(report.headline)] if report.headline else [])]
    blocks.append(f"How to read this report: {shorten_path(ROOT / GUIDE)}\n")
    blocks += map(render_figure, report.feature_maps)
    blocks += map(render_section, report.tables)
    blocks += map(render_figure, report.figures)
    blocks += render_lists(report.lists)
    return escape_control("\n".join(blocks))


def render_lists(lists: Mapping[str, Sequence[str]]) -> list[str]:
    """Return each list of lines with its heading as Markdown."""
    return [f"## {title}\n\n{_render_bullets(lines)}" for title, lines in lists.items()]


def render_section(table: Table) -> str:
    """Return a table with its heading, notes and settings."""
    notes = f"{_render_bullets(table.notes)}\n" if table.notes else ""
    settings = f"\n{_render_bullets(table.settings)}" if table.settings else ""
    return f"## {_join_lines(table.title)}\n\n{notes}{render_table(table)}\n{settings}"


def render_json(report: Report) -> str:
    """Return the scores as JSON, and the lists of unreadable files and incomplete runs."""
    scores = [{**asdict(score), **_list_missing(score), "folder": str(score.folder)} for score in report.scores]
    lists = {"unreadable": report.collection.unreadable, "incomplete": report.collection.incomplete}
    lists["unused"] = report.collection.unused
    statements = {"headline": list(report.headline), "comparisons": list(report.comparisons)}
    return json_text({"scores": scores, **lists, **statements}, indent=2) + "\n"


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
