"""`make detectron2` builds a wheel once, compiled only on request."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.errors import refused
from tools import install_detectron2


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The setup.py of each wheel that a fake pip has built; an empty cache and a git that checks out a setup.py."""
    texts: list[str] = []

    def run(*command: str) -> None:
        if "checkout" in command:
            (Path(command[2]) / "setup.py").write_text("ext_modules=get_extensions()")
        if "wheel" in command and "--wheel-dir" in command:
            texts.append((Path(command[-1]) / "setup.py").read_text())
            folder = Path(command[-2])
            folder.mkdir(parents=True)
            kind = "cp311-cp311-linux_x86_64" if "get_extensions" in texts[-1] else "py3-none-any"
            (folder / f"detectron2-0.6-{kind}.whl").touch()

    monkeypatch.setattr(install_detectron2, "_run", run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return texts


def test_the_compiled_part_is_a_choice_and_each_wheel_is_built_once(built: list[str], capsys):
    install_detectron2.main(["--cached-only"])
    assert built == []
    for words in ([], [], ["--compiled"], ["--compiled"], []):
        install_detectron2.main(words)
    assert built == ["ext_modules=[]", "ext_modules=get_extensions()"]
    assert "cp311" in capsys.readouterr().out.splitlines()[-1]  # serves where the compiled part is not asked for, too


def test_a_command_that_fails_is_named():
    refused(lambda: install_detectron2._run("false"), "false", 1, "DETECTRON2=")
