"""docs/evidence: every table is that of the recorded scores, and each recorded study has its page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs import evidence
from tests.errors import refused
from tests.tools.reporting.test_seeds import study_in
from tools.reporting.document import render_table
from tools.reporting.seeds import build_table, read_study

PAGES = {path: path.read_text(encoding="utf-8") for path in (evidence.ROOT / "docs" / "evidence").glob("*.md")}
_GRADIENTS = evidence.ROOT / "docs" / "evidence" / "tcl_gradients.json"  # along the runs of tcl.yaml, not a study
_SCENES = evidence.ROOT / "docs" / "evidence" / "whole_labels_scenes.json"  # written by docs/scenes.py
RECORDED = sorted(set(_GRADIENTS.parent.glob("*.json")) - {_GRADIENTS, _SCENES})


def test_a_study_is_recorded_with_every_seed_and_what_it_was_made_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, docs = study_in(tmp_path / "small"), tmp_path / "docs"
    for place, results in enumerate(sorted(folder.glob("*/*/results.json"))):
        text = f"started: today\ngit: {'ab'[place % 2] * 40}\ntorch: 2.15.0\n"
        (results.parent / "environment.txt").write_text(text)
    docs.mkdir()
    (docs / "small.md").write_text("# Small\n\n<!-- small: kNN top-1 -->\nold\n<!-- end -->\n\nMore.\n")
    monkeypatch.setattr(evidence, "_FOLDER", docs)
    evidence.main([str(folder)])
    content = json.loads((docs / "small.json").read_text())
    assert content["scores"]["mask_40 box AP"]["jcl"] == {"1": 39.3, "2": 41.4, "3": 43.2}
    assert content["made_with"] == {"git": ["a" * 40, "b" * 40], "torch": ["2.15.0"]}
    assert content["baseline"] == "random" and content["machine"]
    content["scores"]["mask_40 box AP"]["supcon"] = {"1": 50.0}  # of another machine's run
    (docs / "small.json").write_text(json.dumps({**content, "machine": "8 x other"}))
    evidence.main([str(folder)])
    merged = json.loads((docs / "small.json").read_text())
    assert merged["scores"] == content["scores"] and merged["made_with"] == content["made_with"]
    assert merged["machine"] == f"8 x other, {content['machine']}"
    assert all(f"<!-- {name} -->" in (docs / "small.svg").read_text() for name in ("kNN top-1", "random", "jcl"))
    study = read_study(folder)
    assert study
    page = (docs / "small.md").read_text()
    assert render_table(build_table(study, ["kNN top-1"])) in page
    assert "old" not in page and page.endswith("<!-- end -->\n\nMore.\n")
    refused(lambda: evidence.main([str(tmp_path)]), tmp_path, "SEEDS")


def test_holms_correction():
    assert evidence.holm([0.04, 0.01, None, 0.03]) == 0.01  # 0.01 <= 0.05/3, then 0.03 > 0.05/2
    assert evidence.holm([0.02, 0.03]) == 0.03 and evidence.holm([0.03, 0.04]) < 0 and evidence.holm([]) < 0


@pytest.mark.parametrize("words", ["table2: mask AP", "table2: jcl - mocov9"])
def test_a_marker_without_its_scores_is_refused(words: str):
    refused(lambda: evidence.up_to_date(f"<!-- {words} -->\n<!-- end -->", 0.05), re.split(": | - ", words)[-1])


@pytest.mark.docs
def test_the_pages_are_up_to_date():
    """`make docs` writes their tables."""
    limit = evidence.largest_p(PAGES.values())
    assert {path: evidence.up_to_date(page, limit) for path, page in PAGES.items()} == PAGES


@pytest.mark.docs
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_every_recorded_study_has_its_picture_pipeline_and_place_on_the_page(path: Path):
    page = PAGES[path.with_suffix(".md")]
    assert f"<!-- {path.stem}: " in page and f"({path.stem}.svg)" in page
    assert f"(evidence/{path.stem}.md)" in (evidence.ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    assert path.with_suffix(".svg").is_file()
    assert any(path.stem in file.read_text() for file in (evidence.ROOT / "configs/evidence").glob("*.yaml"))
    commits = json.loads(path.read_text())["made_with"]["git"]
    if path.stem not in ("dense", "whole_labels", "whole_length"):  # their pages say what was not committed
        assert all(re.fullmatch("[0-9a-f]{40}", commit) for commit in commits)
