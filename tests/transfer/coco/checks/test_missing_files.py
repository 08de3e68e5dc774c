"""A file that is missing, but exists nearby under another name, is pointed out."""

from pathlib import Path

import pytest

from transfer.coco.checks.missing_files import suggest_file


@pytest.mark.parametrize(
    ("stored", "written"),
    [
        ("sub/1.png", "sub\\1.png"),  # by Windows
        ("1.png", "C:\\photos\\1.png"),
        ("1.png", "/home/alice/photos/1.png"),
        ("1.png", "images/1.png"),
        ("my photo.png", "my%20photo.png"),
        ("1.PNG", "1.png"),
        ("sub/a.jpg", "sub/A.jpeg"),
        ("1.png", "1"),
    ],
)
def test_the_file_that_was_meant_is_named(tmp_path: Path, stored: str, written: str) -> None:
    (tmp_path / stored).parent.mkdir(exist_ok=True)
    (tmp_path / stored).touch()
    assert suggest_file(tmp_path, written) == f" ({stored!r} exists: correct file_name)"


def test_no_other_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "1.png").touch()
    assert suggest_file(tmp_path, "2.png") == "" and suggest_file(tmp_path, "1.png") == ""
    assert suggest_file(tmp_path, "gone/2.png") == ""
