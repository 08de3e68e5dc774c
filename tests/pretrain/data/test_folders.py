"""Images in folders: which folders are splits, which are classes, and what is refused."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from pretrain.data.datasets import ImageData, MissingSplit, check_exists, load
from pretrain.data.folders import images as folders
from pretrain.data.named import archives
from pretrain.data.named.imagenet import list_imagenet100
from tests.errors import refused
from tests.pretrain.images import picture, write_folder

TABLE = yaml.safe_load(Path(__file__).with_name("folders.yaml").read_text())


def names(data: ImageData, below: Path) -> list[str]:
    return [os.path.relpath(data.image_name(i), below) for i in range(len(data))]


def labels(data: ImageData) -> list[int]:
    assert data.labels is not None and data.labels.dtype == np.int64
    return data.labels.tolist()


def test_a_flat_folder_has_no_labels(tmp_path: Path):
    write_folder(tmp_path, ["b.png", "a.JPG", ".hidden.png"])
    (tmp_path / "notes.txt").write_text("no image")
    data = load(f"folder:{tmp_path}", "train")
    assert names(data, tmp_path) == ["a.JPG", "b.png"]
    assert data.labels is None and data.classes == []
    np.testing.assert_array_equal(data.read(1), picture(0))


def test_variables_of_the_environment_are_expanded_where_the_data_are_read(tmp_path, monkeypatch):
    write_folder(tmp_path / "set", ["a.png"])
    (tmp_path / "imagenet/train/n00000001").mkdir(parents=True)
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path))
    assert len(load("folder:$SLURM_TMPDIR/set", "train")) == 1
    check_exists("imagenet", "$SLURM_TMPDIR")


def test_what_pillow_reads_is_an_image(tmp_path: Path):
    formats = {"a.avif": "AVIF", "b.JFIF": "JPEG", "c.jp2": "JPEG2000", "d.mpo": "MPO", "e.pbm": "PPM"}
    for name, form in formats.items():
        Image.fromarray(picture(0)).convert("1" if form == "PPM" else "RGB").save(tmp_path / name, form)
    data = load(f"folder:{tmp_path}", "train")
    assert names(data, tmp_path) == list(formats)
    assert [data.read(i).shape for i in range(len(data))] == [(40, 56, 3)] * 5


def test_heic_is_read_where_pillow_heif_is_installed(tmp_path: Path):
    """It is read in another process, by a replacement of pillow-heif that reads PNG under that suffix."""
    write_folder(tmp_path / "photos", ["IMG_1.HEIC"])
    (tmp_path / "pillow_heif.py").write_text("def register_heif_opener(): print('registered')\n")
    code = "import pathlib, pretrain.data.folders.images as f; print(f.list_images(pathlib.Path('photos')))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(folders.__file__).parents[3])])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == "registered\n['IMG_1.HEIC']\n", done.stderr


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger("pretrain.data.folders.images"), "warning", lines.append)
    return lines


def test_files_that_are_not_read_are_counted(tmp_path: Path, warnings: list[str]):
    write_folder(tmp_path, ["cat/1.png", "dog/deep/2.png"])
    ignored = "cat/3.HEIC dog/deep/4.heic 5.Mov cat/notes.txt labels.json dog/Thumbs.db cat/.x.psd"
    for name in ignored.split():
        (tmp_path / name).touch()
    load(f"folder:{tmp_path}", "train")
    folders.list_images(tmp_path)
    assert len(warnings) == 2
    assert all(f"3 files are not read: .heic 2, .mov (in {tmp_path}); " in warning for warning in warnings)
    warnings.clear()
    write_folder(tmp_path / "cat", ["6.png"])
    (tmp_path / "cat" / "3.HEIC").unlink()
    load(f"folder:{tmp_path / 'cat'}", "train")
    assert not warnings


def test_folders_of_a_nas_and_links(tmp_path: Path, warnings: list[str]):
    """They are neither images nor classes, but a link to a folder is; a warning names what may have been one."""
    write_folder(tmp_path, ["cat/1.png", "@eaDir/1.png/THUMB.jpg", "__MACOSX/cat/2.png", "cat/@eaDir/3.png/THUMB.jpg"])
    write_folder(tmp_path, ["#snapshot/daily/cat/4.png", "System Volume Information/cat/5.png"])
    write_folder(tmp_path, ["cat/4.png/5.png"])
    (tmp_path / "dog").symlink_to(tmp_path / "not mounted")
    (tmp_path / "linked").symlink_to(write_folder(tmp_path / ".store", ["6.png"]))
    data = load(f"folder:{tmp_path}", "train")
    assert data.classes == ["cat", "linked"] and names(data, tmp_path) == ["cat/1.png", "linked/6.png"]
    assert data.read(1).shape == (40, 56, 3)
    assert len(warnings) == 1
    assert f"2 files are not read: broken link {tmp_path}/dog, folders called *.png" in warnings[0]


def test_a_link_that_leads_back_is_named(tmp_path: Path, warnings: list[str]):
    write_folder(tmp_path, ["a/cat/1.png", "a/dog/2.png"])
    (tmp_path / "a/cat/self").symlink_to("self")
    assert len(load(f"folder:{tmp_path}/a", "train")) == 2
    assert f"1 file is not read: broken link {tmp_path}/a/cat/self" in warnings[0]
    (tmp_path / "a/cat/up").symlink_to("..")
    problem = f"{tmp_path}/a/cat/up is a link to {tmp_path}/a, which contains it"
    refused(lambda: load(f"folder:{tmp_path}/a", "train"), problem, "remove the link")
    (tmp_path / "b").symlink_to("c")
    (tmp_path / "c").symlink_to("b")
    problem = f"cannot list {tmp_path}/b: Too many levels of symbolic links"
    refused(lambda: load(f"folder:{tmp_path}/b", "train"), problem, "remove the link that")


LAYOUTS = {  # images: the folders that are listed to load them, relative to the data set
    "1.png 2.png": ["."],
    "a/1.png b/2.png": [".", "a", "b"],
    "train/a/1.png val/a/2.png": [".", "train", "train/a"],
}


@pytest.mark.parametrize("images", LAYOUTS)
def test_each_folder_is_listed_once(tmp_path: Path, images: str, monkeypatch: pytest.MonkeyPatch):
    write_folder(tmp_path, images.split())
    listed: list[str] = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (listed.append(os.path.relpath(path, tmp_path)), scan(path))[1])
    load(f"folder:{tmp_path}", "train")
    assert sorted(listed) == LAYOUTS[images]


def test_one_folder_per_class(tmp_path: Path):
    write_folder(tmp_path, ["cat/2.png", "cat/1.png", "dog/deep/3.png", "ant/4.png"])
    data = load(f"folder:{tmp_path}", "val")  # it has no train and val, so the folder itself is the data set
    assert names(data, tmp_path) == ["ant/4.png", "cat/1.png", "cat/2.png", "dog/deep/3.png"]
    assert data.classes == ["ant", "cat", "dog"]
    assert labels(data) == [0, 1, 1, 2]


def test_train_and_val_folders_are_splits_with_the_same_labels(tmp_path: Path):
    write_folder(tmp_path, ["train/a/1.png", "train/b/2.png", "train/c/3.png", "val/c/4.png", "val/b/5.png"])
    train = load(f"folder:{tmp_path}", "train")
    val = load(f"folder:{tmp_path}", "val")
    assert train.classes == val.classes == ["a", "b", "c"] and labels(val) == [1, 2]
    write_folder(tmp_path, ["val/zebra/6.png"])
    refused(lambda: load(f"folder:{tmp_path}", "val"), "val/zebra")


@pytest.mark.parametrize("place", ["imagenet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC", "."])
def test_imagenet(tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture):
    root = tmp_path / place
    write_folder(root, ["train/n02/b.JPEG", "train/n01/a.JPEG"])
    check_exists("imagenet", tmp_path)
    train = load("imagenet", "train", tmp_path)
    assert "train has 2 of ImageNet's 1,000 classes" in caplog.text
    assert names(train, root) == ["train/n01/a.JPEG", "train/n02/b.JPEG"]
    with pytest.raises(MissingSplit):  # pretraining works without kNN
        load("imagenet", "val", tmp_path)
    write_folder(root, ["val/n01/v.JPEG", "val/n02/w.JPEG"])
    val = load("imagenet", "val", tmp_path)
    assert train.classes == val.classes == ["n01", "n02"] and labels(val) == [0, 1]
    write_folder(root, ["val/loose.JPEG"])
    with pytest.raises(MissingSplit, match=f"directly in {root}/val; expected one folder per class"):
        load("imagenet", "val", tmp_path)


@pytest.mark.parametrize("folder", ["imagenet", "imagenet100"])
def test_imagenet100_takes_its_classes_only(tmp_path: Path, folder: str, caplog: pytest.LogCaptureFixture):
    classes = list_imagenet100()
    assert len(set(classes)) == 100
    write_folder(tmp_path / folder, [f"train/{c}/1.JPEG" for c in classes] + ["train/n00000000/2.JPEG"], 4, 4)
    data = load("imagenet100", "train", tmp_path)
    assert data.classes == classes and labels(data) == list(range(100))
    assert "1,000 classes" not in caplog.text
    (tmp_path / folder / "train" / classes[3] / "1.JPEG").unlink()
    (tmp_path / folder / "train" / classes[3]).rmdir()
    refused(lambda: load("imagenet100", "train", tmp_path), "1 of 100", classes[3])


@pytest.mark.parametrize(("paths", "holder", "to_name"), TABLE["nested"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_splits_below_the_folder_are_not_read_as_one(tmp_path, paths, holder, to_name, split):
    write_folder(tmp_path, paths, 4, 4)
    place = tmp_path / holder
    refused(lambda: load(f"folder:{tmp_path}", split), f"{place} contains ", f"folder:{place / to_name}")
    assert len(load(f"folder:{place / to_name}", "train")) == 1


@pytest.mark.parametrize(("paths", "images"), TABLE["masks"])
def test_masks_are_not_trained_on(tmp_path: Path, paths: list[str], images: str):
    write_folder(tmp_path, paths, 4, 4)
    refused(lambda: load(f"folder:{tmp_path}", "train"), f"{tmp_path / images} lies next to ", "masks, not images")
    assert len(load(f"folder:{tmp_path / images}", "train")) == 1


def test_classes_named_as_masks_or_splits_are_classes(tmp_path: Path):
    classes = ["Dev Team", "Test Team", "image", "labels", "mask", "no_mask", "with_mask"]
    write_folder(tmp_path, [f"{name}/{number}.png" for number, name in enumerate(classes)], 4, 4)  # no mask of an image
    assert load(f"folder:{tmp_path}", "train").classes == classes


def test_classes_named_as_splits_are_read_where_the_error_says(tmp_path: Path):
    write_folder(tmp_path, ["train_a/1.png", "test_a/2.png", "zebra/3.png"], 4, 4)
    text = refused(lambda: load(f"folder:{tmp_path}", "train"), "splits", f"into {tmp_path}/train/")
    assert "zebra" not in text
    (tmp_path / "train").mkdir()
    for name in ("train_a", "test_a", "zebra"):
        (tmp_path / name).rename(tmp_path / "train" / name)
    assert load(f"folder:{tmp_path}", "train").classes == ["test_a", "train_a", "zebra"]


def test_folders_next_to_splits_are_named(tmp_path: Path, warnings: list[str]):
    write_folder(tmp_path, ["train/a/1.png", "test/a/2.png", "unlabeled/3.png"], 4, 4)
    assert [len(load(f"folder:{tmp_path}", split)) for split in ("train", "val")] == [1, 1]
    assert warnings == [f"not read, since the other folders are splits: unlabeled (in {tmp_path})"]


def test_pretraining_needs_no_val_with_the_classes_of_train(tmp_path: Path):
    """As in Tiny-ImageNet's val/images, and where a part of ImageNet's val was unpacked."""
    write_folder(tmp_path / "imagenet", ["train/a/1.png", "train/b/2.png", "val/a/3.png"], 4, 4)
    with pytest.raises(MissingSplit, match="1 of 2"):
        load("imagenet", "val", tmp_path)
    write_folder(tmp_path / "imagenet", ["val/images/4.png"], 4, 4)
    with pytest.raises(MissingSplit, match="val/images is not one of the training classes"):
        load(f"folder:{tmp_path / 'imagenet'}", "val")


@pytest.mark.parametrize("layout", TABLE["splits"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_folders_named_as_splits_are_splits(tmp_path: Path, layout: str, split: str):
    """They are never classes; otherwise, training on train/ and test/ as classes would see the test images."""
    folders = layout.split()
    write_folder(tmp_path, [f"{folder}/{c}/1.png" for folder in folders for c in ("a", "b")], 4, 4)
    expected = TABLE["splits"][layout][split == "val"]
    if isinstance(expected, list):
        refused(lambda: load(f"folder:{tmp_path}", split), *expected)
        return
    data = load(f"folder:{tmp_path}", split)
    if expected:
        assert names(data, tmp_path / expected) == ["a/1.png", "b/1.png"] and data.classes == ["a", "b"]
    else:
        assert data.classes == sorted(folder.split("/")[0] for folder in folders) and len(data) == 2 * len(folders)


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_folder(tmp_path, ["cat/1.png"])
    scandir = os.scandir

    def denied(folder):
        if str(folder).endswith("cat"):
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(folders.os, "scandir", denied)
    refused(lambda: load(f"folder:{tmp_path}", "train"), tmp_path / "cat", "Permission denied")


@pytest.mark.parametrize(("name", "split", "named"), TABLE["missing"])
def test_what_is_missing_is_reported(tmp_path: Path, name: str, split: str, named: str, monkeypatch):
    monkeypatch.delitem(archives.PACKAGES, "fashion_mnist")  # a data set may be installed on this machine
    refused(lambda: load(name.format(tmp_path), split, tmp_path), named.format(tmp_path))
    if split == "train":
        refused(lambda: check_exists(name.format(tmp_path / "none"), tmp_path / "none"))


def _write_images(folder: Path, *names: str) -> str:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return f"folder:{folder}"


def test_an_image_next_to_class_folders_leaves_no_labels_and_is_named(tmp_path, caplog):
    name = _write_images(tmp_path, "preview.jpg", "a/1.jpg", "b/1.jpg")
    assert load(name, "train").labels is None
    assert f"preview.jpg directly in {tmp_path}, next to a, b: no image has a label" in caplog.text
    caplog.clear()
    _write_images(tmp_path, "1.jpg", "2.jpg", "3.jpg")  # photos, some of them in folders
    assert load(name, "train").labels is None and not caplog.text


def test_class_folders_whose_names_look_the_same_are_named(tmp_path, caplog):
    names = ("Cat/1.jpg", "cat/1.jpg", "dog/1.jpg", "K\u00e4se/1.jpg", "Ka\u0308se/1.jpg")
    assert len(load(_write_images(tmp_path, *names), "train").classes) == 5
    assert "'Cat' and 'cat'" in caplog.text and r"'Ka\u0308se' and 'K\xe4se'" in caplog.text
    assert "dog" not in caplog.text
