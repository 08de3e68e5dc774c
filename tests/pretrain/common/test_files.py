"""Folders that cannot be made, and what their errors ask for."""

from pathlib import Path

import pytest

from pretrain.common.files import make_folder
from tests.errors import refused


@pytest.mark.parametrize("folder", ["runs", "runs/new"])
def test_a_link_to_a_folder_that_is_gone_is_named(tmp_path: Path, folder: str) -> None:
    """As on a scratch file system that deletes old files."""
    (tmp_path / "runs").symlink_to(tmp_path / "scratch")
    refused(lambda: make_folder(tmp_path / folder), folder, "File exists; make the folder that the link leads to")


def test_a_file_in_the_way_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    refused(lambda: make_folder(tmp_path / "runs"), "runs", "File exists; move the file away")
