"""What an installation provides: the packages and the command `p2t`."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_installed() -> None:
    found = find_packages(str(ROOT), **PROJECT["tool"]["setuptools"]["packages"]["find"])
    here = {path.parent for name in ("pretrain", "transfer", "tools") for path in (ROOT / name).rglob("*.py")}
    assert set(found) == {str(path.relative_to(ROOT)).replace("/", ".") for path in here}


def test_p2t_runs_the_launcher(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module, function = PROJECT["project"]["scripts"]["p2t"].split(":")
    monkeypatch.setattr("sys.argv", ["p2t", "pretrain", "--method", "jcll"])
    with pytest.raises(SystemExit) as ended:
        getattr(importlib.import_module(module), function)()
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and "did you mean 'jcl'?" in message
