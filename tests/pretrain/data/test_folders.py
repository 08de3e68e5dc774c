"""Images in folders: which folders are splits, which are classes, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pretrain.data import folders
from pretrain.data.datasets import ImageData, load
from tests.errors import refused
from tests.pretrain.images import picture, write_folder


def names(data: ImageData, below: Path) -> list[str]:
    return [os.path.relpath(data.image_name(i), below) for i in range(len(data))]


def test_a_flat_folder_has_no_labels(tmp_path: Path):
    write_folder(tmp_path, ["b.png", "a.JPG", ".hidden.png"])
    (tmp_path / "notes.txt").write_text("no image")
    data = load(f"folder:{tmp_path}", "train")
    assert names(data, tmp_path) == ["a.JPG", "b.png"]
    assert data.labels is None and data.classes == []
    np.testing.assert_array_equal(data.read(1), picture(0))


def test_one_folder_per_class(tmp_path: Path):
    write_folder(tmp_path, ["cat/2.png", "cat/1.png", "dog/deep/3.png", "ant/4.png"])
    data = load(f"folder:{tmp_path}", "val")  # no train and val in it: it is taken as it is
    assert names(data, tmp_path) == ["ant/4.png", "cat/1.png", "cat/2.png", "dog/deep/3.png"]
    assert data.classes == ["ant", "cat", "dog"]
    assert data.labels is not None and data.labels.tolist() == [0, 1, 1, 2] and data.labels.dtype == np.int64


def test_train_and_val_folders_are_splits_with_the_same_labels(tmp_path: Path):
    write_folder(tmp_path, ["train/a/1.png", "train/b/2.png", "train/c/3.png", "val/c/4.png", "val/b/5.png"])
    train, val = load(f"folder:{tmp_path}", "train"), load(f"folder:{tmp_path}", "val")
    assert train.classes == val.classes == ["a", "b", "c"]
    assert val.labels is not None and val.labels.tolist() == [1, 2]
    write_folder(tmp_path, ["val/zebra/6.png"])
    refused(lambda: load(f"folder:{tmp_path}", "val"), "val/zebra")


def test_imagenet(tmp_path: Path):
    root = tmp_path / "imagenet"
    write_folder(root, ["train/n02/b.JPEG", "train/n01/a.JPEG", "val/n01/v.JPEG", "val/n02/w.JPEG"])
    train, val = load("imagenet", "train", tmp_path), load("imagenet", "val", tmp_path)
    assert names(train, root) == ["train/n01/a.JPEG", "train/n02/b.JPEG"]
    assert train.classes == val.classes == ["n01", "n02"]
    assert val.labels is not None and val.labels.tolist() == [0, 1]
    write_folder(root, ["val/loose.JPEG"])
    refused(lambda: load("imagenet", "val", tmp_path), root / "val", "one folder per class")


@pytest.mark.parametrize("folder", ["imagenet", "imagenet100"])
def test_imagenet100_takes_its_classes_only(tmp_path: Path, folder: str):
    classes = sorted((Path(folders.__file__).parent / "imagenet100.txt").read_text().split())
    assert len(set(classes)) == 100
    write_folder(tmp_path / folder, [f"train/{c}/1.JPEG" for c in classes] + ["train/n00000000/2.JPEG"], 4, 4)
    data = load("imagenet100", "train", tmp_path)
    assert data.classes == classes and data.labels is not None and data.labels.tolist() == list(range(100))
    (tmp_path / folder / "train" / classes[3] / "1.JPEG").unlink()
    (tmp_path / folder / "train" / classes[3]).rmdir()
    refused(lambda: load("imagenet100", "train", tmp_path), "1 of 100", classes[3])


def test_links_are_followed(tmp_path: Path):
    write_folder(tmp_path / "store", ["1.png"])
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "cat").symlink_to(tmp_path / "store")
    data = load(f"folder:{tmp_path / 'set'}", "train")
    assert data.classes == ["cat"] and len(data) == 1
    assert Image.fromarray(data.read(0)).size == (56, 40)


LAYOUTS = {  # folders of the root -> the folder of each split, or what the error names
    "train val": ("train", "val"), "train test": ("train", "test"), "train val test": ("train", "val"),
    "train test valid": ("train", "valid"), "Training validation extra": ("Training", "validation"),
    "train": ("train", ["val"]), "val test": (["train"], "val"), "test": (["train"], "test"),
    "train training val": (["train/", "training/"], "val"), "train val valid": ("train", ["val/", "valid/"]),
    "extra train": (["train/", "extra/"],) * 2, "cat dog test": (["test/", "cat/"],) * 2,
    "cat dog": ("", ""), "trainer tests": ("", ""),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("split", ["train", "val"])
def test_folders_named_as_splits_are_splits(tmp_path: Path, layout: str, split: str):
    """Never classes: with train/ and test/ taken for classes, training would see the test images."""
    folders = layout.split()
    write_folder(tmp_path, [f"{folder}/{c}/{folder}_{c}.png" for folder in folders for c in ("a", "b")], 4, 4)
    expected = LAYOUTS[layout][split == "val"]
    if isinstance(expected, list):
        refused(lambda: load(f"folder:{tmp_path}", split), *expected)
        return
    data = load(f"folder:{tmp_path}", split)
    if expected:
        assert names(data, tmp_path / expected) == [f"{c}/{expected}_{c}.png" for c in ("a", "b")]
        assert data.classes == ["a", "b"]
    else:
        assert data.classes == sorted(folders) and len(data) == 4


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_folder(tmp_path, ["cat/1.png"])
    scandir = os.scandir

    def denied(folder):
        if str(folder).endswith("cat"):
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(folders.os, "scandir", denied)
    refused(lambda: load(f"folder:{tmp_path}", "train"), tmp_path / "cat", "Permission denied")


@pytest.mark.parametrize(
    ("name", "split", "named"),
    [
        ("folder:{}/none", "train", "/none"), ("folder:{}", "train", ".jpg"),
        ("imagenet", "train", "/imagenet/train/n########"), ("imagenet100", "val", "/imagenet/val"),
        ("cifar10", "train", "/cifar-10-batches-py"), ("cifar100", "val", "/cifar-100-python"),
        ("fashion_mnist", "val", "/FashionMNIST/raw"), ("stl10", "train", "/stl10_binary"),
        ("tiny_imagenet", "val", "/tiny-imagenet-200"), (".", "train", "folder:."), ("cifra10", "train", "'cifar10'"),
        ("cifar10", "test", "'test'"),
    ],
)  # fmt: skip
def test_what_is_missing_is_reported(tmp_path: Path, name: str, split: str, named: str):
    refused(lambda: load(name.format(tmp_path), split, tmp_path), named)
