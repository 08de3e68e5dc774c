"""Means, intervals and paired differences over seeds are compared with scipy's intervals."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from pretrain.common.run.state import update_state
from tests.tools.reporting.runs import AP, SEEDS, cells, render, study_in, write
from tools.reporting.document import render_table
from tools.reporting.seeds.statistics import Difference, compare_means
from tools.reporting.seeds.study import build_table, read_study


def half_of_interval(values: list[float]) -> float:
    interval = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    return (interval.high - interval.low) / 2


def test_a_table_has_means_and_welchs_differences_with_the_digits_that_they_need(tmp_path: Path):
    study = read_study(study_in(tmp_path / "study"))
    assert study and (study.name, study.seeds, study.baseline) == ("study", SEEDS, "random")
    columns = ["kNN top-1", "mask_40 box AP", "mask_9 box AP"]
    assert list(study.scores) == columns  # in the order of the file
    random, jcl = AP.values()
    welch = stats.ttest_ind(jcl, random, equal_var=False).confidence_interval()
    change = f"{(welch.high + welch.low) / 2:+.1f} ± {(welch.high - welch.low) / 2:.1f}"
    shown = build_table(study, ["mask_40 box AP"])
    assert shown.title == "study" and shown.head == ["", "mask_40 box AP"]
    assert shown.rows == [
        ["random", f"{sum(random) / 3:.1f} ± {half_of_interval(random):.1f}"],
        ["jcl", f"{sum(jcl) / 3:.1f} ± {half_of_interval(jcl):.1f} ({change})"],
    ]
    by_seed = dict(zip(SEEDS, jcl, strict=True))
    small = {f"kNN / {scale}": {"jcl": {seed: ap / scale for seed, ap in by_seed.items()}} for scale in (100, 100_000)}
    text = render_table(build_table(replace(study, scores=small)))
    assert f"{sum(jcl) / 300:.4f} ± " in text and f"{sum(jcl) / 3e5:.7f} ± " in text
    assert shown.settings[0].startswith("Mean ± 95% interval (Student's t) over seeds 1, 2, 3; in parentheses, the")
    assert "(n)" not in shown.settings[0]


def test_scores_of_an_intermediate_checkpoint_are_omitted(tmp_path: Path):
    run = study_in(tmp_path) / "jcl_seed=2"
    results = json.loads((run / "knn/results.json").read_text())
    write(run / "knn", {**results, "metrics": {"top1": 9.9}, "source": {"source_sha256": "1234"}})
    pretraining = json.loads((run / "pretrain/results.json").read_text())
    write(run / "pretrain", {**pretraining, "checkpoint_sha256": "1234"})
    complete = read_study(tmp_path)
    assert complete and complete.scores["kNN top-1"]["jcl"]["2"] == 9.9
    write(run / "pretrain", {**pretraining, "checkpoint_sha256": "5678"})  # of the pretraining's end
    study = read_study(tmp_path)
    assert study and set(study.scores["kNN top-1"]["jcl"]) == {"1", "3"}
    assert "[n 2]" in build_table(study, ["kNN top-1"]).rows[1][1]


def test_scores_of_one_backbone_are_compared_seed_by_seed():
    ours = {"1": 3.0, "2": 5.0, "3": 4.0}
    base = {"3": 3.5, "1": 2.0}
    change = compare_means(ours, base, paired=True)
    paired = stats.ttest_rel([3.0, 4.0], [2.0, 3.5])
    assert change and change.mean == 0.75 and change.p == pytest.approx(paired.pvalue)
    assert compare_means(ours, {}) is None and compare_means({"1": 3.0}, {"2": 1.0}) == Difference(2.0)
    assert compare_means({"1": 3.0, "2": 3.0}, {"1": 3.0, "2": 3.0}) == Difference(0.0, 0.0, 1.0)  # fixed weights


def test_a_report_over_seeds_omits_a_damaged_score(tmp_path: Path):
    study_in(tmp_path / "study")
    (tmp_path / "study/jcl_seed=1/knn/results.json").write_text("{")
    text = render([tmp_path])
    assert "jcl_seed=1/knn/results.json is not JSON" in text
    assert "says how many (n)" in text and "[n 2]" in text.partition("## study\n")[2]


def change_probes(study: Path, branch: str, seeds: list[str], **change: Any) -> None:
    for seed in seeds:
        path = study / f"{branch}_seed={seed}/knn/results.json"
        results = json.loads(path.read_text())
        write(path.parent, {**results, "protocol": {**results["protocol"], **change}})


def test_branches_that_were_scored_on_other_data_are_not_compared(tmp_path: Path):
    study = study_in(tmp_path / "study")
    change_probes(study, "random", SEEDS, val="folder:other")
    text = render([study]).partition("## Branches")[0]
    assert "folder:other: kNN top-1" in text and "digits: kNN top-1" in text
    assert "kNN top-1" not in text.partition("## Verdicts")[2] + text.partition("## study")[0]
    assert "settings" not in text


def test_settings_of_a_probe_that_differ_between_branches_or_seeds_are_named(tmp_path: Path):
    study = study_in(tmp_path / "study")
    assert "same settings" not in render([study])
    change_probes(study, "random", SEEDS[:2], k=20)
    line = "kNN top-1 was not measured with the same settings in all branches: k 20 for random; k 200 for random, jcl."
    assert render([study]).count(line) == 2  # below the scores, and below the verdicts


def test_results_of_other_settings_than_the_files_do_not_count(tmp_path: Path):
    """After a change of the file, the stages of some seeds have not run again yet."""
    study = study_in(tmp_path / "study")
    for seed in ("2", "3"):
        update_state(study / f"jcl_seed={seed}/knn", state="complete", fingerprint="another")
    complete = read_study(study)
    assert complete and set(complete.scores["kNN top-1"]["jcl"]) == {"1"}
    assert set(complete.scores["mask_9 box AP"]["jcl"]) == set(SEEDS)


def test_a_copy_of_a_study_has_its_own_scores(tmp_path: Path):
    study_in(tmp_path / "study")
    shutil.copytree(tmp_path / "study", tmp_path / "copy")
    text = render([tmp_path])
    assert "Pretraining without accuracy" not in text
    assert cells(text, "copy/jcl_seed=1")[-1] == cells(text, "study/jcl_seed=1")[-1] == "89.3"
