"""Which runs share a chart, and what is drawn of a long one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.reporting.runs import DIGITS, detector, pipeline, pretrain, write
from tools import report
from tools.reporting import curves
from tools.reporting.charts import Line


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Line]]:
    """The lines of each chart by its title, as they are drawn."""
    found: dict[str, list[Line]] = {}
    monkeypatch.setattr(curves, "line_chart", lambda title, lines, styles: found.setdefault(title, list(lines)) and "")
    return found


def log(folder: Path, *losses: float | None, name: str = "loss") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = ({"iteration": i, name: loss} for i, loss in enumerate(losses))
    (folder / "metrics.json").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_unequal_protocols_have_charts_of_their_own(tmp_path: Path, drawn: dict[str, list[Line]]):
    for name, detail in (("a", ()), ("b", ()), ("c", ("SOLVER.MAX_ITER", "180000"))):
        write(tmp_path / name, detector(*detail))
        log(tmp_path / name, 3.0, 2.0, name="total_loss")
    first, second = curves.groups(report.gather([tmp_path]))
    assert (first.title, [name for name, *_ in first.legend]) == ("transfer (protocol 1)", ["a", "b"])
    assert (second.title, [name for name, *_ in second.legend]) == ("transfer (protocol 2)", ["c"])


def test_a_pipelines_seeds_look_alike_and_a_run_that_did_not_finish_is_drawn(
    tmp_path: Path, drawn: dict[str, list[Line]]
):
    pipeline(tmp_path, "jcl_seed=1/mask", "jcl_seed=1/pretrain", "jcl_seed=2/pretrain", "mocov2_seed=1/pretrain")
    pretrain(tmp_path / "jcl_seed=1/pretrain", *DIGITS)
    log(tmp_path / "jcl_seed=1/mask", 4.0, 3.0)
    log(tmp_path / "jcl_seed=1/pretrain", 3.0, None, 2.0)
    log(tmp_path / "jcl_seed=2/pretrain", 5.0, 4.0)
    log(tmp_path / "mocov2_seed=1/pretrain", 6.0)  # one value is no curve
    one, two = curves.groups(report.gather([tmp_path]))
    assert [one.title, two.title] == ["pretrain", "mask"] and one.legend == two.legend
    assert [name for name, *_ in one.legend] == ["jcl"]
    assert drawn["loss"] == [Line("jcl", (1, 3), (3.0, 2.0)), Line("jcl", (1, 2), (5.0, 4.0))]


def test_a_long_curve_is_thinned_and_ends_where_the_run_does(tmp_path: Path, drawn: dict[str, list[Line]]):
    pretrain(tmp_path / "jcl", *DIGITS)
    log(tmp_path / "jcl", *map(float, range(1234)))
    curves.groups(report.gather([tmp_path]))
    (line,) = drawn["loss"]
    assert 200 < len(line.x) <= 401 and (line.x[0], line.x[-1], line.y[-1]) == (1, 1234, 1233.0)


def test_each_test_set_has_its_own_curve_of_ap():
    logged = [
        {"iteration": 1, "lr": 0.1, "a/bbox/AP": 1.0, "coco:/x/b.json:/y/bbox/AP": 2.0, "a/bbox/AP50": 3.0},
        {"iteration": 1, "coco:/z/b.json:/y/bbox/AP": 6.0},
        {"iteration": 3, "a/bbox/AP": 4.0, "AP": 5.0},
    ]
    expected = {
        "learning rate": [(2, 0.1)], "box AP on a": [(2, 1.0), (4, 4.0)],
        "box AP on /x/b.json:/y": [(2, 2.0)], "box AP on /z/b.json:/y": [(2, 6.0)],
    }  # fmt: skip
    assert curves.points(logged) == expected
