"""AP over the share of labels: one line per initialization, unequal protocols apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.reporting.runs import cells, detector, pretrain, provenance, render, write

TABLE = "## AP over the share of labels: mask"


def trained(folder: Path, percent: str, fold: int, ap: float, *more: str, start: str = "") -> None:
    """A detector on a fold of a share, from random weights or from the pretraining with that config."""
    name = f"coco:sets/{percent}pct_fold{fold}.json:images"
    steps = {"1": 9000, "10": 28500}[percent]
    words = ["DATASETS.TRAIN", f"('{name}',)", "SOLVER.MAX_ITER", str(steps), "SOLVER.STEPS", f"({steps - 9},)", *more]
    content = detector(*words, weights=provenance(start) if start else None)
    content["metrics"]["segm"]["AP"] = ap  # of its data set, too
    write(folder, content)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    start = pretrain(tmp_path / "jcl")
    trained(tmp_path / "random_1_0_seed=5", "1", 0, 4.0, "SEED", "5")  # a fold's seeds count by their mean
    for fold in range(2):
        for percent, base in (("1", 6.0), ("10", 20.0)):
            trained(tmp_path / f"random_{percent}_{fold}", percent, fold, base + 2 * fold)
        trained(tmp_path / f"jcl_1_{fold}", "1", fold, 9.0 + fold, start=start)
    return tmp_path


def test_a_row_per_initialization_and_a_column_per_share(runs: Path) -> None:
    text = render([runs])
    assert text.count(TABLE) == 1
    part = text.partition(TABLE)[2]
    assert "mean and 95% interval (Student's t) over folds" in part
    assert cells(part, "initialization")[1:] == ["1%, 9000 iterations", "10%, 28500 iterations"]
    assert cells(part, "random") == ["random", "6.5 ± 19.1 [n 2]", "21.0 ± 12.7 [n 2]"]  # t 12.706, standard error 1
    (jcl,) = [line for line in part.splitlines() if line.startswith("| jcl, imagenet, 200 ")]
    assert "9.5 ± 6.4 [n 2]" in jcl and jcl.rstrip(" |").endswith("-")


def test_other_configs_and_schedules_are_not_averaged(runs: Path) -> None:
    other = pretrain(runs / "jcl_other", "METHOD.JCL_LAMBDA", "2.0")
    trained(runs / "other_1", "1", 0, 30.0, start=other)
    trained(runs / "other_10", "10", 0, 31.0, start=other)
    trained(runs / "longer", "1", 0, 90.0, "SOLVER.MAX_ITER", "90000")
    write(runs / "evaluated", detector("DATASETS.TRAIN", "()", iteration=None))  # needs no training set
    part = render([runs]).partition(TABLE)[2]
    assert "jcl, imagenet, 200 (config 2)" in part
    assert " 30.0 |" in part and "9.5 ± 6.4 [n 2]" in part and "1%, 90000 iterations" in part


def test_other_protocols_and_single_shares_stay_apart(runs: Path, tmp_path: Path) -> None:
    trained(runs / "frozen", "1", 0, 50.0, "MODEL.BACKBONE.FREEZE_AT", "5")
    assert "50.0" not in render([runs]).partition(TABLE)[2].partition("\n## ")[0]
    one = tmp_path / "one"
    trained(one / "a", "1", 0, 5.0)
    trained(one / "b", "1", 1, 6.0)
    assert TABLE not in render([one])
