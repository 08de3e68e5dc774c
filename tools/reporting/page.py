"""The report as one HTML page that needs no other file and no network: tables, curves, pictures and provenance."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pretrain.common.errors import printable

from . import curves, provenance
from .document import Report, Table

_NUMBER = re.compile(r"(± )?[+-]?\d[\d.]*(e[+-]?\d+)?($|[ %])")


def page(report: Report) -> str:
    """The page. What it shows of run folders is text: a name or an error that holds markup does nothing."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    text = environment.get_template("page.html.jinja").render(
        tables=[(table, _numeric(table)) for table in (*report.tables, provenance.table(report))],
        figures={title: _uri("image/svg+xml", svg.encode()) for title, svg in curves.figures(report).items()},
        pictures=[(picture, _uri("image/png", picture.file.read_bytes())) for picture in report.pictures],
        lists=report.lists,
    )
    return printable(text)


def _numeric(table: Table) -> list[bool]:
    """Which columns hold numbers."""
    columns: Sequence[Sequence[str]] = list(zip(*table.rows, strict=True)) or [[] for _ in table.head]
    return [all(cell == "-" or _NUMBER.match(cell) for cell in column) for column in columns]


def _uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
