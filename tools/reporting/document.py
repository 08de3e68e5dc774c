"""What a report holds, and its Markdown. The HTML page (`page`) shows the same tables and pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import tabulate

from pretrain.common.errors import printable

from .files import Found
from .runs import Item

tabulate.MIN_PADDING = 0  # headings are no wider than they need to be, so that a table fits into a terminal


@dataclass(frozen=True)
class Table:
    """A table with a heading.

    Attributes:
        notes: sentences above it.
        head: the columns' names; the first column names the row.
        rows: cells as text; ``-`` for what there is not.
    """

    title: str
    notes: Sequence[str]
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A PNG, which lies at ``file``."""

    title: str
    notes: Sequence[str]
    alt: str
    file: Path


@dataclass
class Report:
    """What Markdown and page show, and what they were made from."""

    tables: list[Table]
    pictures: list[Picture]
    found: Found
    items: list[Item]

    @property
    def lists(self) -> dict[str, list[str]]:
        """Heading -> lines: what could not be read, and what is not done."""
        lists = {"Not read": self.found.unread, "Not done": self.found.not_done}
        return {title: lines for title, lines in lists.items() if lines}


def markdown(report: Report) -> str:
    """The report as Markdown; pictures are linked by name, because they lie next to it."""
    parts = ["# Results\n"]
    parts += [f"## {one_line(table.title)}\n\n{_bullets(table.notes)}\n{grid(table)}\n" for table in report.tables]
    for picture in report.pictures:
        link = quote(picture.file.name, errors="surrogateescape")
        parts.append(f"## {picture.title}\n\n{_bullets(picture.notes)}\n![{picture.alt}]({link})\n")
    parts += [f"## {title}\n\n{_bullets(lines)}" for title, lines in report.lists.items()]
    return printable("\n".join(parts))


def grid(table: Table) -> str:
    """The cells of a table as Markdown."""
    cells = [[one_line(cell).replace("|", "\\|") for cell in line] for line in (table.head, *table.rows)]
    align = ["left", *["right"] * (len(table.head) - 1)]
    return tabulate.tabulate(cells[1:], cells[0], "pipe", disable_numparse=True, colalign=align if table.rows else None)


def one_line(text: str) -> str:
    return " ".join(text.split())


def _bullets(lines: Iterable[str]) -> str:
    return "".join(f"- {one_line(line)}\n" for line in lines)
