"""What `make detectron2` starts, and that it never waits for it without an end."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from pretrain.common.errors import UserError
from pretrain.common.lock import start_of
from tools import install_detectron2


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Takes the place of git and of Python: waits for a process of its own, whose id stands in the file returned."""
    program, pid = tmp_path / "bin" / "git", tmp_path / "pid"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nsleep 300 &\necho $! > {pid}\nwait\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", str(program))
    for name in ("_GIT_MINUTES", "_PIP_MINUTES"):
        monkeypatch.setattr(install_detectron2, name, 0.01, raising=False)
    return pid


@pytest.mark.parametrize("command", ["fetch", "checkout", "pip"])
def test_a_command_that_does_not_end_is_stopped_with_all_it_started(silent: Path, tmp_path: Path, command: str):
    (tmp_path / "checkout/detectron2").mkdir(parents=True)
    (tmp_path / "checkout/setup.py").touch()
    act = {
        "fetch": lambda: install_detectron2._fetch(tmp_path / "tree"),
        "checkout": lambda: install_detectron2._copy_checkout(tmp_path / "checkout", tmp_path / "tree"),
        "pip": lambda: install_detectron2.install(tmp_path / "a.whl"),
    }[command]
    began = time.monotonic()
    with pytest.raises(
        UserError, match=r"git .* did not end within 0\.01 minutes and was stopped; check the network"
    ) as e:
        act()
    assert time.monotonic() - began < 30 and "\n" not in str(e.value)
    assert start_of(int(silent.read_text())) == ""
