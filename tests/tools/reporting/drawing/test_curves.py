"""Curves: only comparable runs share a figure."""

import re
from pathlib import Path

from pretrain.common.run.state import update_state
from tests.tools.reporting.runs import DIGITS, log, pipeline, pretrain
from tools import report
from tools.reporting.drawing import curves


def test_a_stage_is_a_figure_with_a_line_per_branch_and_unfinished_runs_are_drawn(tmp_path: Path):
    losses = {
        "jcl_seed=1/mask": (4.0, 3.0),
        "jcl_seed=1/pretrain": (3.0, None, 2.0),
        "jcl_seed=2/pretrain": (5.0, 4.0),
        "mocov2_seed=1/pretrain": (6.0,),  # one value is no curve
    }
    pipeline(tmp_path, *losses)
    pretrain(tmp_path / "jcl_seed=1/pretrain", *DIGITS)
    update_state(tmp_path / "jcl_seed=1/pretrain", stage="pretrain")
    for key, values in losses.items():
        log(tmp_path / key, ({"iteration": i, "loss": loss} for i, loss in enumerate(values)))
    figures = curves.draw_curves(report.build_report([tmp_path]))
    assert list(figures) == ["pretrain", "mask"]
    assert figures["pretrain"].count(">jcl</text>") == 1 and "mocov2" not in figures["pretrain"]


def test_a_branch_has_one_color_in_all_figures(tmp_path: Path):
    """Also if one stage lacks a branch, as random weights are not pretrained."""
    pipeline(tmp_path, "random/mask", "jcl/pretrain", "jcl/mask")
    pretrain(tmp_path / "jcl/pretrain", *DIGITS)
    for key in ("random/mask", "jcl/pretrain", "jcl/mask"):
        log(tmp_path / key, ({"iteration": i, "loss": 1.0} for i in range(2)))
    figures = curves.draw_curves(report.build_report([tmp_path]))
    colors = {stage: re.findall(r"stroke: (#[0-9a-f]{6}); stroke-opacity: 0.8", svg) for stage, svg in figures.items()}
    assert len(set(colors["mask"])) == 2
    assert set(colors["pretrain"]) < set(colors["mask"])


def test_two_pipelines_of_one_name_have_a_figure_each(tmp_path: Path):
    for folder in (tmp_path / "x/p", tmp_path / "y/p"):
        pipeline(folder, "jcl/pretrain")
        pretrain(folder / "jcl/pretrain", *DIGITS)
        log(folder / "jcl/pretrain", ({"iteration": i, "loss": 1.0} for i in range(2)))
    assert list(curves.draw_curves(report.build_report([tmp_path]))) == ["x/p: pretrain", "y/p: pretrain"]


def test_each_test_set_has_its_own_curve_of_ap():
    logged = [
        {"iteration": 1, "lr": 0.1, "a/bbox/AP": 1.0, "coco:b.json:/y/bbox/AP": 2.0, "a/bbox/AP50": 3.0},
        {"iteration": 3, "a/bbox/AP": 4.0, "loss": 5.0},
    ]
    assert list(curves.collect_points(logged).items()) == [
        ("loss", [(4, 5.0)]),
        ("learning rate", [(2, 0.1)]),
        ("a/bbox/AP", [(2, 1.0), (4, 4.0)]),
        ("coco:b.json:/y/bbox/AP", [(2, 2.0)]),
    ]
