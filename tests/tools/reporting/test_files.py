"""A report lists stages that are not complete, and files that cannot be read."""

from pathlib import Path

import pytest

from tests.errors import refused
from tests.tools.reporting.runs import DIGITS, cells, column, pipeline, pretrain, probe, render
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
