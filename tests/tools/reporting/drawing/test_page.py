"""The report as a page shows all runs, escapes their text, and works in a real browser."""

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.browser import open_chromium
from tests.tools.reporting.runs import DIGITS, detector, log, pipeline, provenance, write
from tests.tools.reporting.runs import pretrain as pretrained
from tests.transfer import tiny_coco
from tools import report

ATTACK = "<img src=x onerror=window.hacked=1>"
NUMBERS = {"random": 9.0, "mocov2": 44.1, "jcl": 10.0}  # as text, "9.0" would be the largest


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a pipeline with two pretrainings and three detectors, and runs with HTML in their name and results."""
    root = tmp_path_factory.mktemp("page")
    test = tiny_coco.write(root / "data")
    folder = root / "runs/demo"
    pipeline(folder, *(f"{branch}/mask" for branch in NUMBERS), "mocov2/pretrain", "jcl/pretrain")
    machine = f"started: today\ngit: {'ab' * 20}\nhost: node7 (Linux, 8 CPUs)\ndevices: NVIDIA H200\ntorch: 2.15.0\n"
    for branch, ap in NUMBERS.items():
        run = folder / branch
        origin = None
        if branch != "random":
            config = pretrained(run / "pretrain", *DIGITS, recipe=f"{branch}_R50_IN1k_200ep", knn=ap)
            origin = provenance(config)
            log(run / "pretrain", ({"iteration": i, "loss": 5.0 - i, "knn_top1": 50.0} for i in range(5)), machine)
        results = detector("DATASETS.TEST", str((test,)), weights=origin)
        results["metrics"]["bbox"]["AP"] = ap
        write(run / "mask", results | {"predictions": {test: "predictions.json"}})
        shapes = {"image_id": 1, "category_id": 1, "bbox": [2, 2, 20, 20], "score": 0.9}
        (run / "mask/predictions.json").write_text(json.dumps([shapes] if branch == "jcl" else []))
        log(run / "mask", ({"iteration": i, "total_loss": 3.0} for i in range(5)), machine)
    write(root / "runs" / ATTACK, detector(weights={"source": ATTACK, "method": f"</script>{ATTACK}", "epoch": "'\">"}))
    log(root / "runs" / ATTACK, ({"iteration": i, "total_loss": 3.0} for i in range(5)))
    write(root / "runs/broken", {"stage": "knn", "metrics": {"top1": ATTACK}, "source": {}})
    return root / "runs"


@pytest.fixture(scope="module")
def written(runs: Path) -> tuple[Path, Path]:
    """Write the page and the Markdown with one call."""
    page = runs.parent / "report.html"
    text = runs.parent / "report.md"
    assert report.main([str(runs), "--output", str(page), "--output", str(text)]) == 0
    return page, text


@pytest.fixture(scope="module")
def source(written: tuple[Path, Path]) -> str:
    return written[0].read_text(encoding="utf-8")


def texts(source: str, tag: str) -> list[str]:
    elements = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", source, re.DOTALL)
    return [" ".join(html.unescape(re.sub(r"<[^>]*>", " ", element)).split()) for element in elements]


def rows_of(source: str) -> list[list[str]]:
    return [[*texts(row, "th"), *texts(row, "td")] for row in re.findall(r"<tr>(.*?)</tr>", source, re.DOTALL)]


def test_page_and_markdown_show_the_same_tables(written: tuple[Path, Path], source: str):
    text = written[1].read_text()
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    rows = [row for row in lines if not row[0].startswith(":")]
    assert rows and all(row in rows_of(source) for row in rows)
    for title in re.findall(r"^## (.+)$", text, re.MULTILINE):
        assert title in texts(source, "h2")


def test_each_run_has_its_origin_and_machine(runs: Path, source: str):
    shown = {row[0]: row[1:] for row in rows_of(source) if len(row) == 8}
    sha = json.loads((runs / "demo/jcl/pretrain/results.json").read_text())["checkpoint_sha256"]
    machine = ["today", "node7", "NVIDIA H200", "2.15.0", "ab" * 6]
    assert shown["demo/jcl/mask"] == ["transfer", f"demo/jcl/pretrain ({sha[:8]})", *machine]
    assert shown["demo/jcl/pretrain"] == ["pretrain", "-", *machine] and shown["demo/random/mask"][1] == "random"


def test_what_is_in_run_folders_is_text(source: str):
    elements: list[tuple[str, dict[str, Any]]] = []
    words: list[str] = []
    parser: Any = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: elements.append((tag, dict(attrs)))
    parser.handle_data = words.append
    parser.feed(source)
    assert "script" not in [tag for tag, _ in elements]
    assert not [(tag, name) for tag, attributes in elements for name in attributes if name.startswith("on")]
    assert all(attributes["src"].startswith("data:image/") for tag, attributes in elements if tag == "img")
    for place in (f"</script>{ATTACK}", repr(ATTACK)):
        assert any(place in text for text in words)


def test_commands_in_sentences_are_shown_as_code(runs: Path, source: str):
    assert f"<code>python tools/launch.py status {runs / 'demo'}</code>" in source
    assert "`" not in source


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1280])
def test_in_a_browser_nothing_is_broken_or_too_wide(written: tuple[Path, Path], width: int):
    """No error and no request to a network may occur in a window of this width."""
    messages: list[str] = []
    with open_chromium() as browser:
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda asked: None if asked.url[:5] in ("file:", "data:") else messages.append(asked.url))
        page.goto(written[0].as_uri())
        widths = page.evaluate("[...document.images].map(image => image.naturalWidth)")
        assert len(widths) > 2 and all(widths)
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        pictures = "[...document.querySelectorAll('.picture')]"
        outside = f"{pictures}.filter(one => one.getBoundingClientRect().right > window.innerWidth).length"
        assert page.evaluate(outside) == 0
        sizes = page.evaluate(
            f"{pictures}.map(one => [one.firstElementChild, one.firstElementChild.naturalWidth])"
            ".map(([image, natural]) => image.offsetWidth - Math.min(natural, 700))"
        )
        assert min(sizes) >= 0  # text can be read
        assert page.evaluate("window.hacked === undefined")
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id)")
        links = page.evaluate("[...document.querySelectorAll('nav a')].map(one => one.hash.slice(1))")
        assert len(set(ids)) == len(ids) and links and set(links) <= set(ids)
        assert messages == []
