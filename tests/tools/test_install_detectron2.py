"""The wheel of Detectron2 is built once, without its compiled part unless that is asked for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pretrain.common.errors import UserError
from tools import install_detectron2

SETUP = "setup(\n    ext_modules=get_extensions(),\n)\n"


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
