"""The report as a page: what it shows of runs, that their text is inert, and how it behaves in a real browser."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.tools.reporting.runs import (
    DIGITS,
    detector,
    pipeline,
    probe,
    provenance,
    write,
)
from tests.tools.reporting.runs import pretrain as pretrained
from tests.transfer import tiny_coco
from tools import report

ATTACK = "<img src=x onerror=window.hacked=1>"
NUMBERS = {"random": 9.0, "mocov2": 44.1, "jcl": 10.0}  # as text, "9.0" would be the largest


def log(folder: Path, **metrics: float) -> None:
    lines = [{"iteration": 10 * i + 9} | {name: value / (i + 1) for name, value in metrics.items()} for i in range(5)]
    (folder / "metrics.json").write_text("".join(json.dumps(line) + "\n" for line in lines))


def ran(folder: Path, hours: float, devices: str, processes: int = 1) -> None:
    """What a stage and the launcher record of where and how long it ran."""
    lines = ("started: today", "command: x", "git: " + "ab" * 20, "host: node7 (Linux)", f"devices: {devices}",
             "torch: 2.15.0")  # fmt: skip
    (folder / "environment.txt").write_text("\n".join(lines) + "\n")
    (folder / "launch/ranks").mkdir(parents=True, exist_ok=True)
    for rank in range(processes):
        record = {"started": 1000.0, "ended": 1000.0 + 3600 * hours, "state": "done"}
        (folder / f"launch/ranks/a.1.0.{rank}.json").write_text(json.dumps(record))
    (folder / "launch/ranks/a.1.1.0.json").write_text(json.dumps({"started": 9.0, "state": "running"}))  # was killed


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline with two pretrainings and three detectors, and a run with HTML as name."""
    root = tmp_path_factory.mktemp("page")
    test, folder = tiny_coco.write(root / "data"), root / "runs/demo"
    stages = ("pretrain", "knn", "mask")
    pipeline(
        folder, *(f"{branch}/{stage}" for branch in NUMBERS for stage in stages if branch + stage != "randompretrain")
    )
    for branch, ap in NUMBERS.items():
        run, origin = folder / branch, None
        if branch != "random":
            config = pretrained(run / "pretrain", *DIGITS, recipe=f"{branch}_R50_IN1k_200ep")
            origin = provenance(config)
            log(run / "pretrain", loss=5.0, lr=0.1, knn_top1=50.0, queue_accuracy=9.0, feature_spread=0.9)
            ran(run / "pretrain", 2.5, "NVIDIA H200, NVIDIA H200", processes=2)
            probe(run / "knn", config, ap)
        found = detector("DATASETS.TEST", str((test,)), weights=origin)
        found["metrics"]["bbox"]["AP"] = ap
        if origin:
            found["weights"] |= {"path": str(run / "backbone.pth"), "sha256": "ab" * 32}
        write(run / "mask", found | {"predictions": {test: "found.json"}})
        (run / "mask/found.json").write_text("[]")
        log(run / "mask", total_loss=3.0, **{"bbox/AP": ap})
        ran(run / "mask", 0.5, "cpu")
    write(root / "runs" / ATTACK, detector(weights={"source": ATTACK, "method": f"</script>{ATTACK}", "epoch": "'\">"}))
    log(root / "runs" / ATTACK, total_loss=3.0)
    (root / "runs/broken").mkdir()
    (root / "runs/broken/results.json").write_text(
        json.dumps({"stage": "knn", "metrics": {"top1": ATTACK}, "source": {}})
    )
    return root / "runs"


@pytest.fixture(scope="module")
def written(runs: Path) -> tuple[Path, Path]:
    """The page and the Markdown of the same call."""
    page, text = runs.parent / "report.html", runs.parent / "report.md"
    assert report.main([str(runs), "--output", str(page), "--output", str(text)]) == 0
    return page, text


@pytest.fixture(scope="module")
def source(written: tuple[Path, Path]) -> str:
    return written[0].read_text(encoding="utf-8")


def texts(source: str, tag: str) -> list[str]:
    found = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", source, re.DOTALL)
    return [" ".join(html.unescape(re.sub(r"<[^>]*>", " ", one)).split()) for one in found]


def test_page_and_markdown_show_the_same_tables(written: tuple[Path, Path], source: str):
    text = written[1].read_text()
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    rows = [row for row in lines if not row[0].startswith(":")]
    shown = [[*texts(row, "th"), *texts(row, "td")] for row in re.findall(r"<tr>(.*?)</tr>", source, re.DOTALL)]
    assert rows and all(row in shown for row in rows)
    for title in re.findall(r"^## (.+)$", text, re.MULTILINE):
        assert title in texts(source, "h2")


def test_it_is_one_file(source: str, written: tuple[Path, Path]):
    assert len(written[0].read_bytes()) < 3e6
    places = re.findall(r'\b(?:src|href|srcset|action)="([^"]*)"', source.partition("<body>")[2])
    assert places and all(place.startswith(("data:image/", "#")) for place in places)
    assert "url(" not in source and "@import" not in source and "http://" not in source


def test_each_run_has_its_origin_machine_and_hours(runs: Path, source: str):
    rows = [[*texts(row, "th"), *texts(row, "td")] for row in re.findall(r"<tr>(.*?)</tr>", source, re.DOTALL)]
    shown = {row[0]: row[1:] for row in rows if len(row) == 9}
    results = json.loads((runs / "demo/jcl/pretrain/results.json").read_text())
    assert shown["demo/jcl/mask"][:3] == [
        "transfer", f"demo/jcl/pretrain ({results['checkpoint_sha256'][:8]})", "0.500",
    ]  # fmt: skip
    assert shown["demo/jcl/pretrain"] == [
        "pretrain", "-", "5.000", "today", "node7", "NVIDIA H200, NVIDIA H200", "2.15.0", "ab" * 6,
    ]  # fmt: skip
    assert shown["demo/random/mask"][1] == "random" and "10.000 GPU-hours and 1.500 CPU-hours in all" in source


def test_what_is_in_run_folders_is_text(source: str):
    elements, words = [], []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: elements.append((tag, dict(attrs)))
    parser.handle_data = words.append
    parser.feed(source)
    assert "script" not in [tag for tag, _ in elements]
    assert not [(tag, name) for tag, attributes in elements for name in attributes if name.startswith("on")]
    assert all(attributes["src"].startswith("data:image/") for tag, attributes in elements if tag == "img")
    for place in (f"</script>{ATTACK}", repr(ATTACK)):
        assert any(place in one for one in words)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make setup")
    path = shutil.which("chromium")
    with api.sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])  # which root needs
        except api.Error as error:
            pytest.skip(f"needs Chromium (apt-get install chromium): {str(error).splitlines()[0]}")
        yield opened
        opened.close()


@pytest.fixture(params=[400, 1280])
def shown(request: pytest.FixtureRequest, browser: Any, written: tuple[Path, Path]) -> Iterator[Any]:
    """The page in a window of this width; afterwards, no error and no request to a network was seen."""
    said: list[str] = []
    page = browser.new_page(viewport={"width": request.param, "height": 900})
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith(("file:", "data:")) else said.append(asked.url))
    page.goto(written[0].as_uri())
    yield page
    assert said == []
    page.close()


def test_in_a_browser_nothing_is_broken_or_too_wide(shown: Any):
    widths = shown.evaluate("[...document.images].map(image => image.naturalWidth)")
    assert len(widths) > 2 and all(widths)
    assert shown.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert shown.evaluate("window.hacked === undefined")
    ids = shown.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id)")
    links = shown.evaluate("[...document.querySelectorAll('nav a')].map(one => one.hash.slice(1))")
    assert len(set(ids)) == len(ids) and links and set(links) <= set(ids)
