"""`make detectron2` builds a wheel once, compiled only on request, and never waits without an end."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest

from pretrain.common.errors import UserError
from pretrain.common.lock import start_of
from tools import install_detectron2

SETUP = "setup(\n    ext_modules=get_extensions(),\n)\n"


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
    deadline = time.monotonic() + 30
    while start_of(int(silent.read_text())):  # until the system has removed the killed process
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The setup.py of each wheel that a fake pip has built; an empty cache and a checkout in ``tmp_path``."""
    texts: list[str] = []

    def pip(command: str, *words: str) -> None:
        if command == "wheel":
            tree, out = Path(words[-1]), Path(words[words.index("--wheel-dir") + 1])
            texts.append((tree / "setup.py").read_text())
            out.mkdir()
            kind = "cp311-cp311-linux_x86_64" if "get_extensions" in texts[-1] else "py3-none-any"
            (out / f"detectron2-0.6-{kind}.whl").write_text("wheel")

    monkeypatch.setattr(install_detectron2, "_pip", pip)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "checkout" / "detectron2").mkdir(parents=True)
    (tmp_path / "checkout" / "setup.py").write_text(SETUP)
    return texts


def test_the_compiled_part_is_a_choice(tmp_path: Path, built: list[str]):
    words = ["--source", str(tmp_path / "checkout")]
    for _ in range(2):  # the second time from the cache
        install_detectron2.main(words)
        assert built == [SETUP.replace("get_extensions()", "[]")]
    assert install_detectron2.cached_wheel(compiled=True) is None
    for more in (["--compiled"], ["--compiled"], []):
        install_detectron2.main([*words, *more])
        assert built[1:] == [SETUP]
    pure, compiled = sorted(
        (tmp_path / "cache" / "pretrain-to-transfer").glob("*/*.whl"), key=lambda p: "cp311-" in p.name
    )
    assert pure.parent != compiled.parent and (tmp_path / "checkout" / "setup.py").read_text() == SETUP
    assert install_detectron2.cached_wheel(compiled=False) == compiled
    shutil.rmtree(compiled.parent)
    assert install_detectron2.cached_wheel(compiled=False) == pure


def test_cached_only_builds_nothing(built: list[str], capsys: pytest.CaptureFixture[str]):
    assert install_detectron2.main(["--cached-only"]) == 0
    assert built == [] and capsys.readouterr().out == ""


def test_what_is_no_checkout_is_refused(tmp_path: Path, built: list[str]):
    with pytest.raises(UserError, match="is not a checkout of Detectron2"):
        install_detectron2.main(["--source", str(tmp_path)])
