"""Verdicts and headline: who is ahead, corrected for the number of comparisons, and what scores cannot show."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from tests.errors import refused
from tests.tools.reporting.runs import AP, DIGITS, detector, pipeline, pretrain, probe, render, study_in, write
from tools import launch, report
from tools.reporting.seeds.headline import build_headline
from tools.reporting.seeds.statistics import correct_by_holm, count_decimals
from tools.reporting.seeds.study import Study
from tools.reporting.seeds.verdicts import build_verdict_table, compare_branches

SEEDS = [str(seed) for seed in range(1, 6)]


def study_of(scores: dict[str, dict[str, list[float]]], baseline: str = "") -> Study:
    by_seed = {
        score: {branch: dict(zip(SEEDS, values, strict=False)) for branch, values in branches.items()}
        for score, branches in scores.items()
    }
    return Study("small", baseline, SEEDS, by_seed)


def test_holms_correction():
    assert correct_by_holm([0.04, 0.01, None, 0.03]) == pytest.approx([0.06, 0.03, None, 0.06])
    assert correct_by_holm([0.02, 0.03]) == pytest.approx([0.04, 0.04])  # the larger one needs no factor of its own
    assert correct_by_holm([0.6, 0.9]) == pytest.approx([1.0, 1.0]) and correct_by_holm([]) == []


def test_a_verdict_is_welchs_test_after_the_correction():
    branches = {"random": [10.0, 11.0, 12.0], "a": [13.0, 13.5, 15.0], "b": [11.5, 12.0, 12.8]}
    a, b = compare_branches(study_of({"mask box AP": branches}, "random"))
    tests: list[Any] = [stats.ttest_ind(branches[name], branches["random"], equal_var=False) for name in "ab"]
    p_a, p_b = (test.pvalue for test in tests)
    assert (a.difference.p, a.corrected_p) == pytest.approx((p_a, 2 * p_a)) and b.corrected_p == pytest.approx(p_b)
    assert p_a < 0.05 and (a.verdict, b.verdict) == ("ahead" if 2 * p_a <= 0.05 else "within noise", "within noise")


def test_without_a_baseline_the_best_branch_is_compared_and_all_pairs_count():
    branches = {"a": [13.0, 13.1, 13.2], "b": [11.0, 11.1, 11.2], "c": [11.0, 11.2, 11.1]}
    comparisons = compare_branches(study_of({"kNN top-1": branches}))
    assert [(one.branch, one.reference) for one in comparisons] == [("a", "b"), ("a", "c")]
    assert comparisons[0].corrected_p == pytest.approx(3 * (comparisons[0].difference.p or 0))
    (note,) = build_verdict_table(study_of({"kNN top-1": branches})).settings
    assert "all pairs of branches" in note and "(3)" in note


def test_rankme_is_not_judged():
    scores = {
        "kNN top-1": {"random": [1.0, 2.0], "jcl": [3.0, 4.0]},
        "RankMe": {"random": [1.0, 2.0], "jcl": [3.0, 4.0]},
    }
    assert [one.score for one in compare_branches(study_of(scores, "random"))] == ["kNN top-1"]


def test_the_headline_says_who_is_ahead_and_what_is_noise():
    scores = {
        "kNN top-1": {"random": [50.0, 53.0, 51.0], "jcl": [51.0, 53.5, 50.5]},
        "mask box AP": {"random": [10.0, 10.2, 10.1], "jcl": [20.0, 20.2, 20.1], "tcl": [15.0, 15.2, 15.1]},
        "mask mask AP": {"random": [10.0, 10.2, 10.1], "jcl": [5.0, 5.2, 5.1]},
        "box box AP": {"random": [0.0, 0.1, 0.0], "jcl": [0.0, 0.0, 0.0]},
        "RankMe": {"random": [1.0, 2.0, 3.0], "jcl": [5.0, 6.0, 7.0]},
    }
    assert build_headline([study_of(scores, "random")], []) == [
        "mask box AP: jcl is ahead of random by 10.0 ± 0.2 (3 seeds each); also ahead: tcl.",
        "mask mask AP: no branch is ahead of random; jcl is behind: -5.0 ± 0.2 (3 seeds each).",
        "kNN top-1: jcl against random: +0.3 ± 3.6, within noise (3 seeds each).",
    ]
    unnamed = {"kNN top-1": {"random": [50.0, 53.0, 51.0], "moco": [50.0, 52.0, 51.0], "own": [50.5, 52.0, 51.0]}}
    assert build_headline([study_of(unnamed, "moco")], []) == [
        "kNN top-1: random against moco: +0.3 ± 3.1, within noise (3 seeds each); not ahead either: own +0.2 ± 2.1.",
    ]
    (warning, _) = build_headline([replace(study_of(unnamed, "moco"), random="random")], [])
    assert warning == "Random weights have the highest kNN top-1: these runs do not show that pretraining helps."
    (*_, row) = build_verdict_table(study_of({"box box AP": scores["box box AP"]}, "random")).rows
    assert row[-1] == "trained too briefly" and row[3].startswith("+0.0 ± ")
    one_seed = study_of({"mask box AP": {"jcl": [20.0], "random": [10.0]}})
    (line,) = build_headline([one_seed], [])
    assert line.startswith("mask box AP: jcl against random: +10.0 (1 seed each; too few seeds")


def test_a_report_begins_with_its_title_and_headline(tmp_path: Path):
    text = render([study_in(tmp_path / "margins")])
    assert text.startswith("# margins\n\n- mask_40 box AP: jcl is ahead of random by 9.2 ± ")
    assert "\n## Verdicts of margins\n" in text and "\n## How many seeds? margins\n" in text
    assert "METHOD.NAME" not in text  # random has no pretraining that jcl's settings could differ from
    pretrain(tmp_path / "a/run", *DIGITS)
    assert render([tmp_path / "a"]).startswith("# a\n\nHow to read")


def test_ap_near_0_has_one_decimal_and_other_small_scores_four_digits():
    """An AP of 0.09 with four digits would look as if it were known that well."""
    assert count_decimals("mask box AP", {"jcl": {"1": 0.0863, "2": 0.0}}) == 1
    assert count_decimals("kNN top-1 after pretraining", {"jcl": {"1": 0.5}}) == 1
    assert count_decimals("variance", {"jcl": {"1": 0.0224}}) == 5


def test_detectors_at_the_floor_are_called_trained_too_briefly(tmp_path: Path):
    metrics = {"bbox": {"AP": 0.0}, "segm": {"AP": 0.2}}
    write(tmp_path / "a", detector(datasets={"coco_2017_val": metrics}))
    assert "\n- Every detector has an AP below 1: trained too briefly to mean anything.\n" in render([tmp_path])
    write(tmp_path / "b", detector())
    assert "\n- 1 of 2 detectors has an AP below 1: trained too briefly" in render([tmp_path])
    write(tmp_path / "a/eval_only", detector(datasets={"coco_2017_val": metrics}))
    assert "\n- 1 of 2 detectors has an AP below 1: trained too briefly" in render([tmp_path])


def test_a_difference_that_the_correction_loses_is_explained_where_it_is_seen():
    """Alone, the difference in kNN is significant (p 0.03); among three comparisons, it is not."""
    scores = {
        "kNN top-1": {"random": [50.0, 51.0, 52.0], "jcl": [53.0, 54.0, 54.5]},
        "linear top-1": {"random": [50.0, 51.0, 52.0], "jcl": [50.5, 51.0, 52.0]},
        "mask box AP": {"random": [10.0, 11.0, 12.0], "jcl": [10.5, 11.0, 12.0]},
    }
    study = study_of(scores, "random")
    table = build_verdict_table(study)
    assert [one.is_lost_by_correction for one in compare_branches(study)] == [True, False, False]
    assert table.notes == [
        "A difference whose interval excludes 0 may be within noise after the correction for all 3 comparisons."
    ]
    knn = next(line for line in build_headline([study], []) if line.startswith("kNN"))
    assert ", within noise after the correction for 3 comparisons (3 seeds each)" in knn
    del scores["kNN top-1"]
    assert build_verdict_table(study_of(scores, "random")).notes == []


def test_settings_of_branches_that_differ_are_listed(tmp_path: Path):
    pipeline(tmp_path / "p", *(f"{name}/{stage}" for name in ("sharp", "soft") for stage in ("pretrain", "knn", "box")))
    for name, temperature, rate in (("sharp", "0.1", "0.01"), ("soft", "0.2", "0.02")):
        words = ("METHOD.TEMPERATURE", temperature, "SEED", temperature[-1], "DATALOADER.NUM_WORKERS", temperature[-1])
        folder = tmp_path / "p" / name / "pretrain"
        config = pretrain(folder, *DIGITS, *words)
        if name == "sharp":
            (folder / "config.yaml").write_text(config.replace("IMPORTED: ''", "IMPORTED: my_views.py@12345678"))
        probe(tmp_path / "p" / name / "knn", config, 50.0)
        results = detector("SOLVER.BASE_LR", rate)
        write(tmp_path / "p" / name / "box", results, results["config"])
    (table,) = [table for table in report.build_report([tmp_path]).tables if table.title == "Branches of p"]
    assert table.head == ["branch", "backbone", "pretrain settings that differ", "box settings that differ"]
    assert table.rows == [
        ["sharp", "jcl", "--import my_views.py (version 12345678), METHOD.TEMPERATURE 0.1", "SOLVER.BASE_LR 0.01"],
        ["soft", "jcl", "METHOD.TEMPERATURE 0.2", "SOLVER.BASE_LR 0.02"],
    ]


def test_verdicts_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    study = study_in(tmp_path / "study")
    assert launch.main(["report", str(study), "--verdicts"]) == 0
    printed = capsys.readouterr().out
    test: Any = stats.ttest_ind(AP["jcl"], AP["random"], equal_var=False)
    assert printed.startswith("## Verdicts of study\n") and "Cost" not in printed
    assert " ".join(printed.split()).count("| ahead |") == 3
    assert f"| {test.pvalue:.3f} |" in " ".join(printed.split())
    assert launch.main(["report", str(study), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [one["branch"] for one in content["comparisons"]] == ["jcl"] * 3 and content["headline"]
    pretrain(tmp_path / "alone", *DIGITS)
    refused(lambda: launch.main(["report", str(tmp_path / "alone"), "--verdicts"]), "SEEDS")
    refused(lambda: launch.main(["report", str(study), "--power", "-1"]), "--power is -1")
