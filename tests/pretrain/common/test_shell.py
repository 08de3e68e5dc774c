"""How paths are printed: as the user's shell takes them."""

from pathlib import Path

import pytest

from pretrain.common.shell import enter_folder, shorten_path, shorten_paths


def test_paths_are_shown_for_the_folder_of_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = tmp_path / "shell"
    (tmp_path / "started").mkdir()
    shell.mkdir()
    monkeypatch.chdir(shell)
    assert shorten_path(shell / "runs/a") == shorten_path("runs/a") == "runs/a"
    assert shorten_path(tmp_path / "b") == str(tmp_path / "b")
    assert shorten_path(shell) == str(shell)
    with enter_folder(tmp_path / "started"):
        assert shorten_path("runs/a") == str(tmp_path / "started/runs/a")
        assert shorten_path(shell / "runs/a") == "runs/a"
    assert shorten_path("runs/a") == "runs/a"


def test_a_rank_prints_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output may be read from any folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    assert shorten_path("runs/a") == str(tmp_path / "runs/a")
    assert shorten_paths(f"no file {tmp_path}/a.yaml") == f"no file {tmp_path}/a.yaml"


def test_a_text_names_files_below_the_shells_folder_as_the_user_types_them(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    assert shorten_paths(f"no file {here}/a.yaml, nor 'coco:{here}/b:{here}/c d'") == "no file a.yaml, nor 'coco:b:c d'"
    for text in (here, f"{here}/", f"/other{here}/a", f"file://{here}/a", f"{here}2/a", f"../..{here}/a"):
        assert shorten_paths(text) == text
    (tmp_path / "started").mkdir()
    with enter_folder(tmp_path / "started"):
        assert shorten_paths(f"{here}/started/a, {here}/b") == "started/a, b"
    monkeypatch.chdir("/")
    assert shorten_paths(f"{here}/a") == f"{here}/a"
