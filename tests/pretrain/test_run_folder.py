"""A folder that cannot be written to is told in one line, wherever it is met first."""

from __future__ import annotations

import errno
import os
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
