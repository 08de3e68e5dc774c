"""The number of seeds is that with which simulated studies find the difference as often as stated."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.special import chdtri, stdtr

from tests.errors import refused
from tests.tools.reporting.runs import AP, SEEDS, log, study_in
from tools import launch
from tools.reporting.files import read_config
from tools.reporting.seeds.power import Spread, compute_power, count_seeds, estimate_spread

TRIALS = 20_000


def simulate(seeds: int, effect: float, level: float) -> float:
    """Return how often Welch's test finds a difference of ``effect`` standard deviations."""
    generator = np.random.default_rng(seeds)
    first, second = generator.normal(size=(2, TRIALS, seeds))
    errors = [values.var(axis=1, ddof=1) / seeds for values in (first, second)]
    t = (first.mean(axis=1) + effect - second.mean(axis=1)) / np.sqrt(errors[0] + errors[1])
    freedom = (errors[0] + errors[1]) ** 2 * (seeds - 1) / (errors[0] ** 2 + errors[1] ** 2)
    return float((2 * stdtr(freedom, -abs(t)) <= level).mean())


@pytest.mark.parametrize("level", [0.05, 0.05 / 12])
@pytest.mark.parametrize("seeds", [2, 3, 5, 20])
def test_type_1_error_and_power_are_those_of_simulations(seeds: int, level: float):
    for effect in (0.0, 0.5, 1.0, 2.0, 4.0):
        assert compute_power(seeds, [effect], level) == pytest.approx(simulate(seeds, effect, level), abs=0.01)


@pytest.mark.parametrize(("deviation", "freedom"), [(2.0, 4), (3.0, 6), (2.0, 12)])
def test_seeds_chosen_from_pilot_runs_have_80_percent_power_on_average(deviation: float, freedom: int):
    """The spread of a pilot has a chi-squared distribution; the seeds that follow from it are run afresh."""
    estimates = [deviation * (float(chdtri(freedom, (i + 0.5) / 50)) / freedom) ** 0.5 for i in range(50)]
    counts = [count_seeds(Spread(estimate, freedom), 2.0) for estimate in estimates]
    power = np.mean([compute_power(count or 200, [2.0 / deviation]) for count in counts])
    assert power == pytest.approx(0.8, abs=0.02)


def test_more_spread_less_knowledge_and_more_comparisons_need_more_seeds():
    known = Spread(1.5, 1000)
    (seeds,) = [count_seeds(known, 2.0)]
    assert seeds and compute_power(seeds, [2 / 1.5]) >= 0.8 > compute_power(seeds - 1, [2 / 1.5])
    assert (count_seeds(Spread(3.0, 1000), 2.0) or 0) > seeds < (count_seeds(Spread(1.5, 4), 2.0) or 0)
    assert (count_seeds(known, 2.0, 0.005) or 0) > seeds
    assert count_seeds(Spread(50.0, 8), 2.0) is None
    with pytest.raises(ValueError, match="spread of 0"):
        count_seeds(Spread(0.0, 8), 2.0)
    with pytest.raises(ValueError, match="3 degrees"):
        count_seeds(Spread(1.0, 3), 2.0)


def test_the_spread_is_pooled_over_branches():
    branches = {"a": {"1": 1.0, "2": 3.0}, "b": {"1": 10.0, "2": 11.0, "3": 12.0}, "c": {"1": 7.0}}
    spread = estimate_spread(branches)
    assert (spread.deviation, spread.freedom) == (pytest.approx(((2 + 2) / 3) ** 0.5), 3)
    assert estimate_spread({"a": {"1": 5.0}}) == Spread(0.0, 0)


def test_the_report_counts_seeds_and_gpu_hours(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    study = study_in(tmp_path / "study")
    for seed in SEEDS:  # 100 steps in an hour on two GPUs
        run = study / f"jcl_seed={seed}/pretrain"
        batch = read_config(run)["SOLVER.IMS_PER_BATCH"]
        lines = [{"iteration": 99, "images_per_second": 100 * batch / 3600}]
        log(run, lines, "host: n (Linux, 8 CPUs)\ndevices: NVIDIA H200, NVIDIA H200\n")
    assert launch.main(["report", str(study), "--power", "4"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("## How many seeds? study\n") and "a difference of 4, with" in printed
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines() if "AP" in line]
    spread = estimate_spread({name: dict(zip(SEEDS, values, strict=True)) for name, values in AP.items()})
    seeds = count_seeds(spread, 4.0)
    corrected = count_seeds(spread, 4.0, 0.05 / 3)
    assert corrected and seeds
    answer = [seeds, corrected, corrected - 3, 2 * (corrected - 3)]
    assert rows[0] == ["mask_40 box AP", "1.4", "3", *map(str, answer)]
    assert "GPU-hours" in printed


def test_too_few_seeds_are_too_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    study = study_in(tmp_path / "study")
    for path in study.glob("*_seed=3/*/results.json"):
        path.unlink()
    assert launch.main(["report", str(study), "--power", "2"]) == 0
    assert capsys.readouterr().out.count("too few seeds to say") == 3


def test_seeds_with_equal_scores_answer_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    study = study_in(tmp_path / "study")
    for path in study.glob("*/knn/results.json"):
        results = json.loads(path.read_text())
        results["metrics"]["top1"] = 60.0 if "jcl" in str(path) else 50.0
        path.write_text(json.dumps(results))
    assert launch.main(["report", str(study), "--power", "2", "--verdicts"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "+10.0 | - | - | unknown |" in printed and "the scores of all seeds are equal" in printed
    assert printed.count("| ahead |") == 2


@pytest.mark.parametrize("power", ["nan", "inf", "-1", "0"])
def test_a_difference_is_a_number_above_0(tmp_path: Path, power: str):
    refused(lambda: launch.main(["report", str(tmp_path), "--power", power]), f"--power is {power}")
