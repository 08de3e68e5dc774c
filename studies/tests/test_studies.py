"""Every table of a study shows the recorded scores, and each study has its plan, scores and page."""

import json
import re
from pathlib import Path

import pytest

from pretrain.config import load_config
from studies.tools import record, seeds_needed
from tests.errors import refused
from tests.tools.reporting.runs import study_in
from tools import ROOT
from tools.launcher.graphs import pipeline
from tools.reporting.document import render_table
from tools.reporting.seeds.study import build_table, read_study
from transfer.config import load_config as load_detector_config

FOLDERS = sorted(path.parent for path in (ROOT / "studies").glob("*/study.yaml"))
PAGES = {folder / "README.md": (folder / "README.md").read_text(encoding="utf-8") for folder in FOLDERS}


def test_a_study_is_recorded_with_every_seed_and_what_it_was_made_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runs = study_in(tmp_path / "small")
    folder = tmp_path / "studies/small"
    for place, results in enumerate(sorted(runs.glob("*/*/results.json"))):
        text = f"started: today\ngit: {'ab'[place % 2] * 40}\ntorch: 2.15.0\n"
        (results.parent / "environment.txt").write_text(text)
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("# Small\n\n<!-- small: kNN top-1 -->\nold\n<!-- end -->\n\nMore.\n")
    (folder / "study.yaml").touch()
    monkeypatch.setattr(record, "_STUDIES", tmp_path / "studies")
    monkeypatch.setattr(record, "_FIGURES", tmp_path / "build")
    record.main([str(runs)])
    content = json.loads((folder / "scores.json").read_text())
    assert content["scores"]["mask_40 box AP"]["jcl"] == {"1": 39.3, "2": 41.4, "3": 43.2}
    assert set(content["made_with"]["git"]) == {"a" * 40, "b" * 40} and content["made_with"]["torch"] == ["2.15.0"]
    assert content["baseline"] == "random" and content["machine"]
    content["scores"]["mask_40 box AP"]["supcon"] = {"1": 50.0}  # measured on another machine
    (folder / "scores.json").write_text(json.dumps({**content, "machine": "8 x other", "hours": 2}))
    record.main([str(runs)])
    merged = json.loads((folder / "scores.json").read_text())
    assert merged["scores"] == content["scores"] and merged["made_with"] == content["made_with"]
    assert merged["machine"] == f"8 x other, {content['machine']}" and merged["hours"] == 2
    figure = (tmp_path / "build/small.svg").read_text()
    assert all(f"<!-- {name} -->" in figure for name in ("kNN top-1", "random", "jcl"))
    study = read_study(runs)
    assert study
    page = (folder / "README.md").read_text()
    assert render_table(build_table(study, ["kNN top-1"])) in page
    assert "old" not in page and page.endswith("<!-- end -->\n\nMore.\n")
    refused(lambda: record.main([str(tmp_path)]), tmp_path, "SEEDS")


@pytest.mark.parametrize("words", ["table2: mask AP", "table2: jcl - mocov9"])
def test_a_marker_without_its_scores_is_refused(words: str):
    refused(lambda: record.up_to_date(f"<!-- {words} -->\n<!-- end -->", 0.05), re.split(": | - ", words)[-1])


@pytest.mark.docs
def test_the_pages_are_up_to_date():
    """If this fails, run `make studies`, which writes their tables."""
    limit = record.largest_p(PAGES.values())
    assert {path: record.up_to_date(page, limit) for path, page in PAGES.items()} == PAGES
    without_values = re.compile(r"^\|[^|]+(?:\| *- *)+\|$", re.MULTILINE)
    assert [path.parent.name for path, page in PAGES.items() if without_values.search(page)] == []


@pytest.mark.docs
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_study_has_its_plan_scores_and_place_among_the_claims(folder: Path):
    assert f"<!-- {folder.name}: " in PAGES[folder / "README.md"]
    assert f"]({folder.name}/README.md)" in (ROOT / "studies/README.md").read_text(encoding="utf-8")
    plan = pipeline.read_pipeline_file(str(folder / "study.yaml"))
    scores = json.loads((folder / "scores.json").read_text())
    assert {branch for values in scores["scores"].values() for branch in values} <= plan["BRANCHES"].keys()
    assert set(scores["seeds"]) <= set(map(str, plan["SEEDS"]))
    if folder.name not in ("dense", "whole_labels", "whole_length"):  # their pages say what was not committed
        assert all(re.fullmatch("[0-9a-f]{40}", commit) for commit in scores["made_with"]["git"])


@pytest.mark.docs
def test_the_configs_and_links_of_the_studies_hold(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    for plan in (ROOT / "studies").glob("*/*.yaml"):
        for name in re.findall(r"(?:configs|studies)/[\w/.-]+\.yaml", plan.read_text()):
            assert Path(name).is_file(), plan
    load_config("studies/people/jcl.yaml")
    load_config("studies/dense/densecl.yaml")
    load_detector_config("studies/people/keypoint.yaml")
    for page in (*PAGES, *(ROOT / "studies").glob("*.md"), ROOT / "studies/lightly/README.md"):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), (page, link)


@pytest.mark.slow
def test_the_page_states_how_well_three_seeds_answer_for_five():
    page = (ROOT / "docs/tutorials/compare_methods.md").read_text()
    assert seeds_needed.describe_agreement(list(seeds_needed.replay())) in " ".join(page.split())
