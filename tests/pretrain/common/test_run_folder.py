"""What is written to a run folder is complete."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pretrain.common.run_folder import replacing, write_environment


def test_an_error_while_writing_leaves_the_earlier_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("earlier")
    with pytest.raises(RuntimeError, match="in the middle"), replacing(tmp_path / "x") as file:
        file.write(b"half")
        raise RuntimeError("in the middle")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "earlier"


def test_the_environment_of_the_first_part_stays_when_a_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for word in ("first", os.fsdecode(b"\xff")):  # a path need not be UTF-8
        monkeypatch.setattr("sys.argv", ["train.py", word])
        write_environment(tmp_path)
    lines = (tmp_path / "environment.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("command:")] == [
        "command: train.py first",
        r"command: train.py '\udcff'",
    ]
