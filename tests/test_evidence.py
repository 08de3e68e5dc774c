"""docs/evidence: every table is that of the recorded scores, and each recorded study has its page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean

import pytest
from scipy.stats import ttest_ind

from docs import evidence
from pretrain.common.errors import UserError
from tests.tools.reporting.test_groups import study_in
from tools.reporting.document import grid
from tools.reporting.groups import read_study, table

PAGES = {path: path.read_text(encoding="utf-8") for path in (evidence.ROOT / "docs" / "evidence").glob("*.md")}
_GRADIENTS = evidence.ROOT / "docs" / "evidence" / "tcl_gradients.json"  # along the runs of tcl.yaml, not a study
_SCENES = evidence.ROOT / "docs" / "evidence" / "whole_labels_scenes.json"  # written by docs/scenes.py
RECORDED = sorted(set(_GRADIENTS.parent.glob("*.json")) - {_GRADIENTS, _SCENES})


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a page that has one marked table, and a study that was recorded there."""
    folder = study_in(tmp_path / "runs/small")
    for place, results in enumerate(sorted(folder.glob("*/*/results.json"))):
        text = f"started: today\ngit: {'ab'[place % 2] * 40}\ntorch: 2.15.0\n"
        (results.parent / "environment.txt").write_text(text)
    (tmp_path / "docs/evidence").mkdir(parents=True)
    (tmp_path / "docs/evidence/small.md").write_text(
        "# Small\n\n<!-- small: kNN top-1 -->\nold\n<!-- end -->\n\nMore.\n"
    )
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.setattr(evidence, "_FOLDER", tmp_path / "docs/evidence")
    evidence.main([str(folder)])
    return tmp_path


def test_a_study_is_recorded_with_every_seed_and_what_it_was_made_with(recorded: Path):
    content = json.loads((recorded / "docs/evidence/small.json").read_text())
    assert content["scores"]["mask_40 box AP"]["jcl"] == {"1": 39.3, "2": 41.4, "3": 43.2}
    assert content["made_with"] == {"git": ["a" * 40, "b" * 40], "torch": ["2.15.0"]}
    assert content["baseline"] == "random" and content["machine"]
    study = read_study(recorded / "runs/small")
    assert study
    page = (recorded / "docs/evidence/small.md").read_text()
    assert grid(table(study, ["kNN top-1"])) in page and "old" not in page and page.endswith("<!-- end -->\n\nMore.\n")


def test_differences_are_welchs_and_bold_where_holms_correction_leaves_them(recorded: Path):
    scores = evidence.load("small").scores["mask_40 box AP"]
    page = evidence.up_to_date("<!-- small: jcl - random, random - jcl -->\n<!-- end -->", 0.05)
    ours, base = list(scores["jcl"].values()), list(scores["random"].values())
    interval = ttest_ind(ours, base, equal_var=False).confidence_interval()
    assert interval.low > 0
    half = (interval.high - interval.low) / 2
    assert f"+{fmean(ours) - fmean(base):.1f} ± {half:.1f}" in page


def test_holms_correction():
    assert evidence.holm([0.04, 0.01, None, 0.03]) == 0.01  # 0.01 <= 0.05/3, then 0.03 > 0.05/2
    assert evidence.holm([0.02, 0.03]) == 0.03 and evidence.holm([0.03, 0.04]) < 0 and evidence.holm([]) < 0


def test_two_scores_of_a_branch_are_compared_by_seed(recorded: Path):
    scores = evidence.load("small").scores
    first, second = "mask_40 box AP", "mask_9 box AP"
    page = evidence.up_to_date(f"<!-- small: {first} - {second} -->\n<!-- end -->", 0.05)
    ours, base = scores[first]["jcl"], scores[second]["jcl"]
    values = [ours[seed] - base[seed] for seed in ours if seed in base]
    assert values and f"{fmean(values):+.1f}" in page and f"| {first} - {second} |" in page
    with pytest.raises(UserError, match=r"small.json has no mask AP"):
        evidence.up_to_date(f"<!-- small: {first} - mask AP -->\n<!-- end -->", 0.05)


def test_the_picture_shows_every_score_and_branch_and_is_the_same_again(recorded: Path):
    file = recorded / "docs/evidence/small.svg"
    first = file.read_text()
    for name in ("kNN top-1", "mask_9 box AP", "random", "jcl"):
        assert f"<!-- {name} -->" in first  # matplotlib's comment beside the glyphs
    evidence.main([str(recorded / "runs/small")])
    assert file.read_text() == first


def test_a_marker_without_its_scores_is_one_line(recorded: Path):
    with pytest.raises(UserError, match=r"small.json has no mask AP; it has .*kNN top-1"):
        evidence.up_to_date("<!-- small: mask AP -->\n<!-- end -->", 0.05)
    with pytest.raises(UserError, match=r"small.json has no mocov9; it has jcl, "):
        evidence.up_to_date("<!-- small: jcl - mocov9 -->\n<!-- end -->", 0.05)
    with pytest.raises(UserError, match=r"other.json"):
        evidence.up_to_date("<!-- other: mask AP -->\n<!-- end -->", 0.05)
    with pytest.raises(UserError, match="has no scores over seeds"):
        evidence.main([str(recorded)])


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
    if path.stem != "whole_labels":  # its page says what was not committed
        assert all(re.fullmatch("[0-9a-f]{40}", commit) for commit in commits)
