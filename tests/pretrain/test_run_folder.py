"""A folder that cannot be written to is told in one line, wherever it is met first."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain import checkpoint
from pretrain.common.errors import UserError
from pretrain.common.run_folder import atomic_write, make_folder, setup_logging


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_output_dir_that_is_a_file_or_below_one(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("a file")
    for write in (setup_logging, make_folder, lambda folder: atomic_write(folder / "x", "text")):
        with pytest.raises(UserError, match=r"cannot write .*; free space or choose another folder"):
            write(tmp_path / place)


def test_read_only_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)  # the clean-up fails there, too
    with pytest.raises(UserError, match=r"cannot write .*x: Read-only file system"):
        atomic_write(tmp_path / "x", "text")
    with pytest.raises(UserError, match=r"cannot write .*x: Read-only file system"):
        checkpoint.save(tmp_path / "x", {})


SURROGATES = """
import sys
from pretrain.common import run_folder
from pretrain.common.errors import UserError, run_command_line

def main(_):
    data, output = sys.argv[1:]
    print(f"found {data}")
    run_folder.write_environment(output)
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
    assert "/data/\\udcff" in (tmp_path / "environment.txt").read_text()


def test_a_run_folder_that_is_not_utf8_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="is not UTF-8, and TensorBoard writes to no other; choose another folder"):
        setup_logging(tmp_path / os.fsdecode(b"run\xff"))
    assert os.listdir(tmp_path) == []
    make_folder(tmp_path / "Läufe")
    assert os.listdir(tmp_path) == ["Läufe"]
