"""A report lists stages that are not complete, and files that cannot be read."""

import json
import shutil
from pathlib import Path

import pytest

from tests.errors import refused
from tests.tools.reporting.runs import DIGITS, cells, column, pipeline, pretrain, probe, render, study_in
from tools import report


def test_a_pipelines_branches_are_rows_and_incomplete_stages_are_named(tmp_path: Path):
    pipeline(tmp_path / "p", "jcl/pretrain", "jcl/linear", "moco/pretrain", "moco/linear")
    config = pretrain(tmp_path / "p/jcl/pretrain", *DIGITS)
    probe(tmp_path / "p/jcl/linear", config, 60.0, recipe="own")
    (tmp_path / "p").rename(tmp_path / "moved")  # a pipeline may be moved as a whole
    text = render([tmp_path])
    assert cells(text, "jcl")[-3:] == ["50.0", "60.0", "88.0"]
    remedy = f"run `python tools/launch.py status {tmp_path / 'moved'}` to see why"
    assert f"- moved: moco/pretrain, moco/linear ({remedy})" in text


def test_a_report_of_nothing_that_can_be_read_fails(tmp_path: Path, capsys: pytest.CaptureFixture):
    refused(lambda: report.main([str(tmp_path / "absent")]), "is not a folder")
    refused(lambda: report.main([str(tmp_path)]), "no results.json in")
    (tmp_path / "results.json").write_text("{}")
    refused(lambda: report.main([str(tmp_path)]), "no result could be read")
    assert f"- {tmp_path}/results.json " in capsys.readouterr().out
    pretrain(tmp_path / "jcl")
    assert report.main([str(tmp_path)]) == 0


def test_a_damaged_config_is_named_and_its_run_is_shown(tmp_path: Path):
    pretrain(tmp_path / "jcl")
    assert ", seed 0." in render([tmp_path])
    (tmp_path / "jcl/config.yaml").write_text("a: [")
    text = render([tmp_path])
    assert column(text, "jcl", "kNN top-1") == "50.0" and "seed" not in text
    assert f"- {tmp_path / 'jcl/config.yaml'}: " in text


@pytest.mark.parametrize("place", ["seed", "pipeline", "both"])
def test_runs_behind_links_are_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str):
    study = study_in(tmp_path / "runs/study")
    folders = [str(tmp_path / "runs")]
    if place == "seed":  # on another disk, such as a scratch
        (study / "jcl_seed=1").rename(tmp_path / "runs/a")  # its name comes before that of the pipeline
        (study / "jcl_seed=1").symlink_to(tmp_path / "runs/a")
    elif place == "pipeline":
        study.rename(tmp_path / "study")
        study.symlink_to(tmp_path / "study")
        (tmp_path / "study/loop").symlink_to(tmp_path / "runs")
    else:
        (tmp_path / "runs/latest").symlink_to(study)
        folders += [str(tmp_path / "runs/latest"), str(study)]
    assert report.main([*folders, "--verdicts"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("## Verdicts of study") == 1 and printed.count("3 seeds each") == 3


def test_a_damaged_record_of_a_pipeline_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    study_in(tmp_path / "study")
    pipeline(tmp_path / "other", "jcl/pretrain")
    (tmp_path / "other/launch/pipeline.json").write_text("{")
    pretrain(tmp_path / "other/jcl/pretrain", *DIGITS)
    assert report.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "## Verdicts of study" in printed and "| other/jcl " in printed
    assert f"- {tmp_path}/other/launch/pipeline.json is not JSON" in printed


def test_verdicts_alone_name_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    study = study_in(tmp_path / "study")
    shutil.rmtree(study / "jcl_seed=2")
    (study / "random_seed=3/knn/results.json").write_text("{")
    assert report.main([str(study), "--verdicts"]) == 0
    printed = capsys.readouterr().out
    assert "- study: jcl_seed=2/pretrain, " in printed and "random_seed=3/knn/results.json is not JSON" in printed
    for seed in "13":
        shutil.rmtree(study / f"jcl_seed={seed}")
    refused(lambda: report.main([str(study), "--verdicts"]), "no score of two branches", "jcl_seed=1/pretrain")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "high"])
def test_a_score_that_is_no_number_is_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str], value):
    study = study_in(tmp_path / "study")
    path = study / "jcl_seed=2/knn/results.json"
    results = json.loads(path.read_text())
    results["metrics"]["top1"] = value
    path.write_text(json.dumps(results))
    assert report.main([str(study), "--verdicts"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"cannot be shown: top1 is {value!r}, not a number" in printed
    assert "2 and 3 seeds" in printed and printed.count("| ahead |") == 2, "as without this score"


@pytest.mark.parametrize("name", ["results.json", "config.yaml", "report.pdf", "report"])
def test_a_report_replaces_no_file_of_a_run(tmp_path: Path, name: str):
    pretrain(tmp_path, *DIGITS)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    refused(lambda: report.main([str(tmp_path), "--output", str(tmp_path / name)]), name, ".html", ".md")
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}


def test_a_folder_in_the_way_of_a_figure_is_one_line(tmp_path: Path):
    study = study_in(tmp_path / "study")
    (tmp_path / "report_scores.png").mkdir()
    refused(lambda: report.main([str(study), "--output", str(tmp_path / "report.md")]), "report_scores.png")
