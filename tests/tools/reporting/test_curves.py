"""Which runs share a figure, and what is drawn of a long one."""

from __future__ import annotations

import json
from pathlib import Path

from tests.tools.reporting.runs import DIGITS, pipeline, pretrain
from tools import report
from tools.reporting import curves


def log(folder: Path, *losses: float | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = ({"iteration": i, "loss": loss} for i, loss in enumerate(losses))
    (folder / "metrics.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_stage_is_a_figure_with_a_line_per_branch_and_unfinished_runs_are_drawn(tmp_path: Path):
    pipeline(tmp_path, "jcl_seed=1/mask", "jcl_seed=1/pretrain", "jcl_seed=2/pretrain", "mocov2_seed=1/pretrain")
    pretrain(tmp_path / "jcl_seed=1/pretrain", *DIGITS)
    log(tmp_path / "jcl_seed=1/mask", 4.0, 3.0)
    log(tmp_path / "jcl_seed=1/pretrain", 3.0, None, 2.0)
    log(tmp_path / "jcl_seed=2/pretrain", 5.0, 4.0)
    log(tmp_path / "mocov2_seed=1/pretrain", 6.0)  # one value is no curve
    figures = curves.figures(report.gather([tmp_path]))
    assert list(figures) == ["pretrain", "mask"]
    assert figures["pretrain"].count(">jcl</text>") == 1 and "mocov2" not in figures["pretrain"]


def test_a_long_curve_is_thinned_and_ends_where_the_run_does(tmp_path: Path):
    folder = log(tmp_path / "jcl", *map(float, range(1234)))
    ((name, found),) = curves.curves([("jcl", folder)])["loss"]
    assert name == "jcl" and 200 < len(found) <= 402 and (found[0], found[-1]) == ((1, 0.0), (1234, 1233.0))


def test_each_test_set_has_its_own_curve_of_ap():
    logged = [
        {"iteration": 1, "lr": 0.1, "a/bbox/AP": 1.0, "coco:/x/b.json:/y/bbox/AP": 2.0, "a/bbox/AP50": 3.0},
        {"iteration": 3, "a/bbox/AP": 4.0, "AP": 5.0},
    ]
    expected = {
        "learning rate": [(2, 0.1)], "box AP on a": [(2, 1.0), (4, 4.0)], "box AP on /x/b.json:/y": [(2, 2.0)],
    }  # fmt: skip
    assert curves.points(logged) == expected
