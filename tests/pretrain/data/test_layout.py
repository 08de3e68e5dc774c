"""Names of files that say which are masks, in folders and in tars."""

import os
from pathlib import Path

import pytest

from pretrain.data.datasets import load
from pretrain.data.folders import layout
from tests.errors import refused
from tests.pretrain.data.test_folders import TABLE
from tests.pretrain.data.test_tars import pack
from tests.pretrain.images import write_folder


@pytest.mark.parametrize("files", TABLE["mask_files"])
def test_masks_next_to_images_are_not_trained_on(tmp_path: Path, files: list[str]):
    write_folder(tmp_path / "data", files, 4, 4)
    mask = os.path.basename(files[1])
    refused(lambda: load(f"folder:{tmp_path}/data", "train"), f"/data/{files[0]} lies next to {mask}", "masks")
    pack(tmp_path / "x.tar", tmp_path / "data", files)
    refused(lambda: load(f"tar:{tmp_path}/x.tar", "train"), f"x.tar: {files[0]} lies next to {mask}", "names")


@pytest.mark.parametrize("files", TABLE["no_mask_files"])
def test_other_words_in_the_names_of_files_are_no_masks(tmp_path: Path, files: list[str]):
    write_folder(tmp_path / "data", files, 4, 4)
    pack(tmp_path / "x.tar", tmp_path / "data", files)
    assert len(load(f"folder:{tmp_path}/data", "train")) == len(load(f"tar:{tmp_path}/x.tar", "train")) == len(files)


def test_a_few_names_such_as_face_mask_are_no_masks():
    names = ["face.jpg", "face_mask.jpg", *(f"{number}.jpg" for number in range(30))]
    assert layout.find_masks(names) is None
    assert layout.find_masks(names[:20]) is not None
