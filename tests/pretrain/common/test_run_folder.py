"""What cannot be written or read in a run folder ends in one line; what is written is complete."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.common import checkpoint
from pretrain.common.errors import UserError
from pretrain.common.run_folder import (
    atomic_write,
    begin,
    replacing,
    stage_of,
    write_environment,
)


def test_read_only_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)  # the clean-up fails there, too
    with pytest.raises(UserError, match=r"cannot write .*x: Read-only file system; choose another folder$"):
        atomic_write(tmp_path / "x", "text")
    with pytest.raises(UserError, match=r"cannot write .*x: Read-only file system; make the folder writable and run"):
        checkpoint.save(tmp_path / "x", {})


def test_an_error_while_writing_leaves_the_earlier_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("earlier")
    with pytest.raises(RuntimeError, match="in the middle"), replacing(tmp_path / "x") as file:
        file.write(b"half")
        raise RuntimeError("in the middle")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "earlier"


def test_a_folder_belongs_to_one_stage(tmp_path: Path) -> None:
    begin(tmp_path, "pretrain")
    begin(tmp_path, "pretrain")
    with pytest.raises(UserError, match=f"{tmp_path} is the run folder of pretrain, not of linear; choose another"):
        begin(tmp_path, "linear")
    assert stage_of(tmp_path) == "pretrain"


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


SURROGATES = """
import sys
from pretrain.common import run_folder
from pretrain.common.errors import UserError, run_command_line

def main(_):
    data, output = sys.argv[1:]
    print(f"found {data}")
    run_folder.write_json(f"{output}/results.json", {"data": data})
    assert run_folder.read_json(f"{output}/results.json") == {"data": data}
    run_folder.setup_logging(output).info(f"training on {data}")
    raise UserError(f"cannot read {data}")

run_command_line(main)
"""


def test_a_path_that_is_not_utf8_is_printed_logged_and_written(tmp_path: Path):
    ended = subprocess.run(
        [sys.executable, "-c", SURROGATES, b"/data/\xff", tmp_path],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},  # as in most locales, though not in C.UTF-8
    )
    assert (ended.returncode, ended.stderr) == (2, "error: cannot read /data/\\udcff\n")
    printed, logged = ended.stdout.splitlines()
    assert printed == "found /data/\\udcff" and logged.endswith("training on /data/\\udcff")
    assert (tmp_path / "log.txt").read_text().endswith("training on /data/\\udcff\n")
