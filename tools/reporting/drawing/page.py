"""The report as one HTML page that needs no other file and no network: tables, curves, figures and provenance."""

import base64
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from pretrain.common.errors import escape_control
from pretrain.common.run import file_names
from tools import GUIDE, ROOT

from .. import provenance
from ..document import Figure, Report, Table
from ..files import shorten_names
from . import curves

_CODE = re.compile(r"`([^`\n]+)`")
_NUMBER = re.compile(r"(< |± )?[+-]?\d[\d.]*(e[+-]?\d+)?($|[ %])")


def render_page(report: Report, file: Path) -> str:
    """Return the page, whose links are relative to its ``file``; markup in what run folders contain is escaped."""
    layout: Any = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, **layout)
    environment.filters["inline"] = _render_inline
    tables = [*report.tables, provenance.build_table(report)]
    text = environment.get_template("page.html.jinja").render(
        tables=[(table, _find_numeric_columns(table), _link_folders(table, file)) for table in tables],
        curves={title: _encode_uri("image/svg+xml", svg.encode()) for title, svg in curves.draw_curves(report).items()},
        feature_maps=_embed_figures(report.feature_maps),
        figures=_embed_figures(report.figures),
        lists=report.lists,
        title=report.title,
        headline=report.headline,
        guide=_make_link(ROOT / GUIDE, file),
        views=[(name, _make_link(path, file)) for name, path in _find_views(report)],
    )
    return escape_control(text).replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def _render_inline(text: str) -> Markup:
    """Return text as HTML, with what Markdown shows as code (between backticks) as code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))


def _link_folders(table: Table, page: Path) -> dict[str, str]:
    return {name: _make_link(folder, page) for name, folder in table.folders.items()}


def _make_link(path: Path, page: Path) -> str:
    return quote(os.path.relpath(path, page.parent), errors="surrogateescape")


def _find_views(report: Report) -> list[tuple[str, Path]]:
    """Return the pictures of the views that pretraining runs were trained on, with the names of the runs."""
    pictures = [run.folder / file_names.VIEWS for run in report.collection.runs]
    pictures = [picture for picture in pictures if picture.is_file()]
    names = shorten_names([picture.parent for picture in pictures])
    return [(names[picture.parent], picture) for picture in pictures]


def _find_numeric_columns(table: Table) -> list[bool]:
    """Return, for each column, whether it contains only numbers."""
    columns: Sequence[Sequence[str]] = list(zip(*table.rows, strict=True)) or [[] for _ in table.head]
    return [all(cell == "-" or _NUMBER.match(cell) for cell in column) for column in columns]


def _embed_figures(figures: Sequence[Figure]) -> list[tuple[Figure, str]]:
    return [(figure, _encode_uri("image/png", figure.file.read_bytes())) for figure in figures]


def _encode_uri(media_type: str, content: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"
