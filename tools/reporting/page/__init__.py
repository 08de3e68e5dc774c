"""The report as one HTML page that needs no other file and no network: tables, curves, pictures and provenance."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pretrain.common.errors import printable

from .. import charts, curves, provenance
from ..document import Report, Table

_FOLDER = Path(__file__).parent
_NUMBER = re.compile(r"(± )?[+-]?\d[\d.]*(e[+-]?\d+)?($|[ %])")
_LONG = 40  # characters of a cell that may break into lines


@dataclass(frozen=True)
class _Shown:
    """A table as the template needs it: which columns hold numbers, and the picture below it, as SVG."""

    table: Table
    numeric: list[bool]
    picture: str


def page(report: Report) -> str:
    """The page. What it shows of run folders is text: a name or an error that holds markup does nothing."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["svg"] = lambda text: _uri("image/svg+xml", text.encode())
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    text = environment.get_template("page.html.jinja").render(
        style=(_FOLDER / "page.css").read_text(encoding="utf-8"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        tables=[_shown(table) for table in report.tables],
        groups=curves.groups(report),
        pictures=[(picture, _uri("image/png", picture.file.read_bytes())) for picture in report.pictures],
        provenance=_shown(provenance.table(report)),
        lists=report.lists,
        long=_LONG,
    )
    return printable(text)


def _shown(table: Table) -> _Shown:
    columns: Sequence[Sequence[str]] = list(zip(*table.rows, strict=True)) or [[] for _ in table.head]
    numeric = [all(cell == "-" or _NUMBER.match(cell) for cell in column) for column in columns]
    return _Shown(table, numeric, charts.svg(table.figure) if table.figure else "")


def _uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
