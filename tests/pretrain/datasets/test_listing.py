"""A listing that is kept is the same as a new one, and is not used once a folder has changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pretrain.common.errors import UserError
from pretrain.datasets import ImageData, folders, listing, load
from tests.pretrain.images import write_folder

NAMES = ["train/ant/1.png", "train/cat/2.png", "train/cat/deep/3.png", "train/dog/4.png", "val/cat/5.png"]


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(listing, "_WORTH", 1)
    write_folder(tmp_path / "images", NAMES)
    (tmp_path / "images/train/empty").mkdir()
    settle(tmp_path / "images")
    return tmp_path / "images"


def settle(folder: Path) -> None:
    """Nothing in it was changed lately."""
    for path in (folder, *folder.rglob("*/")):
        os.utime(path, (10**9, 10**9))


def content(data: ImageData) -> tuple[list[str], list[int], list[str]]:
    assert data.labels is not None
    return [data.image_name(i) for i in range(len(data))], data.labels.tolist(), data.classes


def is_kept(images: Path, split: str = "train", name: str = "") -> bool:
    """Was the last listing kept? Then loading again lists no folder; what it returns is checked against a new one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "_entries", lambda folder: pytest.fail(f"{folder} was listed"))
        try:
            found = load(name or f"folder:{images}", split)
        except pytest.fail.Exception:
            return False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listing, "read", lambda *_: None)
        assert content(found) == content(load(name or f"folder:{images}", split))
    return True


def test_a_folder_is_listed_once(images: Path):
    first = load(f"folder:{images}", "train")
    assert is_kept(images) and not is_kept(images, "val")
    load(f"folder:{images}", "val")
    assert is_kept(images, "val")
    assert content(first)[1:] == ([0, 1, 1, 2], ["ant", "cat", "dog", "empty"])
    assert first.read(0).shape == load(f"folder:{images}", "train").read(0).shape


@pytest.mark.parametrize(
    "change", ["train/cat/new.png", "train/cat/deep/new.png", "train/empty/new.png", "renamed", "gone"]
)
def test_a_changed_folder_is_listed_again(images: Path, change: str):
    load(f"folder:{images}", "train")
    assert is_kept(images)
    if change == "renamed":
        (images / "train/cat/2.png").rename(images / "train/cat/0.png")
    elif change == "gone":
        (images / "train/dog/4.png").unlink()
    else:
        write_folder(images, [change])
    assert not is_kept(images)
    names = content(load(f"folder:{images}", "train"))[0]
    assert names == sorted(str(path) for path in (images / "train").rglob("*.png"))


def test_a_folder_that_has_just_changed_is_not_kept(images: Path):
    """A second change may come before the file system's clock moves on."""
    os.utime(images / "train/cat")
    load(f"folder:{images}", "train")
    assert not is_kept(images)


def test_a_relative_path_is_of_its_working_directory(images: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(images.parent)
    load("folder:images", "train")
    assert is_kept(images, name="folder:images") and not is_kept(images)
    monkeypatch.chdir(images)
    with pytest.raises(UserError, match="no image folder at images"):
        load("folder:images", "train")


@pytest.mark.parametrize("damage", ["empty", "cut", "other", "no folder"])
def test_a_file_that_cannot_be_used_costs_time_only(images: Path, damage: str):
    expected = content(load(f"folder:{images}", "train"))
    (file,) = (images.parent / "cache/pretrain-to-transfer/listings").iterdir()
    whole = file.read_bytes()
    if damage == "no folder":
        file.unlink()
        file.parent.rmdir()
        file.parent.touch()
    else:
        file.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "other": b"not torch's"}[damage])
    assert not is_kept(images)
    assert content(load(f"folder:{images}", "train")) == expected
    assert is_kept(images) == (damage != "no folder")


def test_a_user_without_a_home_keeps_nothing(images: Path, monkeypatch: pytest.MonkeyPatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert len(load(f"folder:{images}", "train")) == 4
    assert not is_kept(images)


def test_imagenets_listing_is_kept_too(images: Path, monkeypatch: pytest.MonkeyPatch):
    images.rename(images.parent / "imagenet")
    (images.parent / "imagenet/val/ant").mkdir()
    settle(images.parent / "imagenet")
    root, listed = images.parent, []
    first = load("imagenet", "train", root)
    monkeypatch.setattr(folders, "_entries", listed.append)
    assert content(load("imagenet", "train", root)) == content(first) and not listed
