"""The pages of the documentation can be read on a laptop and on a phone: `make site`, seen by a real browser."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageStat

from tests.browser import open_chromium
from tests.snippets import ROOT

pytestmark = pytest.mark.docs
LAPTOP, PHONE = ({"width": width, "height": 900} for width in (1280, 400))
# The theme puts every table into an element that scrolls; code scrolls by itself.
SCROLLING = ".md-typeset__scrollwrap, article pre > code"
IS_READY = "[...document.querySelectorAll('article table')].every(one => one.closest('.md-typeset__scrollwrap'))"
PAGE_IS_TOO_WIDE = "document.documentElement.scrollWidth > innerWidth"
TOO_WIDE = f"""
    [...document.querySelectorAll('{SCROLLING}')]
        .filter(one => one.scrollWidth > one.clientWidth)
        .map(one => one.innerText.trim().slice(0, 60))
"""
CUT = f"""
    [...document.querySelectorAll('{SCROLLING}')]
        .filter(one => one.getBoundingClientRect().right > innerWidth || getComputedStyle(one).overflowX !== 'auto')
        .map(one => one.innerText.trim().slice(0, 60))
"""
SMALL_PICTURES = """
    [...document.querySelectorAll("article img:not([src^='data:'])")]
        .filter(one => one.clientWidth < Math.min(one.naturalWidth, 600))
        .map(one => one.alt)
"""
NO_ELEMENTS = """
    [...document.querySelectorAll('article *')]
        .filter(one => one instanceof HTMLUnknownElement)
        .map(one => one.localName)
"""
BROKEN_OPTIONS = "[...document.querySelectorAll('.option')].filter(one => one.getClientRects().length > 1).length"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site."""
    pytest.importorskip("material", reason="needs mkdocs-material: make setup")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
    return folder


@pytest.fixture(scope="module")
def window() -> Iterator[Any]:
    with open_chromium() as browser:
        yield browser.new_page()


def test_nothing_is_cut_on_a_laptop_or_a_phone(site: Path, window: Any) -> None:
    """On a laptop nothing scrolls sideways, on a phone only tables, code and pictures."""
    paths = [path.relative_to(site) for path in sorted(site.rglob("*.html"))]
    assert len(paths) > 150
    faults = []
    for path in paths:
        window.set_viewport_size(LAPTOP)
        window.goto((site / path).as_uri())
        window.wait_for_function(IS_READY)
        faults += [(1280, str(path), text) for text in window.evaluate(TOO_WIDE)]
        faults += [(1280, str(path), f"<{name}>, which is no element") for name in window.evaluate(NO_ELEMENTS)]
        window.set_viewport_size(PHONE)
        faults += [(400, str(path), text) for text in window.evaluate(CUT)]
        faults += [(400, str(path), text) for text in window.evaluate(SMALL_PICTURES)]
        faults += [(400, str(path), "the page")] if window.evaluate(PAGE_IS_TOO_WIDE) else []
        faults += [(400, str(path), "an option that breaks at its dashes")] if window.evaluate(BROKEN_OPTIONS) else []
    assert faults == []


def test_the_search_ranks_the_pages_of_short_answers_first(site: Path) -> None:
    entries = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))["docs"]
    assert {entry["location"].partition("#")[0] for entry in entries if "boost" in entry} == {
        "can_i.html",
        "costs.html",
    }


def test_the_page_of_a_file_has_its_name(site: Path) -> None:
    assert "pretrain/methods/__init__.py<a" in (site / "source/pretrain/methods/__init__.py.html").read_text()


def test_the_code_of_a_notebook_fits_the_page() -> None:
    for notebook in (ROOT / "docs/notebooks").glob("*.ipynb"):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        lines = [line for cell in cells if cell["cell_type"] == "code" for line in cell["source"]]
        assert [line for line in lines if len(line.rstrip()) > 80] == []


def test_the_progress_of_a_notebook_is_its_first_and_last_line(site: Path) -> None:
    page = (site / "notebooks/first_hour.html").read_text(encoding="utf-8")
    assert page.count("step 20/300") == 3 and page.count("step 280/300") == 2 and "step 40/300" not in page


def test_a_word_in_a_table_breaks_only_where_it_does_not_fit(site: Path, window: Any) -> None:
    lines = "[...document.querySelectorAll('.word')].map(one => Math.round(one.clientHeight / 20))"
    heights = []
    for viewport in (LAPTOP, PHONE):
        window.set_viewport_size(viewport)
        window.goto((site / "cheat_sheet.html").as_uri())
        window.wait_for_function(IS_READY)
        heights.append(window.evaluate(lines))
    assert set(heights[0]) == {1} and 2 in heights[1]
    page = (site / "reference/detector_keys.html").read_text(encoding="utf-8")
    assert "[103.53," in page and "OUTPUT_<wbr>DIR" in page  # a number is one word


@pytest.mark.parametrize(("page", "kind"), [("read_a_report.html", ".md-typeset__scrollwrap"), ("index.html", "code")])
def test_an_edge_shows_where_a_table_or_code_continues(site: Path, window: Any, page: str, kind: str) -> None:
    window.set_viewport_size(PHONE)
    window.goto((site / page).as_uri())
    window.wait_for_function(IS_READY)
    wide = f"[...document.querySelectorAll('article {kind}')].find(one => one.scrollWidth > one.clientWidth + 120)"
    element = window.evaluate_handle(wide).as_element()
    assert find_edges(element) == (False, True)
    element.evaluate("one => one.scrollLeft = 60")
    assert find_edges(element) == (True, True)
    element.evaluate("one => one.scrollLeft = one.scrollWidth")
    assert find_edges(element) == (True, False)


def find_edges(element: Any) -> tuple[bool, bool]:
    """Return whether the left and the right edge of an element are darker than its background."""
    picture = Image.open(BytesIO(element.screenshot())).convert("L")
    width, height = picture.size
    background = ImageStat.Stat(picture).median[0]
    left, right = (ImageStat.Stat(picture.crop((x, 0, x + 2, height))).median[0] for x in (0, width - 2))
    return left < background - 20, right < background - 20
