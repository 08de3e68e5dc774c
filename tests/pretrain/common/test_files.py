"""Folders that cannot be made, files that are of another format, and what their errors ask for."""

import gzip
from pathlib import Path

import pytest

from pretrain.common.files import check_output_path, make_folder, read_json
from tests.errors import refused


@pytest.mark.parametrize("folder", ["runs", "runs/new"])
def test_a_link_to_a_folder_that_is_gone_is_named(tmp_path: Path, folder: str) -> None:
    """As on a scratch file system that deletes old files."""
    (tmp_path / "runs").symlink_to(tmp_path / "scratch")
    refused(lambda: make_folder(tmp_path / folder), folder, "File exists; make the folder that the link leads to")


def test_a_file_in_the_way_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    refused(lambda: make_folder(tmp_path / "runs"), "runs", "File exists; move the file away")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress(b"{}", mtime=0), "it is compressed; decompress it first"),
        (b"version https://git-lfs.github.com/spec/v1\n", "run git lfs pull"),
        (b"<html>", "it contains text, '<html>'; download the file itself"),
        (b"", "it is empty; use another copy"),
        (b'{"a": ', "restore it, or save it as UTF-8"),
        (b'{"a": "\xe9"}', "restore it, or save it as UTF-8"),
    ],
)
def test_what_is_no_json_is_explained(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    refused(lambda: read_json(tmp_path / "a.json"), "a.json is not JSON", says)


def test_a_home_that_no_shell_has_replaced_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would become a folder with the name ~."""
    monkeypatch.setenv("HOME", "/home/ada")
    for path in ("~", "~/runs/a"):
        refused(lambda path=path: check_output_path(path, "--output"), f"--output is '{path}'", "write /home/ada")
    check_output_path("runs/~a", "--output")
