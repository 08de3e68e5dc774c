"""What a report says of stages that are not done and of files that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pretrain.common.errors import UserError
from tests.tools.reporting.runs import (
    DIGITS,
    cells,
    column,
    detector,
    pipeline,
    pretrain,
    probe,
    render,
    write,
)
from tools import report


def test_a_pipelines_branches_are_rows_and_its_failures_are_told(tmp_path: Path):
    keys = ("jcl/pretrain", "jcl/linear", "moco/pretrain", "moco/linear")
    pipeline(tmp_path / "p", *keys, parents={"jcl/linear": ["jcl/pretrain"], "moco/linear": ["moco/pretrain"]})
    config = pretrain(tmp_path / "p/jcl/pretrain", *DIGITS)
    probe(tmp_path / "p/jcl/linear", config, 60.0, recipe="own")
    failed = tmp_path / "p/moco/pretrain/launch/ranks"
    failed.mkdir(parents=True)
    (failed / "7.0.failed").write_text(json.dumps({"rank": 3, "error": "loss is not finite"}))
    (tmp_path / "p").rename(tmp_path / "moved")  # a pipeline may be moved as a whole
    text = render([tmp_path])
    assert cells(text, "jcl")[-3:] == ["50.0", "60.0", "88.0"]
    assert "- moco/pretrain: failed on rank 3: loss is not finite" in text
    assert "- moco/linear: skipped, because moco/pretrain is not done" in text
    assert "- jcl" not in text


def test_a_number_that_is_not_finite_is_named_and_not_shown(tmp_path: Path):
    config = pretrain(tmp_path / "jcl", *DIGITS)
    probe(tmp_path / "jcl/linear", config, float("nan"), recipe="own")
    found = detector()
    found["metrics"]["bbox"]["AP"] = float("inf")
    write(tmp_path / "d", found)
    text = render([tmp_path])
    assert cells(text, "jcl")[-3:] == ["50.0", "-", "88.0"] and cells(text, "d")[2:4] == ["-", "58.0"]
    assert f"- {tmp_path}/jcl/linear/results.json: metrics.top1 is not finite and is shown as '-'" in text
    assert f"- {tmp_path}/d/results.json: metrics.bbox.AP is not finite and is shown as '-'" in text
    assert "nan" not in text and "inf" not in text.replace("not finite", "")


@pytest.mark.parametrize("content", ["", "{}"])
def test_a_report_of_nothing_that_can_be_read_fails(tmp_path: Path, capsys: pytest.CaptureFixture, content: str):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(UserError, match="no result could be read"):
        report.main([str(tmp_path)])
    assert f"- {tmp_path}/results.json " in capsys.readouterr().out
    pretrain(tmp_path / "jcl")
    assert report.main([str(tmp_path)]) == 0


def test_nothing_to_report_is_said(tmp_path: Path):
    with pytest.raises(UserError, match=r"no results.json in"):
        render([tmp_path])
    with pytest.raises(UserError, match="is not a folder"):
        render([tmp_path / "absent"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"stage": "transfer", "metr', " is not JSON (Unterminated string"),
        (b"[1]", " holds a JSON list, not an object"),
        (b"{}", " cannot be shown: it lacks 'stage'"),
        (b'{"stage": []}', " cannot be shown"),
        (b'{"stage": "transfer"}', " cannot be shown: it lacks 'protocol'"),
        (b'{"stage": "linear", "metrics": [1], "source": 3}', " cannot be shown"),
        (b'{"stage": "linear", "metrics": {"top1": "much"}, "source": {}}', " cannot be shown: top1 is 'much'"),
        (b'{"stage": "linear", "metrics": {"top1": 1}, "source": {}, "protocol": [3]}', " cannot be shown"),
        (b'{"stage": "pretrain", "metrics": [], "method": "jcl", "arch": []}', " cannot be shown"),
        (json.dumps(detector() | {"metrics": {"bbox": {"AP": "much"}}}).encode(), " cannot be shown"),
        (json.dumps(detector() | {"config": "a: [" * 5000}).encode(), " cannot be shown"),
        (json.dumps(detector() | {"weights": []}).encode(), ""),
    ],
)
def test_a_damaged_result_is_named_and_the_others_are_reported(tmp_path: Path, content: bytes, message: str):
    write(tmp_path / "a", detector())
    (tmp_path / "b").mkdir()
    (tmp_path / "b/results.json").write_bytes(content)
    shown = render([tmp_path])
    assert column(shown, "a", "box AP") == "38.0"
    named = [line for line in shown.split("## Not read")[-1].splitlines() if line.startswith("- ")]
    assert [line.startswith(f"- {tmp_path / 'b' / 'results.json'}{message}") for line in named] == [True] or not message
    if message:
        assert "## Not read" in render([tmp_path / "b"])  # and there is nothing else to say of it


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *(("launch/pipeline.json", content) for content in (b"", b"[]", b'{"stages": 3}', b'{"stages": [[]]}')),
        ("a/launch/complete.json", b""),
        ("a/launch/ranks/0.failed", b""),
    ],
)
def test_damaged_records_of_the_launcher_hide_nothing(tmp_path: Path, file: str, content: bytes):
    pipeline(tmp_path, "a", "moco")
    write(tmp_path / "a", detector())
    (tmp_path / file).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / file).write_bytes(content)
    if file.startswith("a/launch/ranks"):
        (tmp_path / "a/launch/complete.json").unlink()
    text = render([tmp_path])
    assert column(text, "a", "box AP") == "38.0"
    if file.startswith("launch"):
        assert f"- {tmp_path / file} " in text.split("## Not read")[1]
    else:
        assert "- a: " in text.split("## Not done")[1]


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"a: [", b"DATA: []", b"[" * 1000])
def test_a_damaged_config_is_named_and_its_run_is_shown(tmp_path: Path, content: bytes):
    pretrain(tmp_path / "jcl")
    assert ", seed 0." in render([tmp_path])
    (tmp_path / "jcl/config.yaml").write_bytes(content)
    text = render([tmp_path])
    assert column(text, "jcl", "kNN top-1") == "50.0" and "seed" not in text
    assert (f"- {tmp_path / 'jcl/config.yaml'}: " in text) == (content != b"DATA: []")
