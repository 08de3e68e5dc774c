"""`make detectron2` builds a wheel once per machine, without the compiled part."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.errors import refused
from tools import install_detectron2


def test_the_wheel_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    built: list[str] = []

    def run(*command: str) -> None:  # git that checks out a setup.py, and pip
        if "checkout" in command:
            (Path(command[2]) / "setup.py").write_text("ext_modules=get_extensions()")
        if "--wheel-dir" in command:
            built.append((Path(command[-1]) / "setup.py").read_text())
            Path(command[-2]).mkdir(parents=True)
            (Path(command[-2]) / "detectron2-0.6-py3-none-any.whl").touch()

    monkeypatch.setattr(install_detectron2, "_run", run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    install_detectron2.main(["--cached-only"])
    assert built == []
    for words in ([], [], ["--cached-only"]):
        install_detectron2.main(words)
    assert built == ["ext_modules=[]"] and capsys.readouterr().out.count("Detectron2 installed from") == 3


def test_a_command_that_fails_is_named():
    refused(lambda: install_detectron2._run("false"), "false", 1, "DETECTRON2=")
