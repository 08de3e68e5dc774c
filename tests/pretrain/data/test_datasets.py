"""Data sets by name: several in one, and addresses, which are refused."""

import logging
import os
from pathlib import Path

import numpy as np
import pytest

from pretrain.config import from_yaml_text, load_config
from pretrain.data import datasets
from pretrain.data.count import count_images
from pretrain.data.datasets import ImageData, MissingSplit, check_exists, has_splits, load
from pretrain.data.names import resolve
from pretrain.data.sources import Array
from pretrain.probe.data import MissingLabels, load_probe_data
from tests.errors import refused
from tests.pretrain.data.test_folders import labels, names
from tests.pretrain.data.test_tars import pack
from tests.pretrain.images import write_folder

FORMS = ["['folder:{0}/a', 'folder:{0}/b']", "(r'folder:{0}/a', 'folder:{0}/b',)", "[folder:{0}/a, folder:{0}/b]"]
FORMS += ["folder:{0}/a,folder:{0}/b", "folder:{0}/a, folder:{0}/b"]


@pytest.fixture
def top(tmp_path: Path) -> Path:
    write_folder(tmp_path / "a", ["cat/1.png", "dog/2.png"], 4, 4)
    write_folder(tmp_path / "b", ["ant/3.png", "dog/4.png"], 4, 4)
    write_folder(tmp_path / "flat", ["5.png"], 4, 4)
    write_folder(tmp_path / "splits", ["train/dog/6.png", "train/cat/7.png", "val/dog/8.png"], 4, 4)
    return tmp_path


def several(top: Path, *folders: str) -> str:
    return str([f"folder:{top / folder}" for folder in folders])


@pytest.mark.parametrize("form", FORMS)
def test_classes_of_the_same_name_are_one_class(top: Path, form: str):
    name = form.format(top)
    check_exists(name)
    data = load(name, "train")
    assert names(data, top) == ["a/cat/1.png", "a/dog/2.png", "b/ant/3.png", "b/dog/4.png"]
    assert data.classes == ["ant", "cat", "dog"] and labels(data) == [1, 2, 0, 2]
    assert data.read(3).shape == (4, 4, 3) and data.name == name


def test_a_list_of_one_is_that_data_set(top: Path):
    assert load(several(top, "a"), "train").digest() == load(f"folder:{top}/a", "train").digest()


def test_unlabeled_folders_in_a_list(top: Path):
    write_folder(top / "flat2", ["9.png"], 4, 4)
    data = load(several(top, "flat", "a"), "train")
    assert labels(data) == [-1, 0, 1] and data.classes == ["cat", "dog"]
    assert load(several(top, "flat", "flat2"), "train").labels is None


def test_tars_and_folders_in_a_list(top: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(top))
    pack(top / "x-{1,2}.tar", top / "b", ["ant/3.png", "dog/4.png"])
    pack(top / "y.tar", top / "a", ["cat/1.png", "dog/2.png"])
    several_tars = f"['tar:{top}/y.tar', 'tar:{top}/x-*.tar'%s]"
    assert len(load(several_tars % "", "train")) == 4
    refused(lambda: check_exists(several_tars % f", 'tar:{top}/*.tar'"), "y.tar", "*.tar", "twice")
    refused(lambda: load(f"{top}/y.tar", "train"), f"write tar:{top}/y.tar")
    refused(lambda: load(f"{top}/my y.tar", "train"), f"write 'tar:{top}/my y.tar'")  # as the shell takes it
    data = load(f"['tar:{top}/x-*.tar', 'folder:{top}/a']", "train")
    assert data.classes == ["ant", "cat", "dog"] and labels(data) == [0, 2, 1, 2]


def test_the_val_split_of_a_list_has_no_training_images(top: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    cfg = load_config(None, ["DATA.TRAIN", several(top, "splits", "b", "flat")])
    data = load_probe_data(cfg)
    assert names(data.train, top) == ["splits/train/cat/7.png", "splits/train/dog/6.png", "b/ant/3.png", "b/dog/4.png"]
    assert names(data.val, top) == ["splits/val/dog/8.png"] and f"the val split is that of folder:{top}" in caplog.text
    assert data.train.classes == data.val.classes == ["ant", "cat", "dog"] and labels(data.val) == [2]
    with pytest.raises(MissingLabels, match="no val split"):
        load_probe_data(load_config(None, ["DATA.TRAIN", several(top, "a", "b")]))
    write_folder(top / "train_only", ["train/cat/1.png"], 4, 4)
    assert len(load(several(top, "splits", "train_only"), "val")) == 1
    write_folder(top / "train_only2", ["train/cat/1.png"], 4, 4)
    with pytest.raises(MissingSplit, match="none of"):
        load(several(top, "train_only", "train_only2"), "val")


def test_data_that_serve_as_every_split_are_not_listed_again(top: Path, monkeypatch: pytest.MonkeyPatch):
    cfg = load_config(None, ["DATA.TRAIN", several(top, "a", "b")])
    train = load(cfg.DATA.TRAIN, "train")
    monkeypatch.setattr(datasets, "load", pytest.fail)
    with pytest.raises(MissingLabels, match="no val split"):
        load_probe_data(cfg, train)
    assert has_splits(several(top, "a", "splits")) and not has_splits(f"folder:{top}/a,folder:{top}/b")


def test_val_may_lack_classes_of_train(top: Path):
    """Their labels are found by name, as of tars with other numbers."""
    cfg = load_config(None, ["DATA.TRAIN", several(top, "a", "b"), "DATA.VAL", f"folder:{top}/splits/val"])
    assert labels(load_probe_data(cfg).val) == [2]
    write_folder(top / "splits/val", ["emu/1.png"], 4, 4)
    refused(lambda: load_probe_data(cfg), "no class emu", "the same classes")


def test_a_path_may_end_in_a_blank(top: Path):
    (top / "a").rename(top / "a ")
    for name, count in (
        (f" folder: {top}/a ", 2),
        (several(top, "a ", "b"), 4),
        (f"folder:{top}/b , folder:{top}/a ", 4),
    ):
        check_exists(name)
        assert len(load(name, "train")) == count_images(name, top, enough=1000) == count
    refused(lambda: load(f"folder:{top}/b ", "train"), f"no image folder at '{top}/b '")
    inside = ["DATA.TRAIN", f"folder:{top}/a ", "OUTPUT_DIR", f"{top}/a /run"]
    refused(lambda: load_config(None, inside), "OUTPUT_DIR", "is inside")
    assert resolve("folder:a ", top) == f"folder:{top}/a "


def test_what_is_no_list_of_data_sets(top: Path):
    refused(lambda: load(several(top, "a", "a"), "train"), "a twice")
    refused(lambda: load(several(top, "a", "a/cat"), "train"), f"folder:{top}/a/cat is in folder:{top}/a")
    refused(lambda: check_exists(several(top, "a", ".")), f"folder:{top}/a is in folder:{top}")
    refused(lambda: load(several(top, "a", "none"), "train"), top / "none")
    refused(lambda: load(f"folder:{top}/a,folder:{top}/a", "train"), "a twice")
    for name in ("[]", "[1, 2]", "['']"):
        refused(lambda name=name: load(name, "train"), name, "['folder:/a', 'folder:/b']")


@pytest.mark.parametrize("pattern", ["{}/[ab]", "{}/{{a,b}}", "{}/?"])
def test_patterns_of_folders_name_the_list(top: Path, pattern: str):
    name = f"folder:{pattern.format(top)}"
    text = refused(lambda: check_exists(name), "pattern", several(top, "a", "b"))
    assert len(load(text.rpartition(": ")[2].strip('"'), "train")) == 4
    os.rename(top / "a", name.removeprefix("folder:"))
    assert len(load(name, "train")) == 2  # a folder of this name


@pytest.mark.parametrize(
    "name",
    [
        *(
            "s3://bucket/x",
            "folder:gs://bucket",
            "tar:https://host/{000..100}.tar",
            "hf://datasets/x",
            "pipe:cat x.tar",
        ),
        *("tar:pipe:curl host/x.tar", "['s3://bucket', 'cifar10']", "az://x", "http://host/x.zip"),
    ],
)
def test_addresses_are_refused(name: str):
    refused(lambda: check_exists(name), "is an address", "folder:/path or tar:/path/*.tar")
    refused(lambda: load(name, "val"), "is an address")


def test_an_address_of_a_file_names_its_path():
    refused(lambda: load("file:///data/x", "train"), "folder:/data/x")
    refused(lambda: load("cifar10", "train", "s3://bucket"), "'s3://bucket'", "address")


def test_a_list_in_a_config(top: Path):
    """It is text in the config of a run; in YAML and Python it may be a list."""
    name = several(top, "a", "b")
    file = top / "c.yaml"
    file.write_text(f"DATA:\n  TRAIN:\n  - folder:{top}/a\n  - folder:{top}/b\n")
    for cfg in (
        load_config(file),
        load_config(None, ["DATA.TRAIN", name]),
        load_config(None, ["DATA.TRAIN", (f"folder:{top}/a", f"folder:{top}/b")]),
    ):
        assert cfg.DATA.TRAIN == name == from_yaml_text(cfg.dump()).DATA.TRAIN
        inside = ["DATA.TRAIN", name, "OUTPUT_DIR", f"{top}/b/run"]
        refused(lambda: load_config(None, inside), f"{top}/b/run", f"folder:{top}/b")  # noqa: B023
    refused(lambda: load_config(None, ["DATA.TRAIN", [1]]), "[1]", "list")


def test_a_repeated_class_name_is_only_refused_where_names_matter():
    data = ImageData(Array({}), np.zeros(0, np.int64), ["crane", "maillot", "crane"])
    assert data.relabel(["crane", "maillot", "crane", "x"]).classes[-1] == "x"
    refused(lambda: data.relabel(["crane", "maillot"]), "crane")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("cifar10", "cifar10"),
        ("", ""),
        ("folder:/a", "folder:/a"),
        ("folder:a", "folder:/run/a"),
        ("folder:../a b", "folder:/run/../a b"),
        ("tar:a/{0..9}.tar", "tar:/run/a/{0..9}.tar"),
        ("folder:$TMPDIR/a", "folder:$TMPDIR/a"),
        ("folder:~/a", "folder:~/a"),
        ("folder:a, tar:/b.tar", "['folder:/run/a', 'tar:/b.tar']"),
        ("['stl10', 'folder:a']", "['stl10', 'folder:/run/a']"),
    ],
)
def test_relative_names_are_resolved(value: str, expected: str) -> None:
    assert resolve(value, "/run") == expected


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("photos", "folder:photos"),
        ("shards", "tar:shards/*.tar"),
        ("folder:shards", "tar:shards/*.tar"),
        ("tar:shards", "tar:shards/*.tar"),
        ("folder:shards/0.tar", "write tar:"),
        ("tar:photos", "write folder:photos"),
        ("list.txt", "lists, tables, arrays and databases"),
        ("folder:list.txt", "my_data.py"),
        ("photos.zip", "unpack it"),
        ("folder:photos.tar.gz", "unpack it"),
        ("folder:photos;folder:shards", "as a list"),
        ("folder:$NOT_SET_HERE/photos", "the variable $NOT_SET_HERE is not set"),
    ],
)
def test_what_is_at_a_path_is_told_with_its_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    write_folder(tmp_path / "photos", ["a.png"], 4, 4)
    (tmp_path / "shards").mkdir()
    for file in ("shards/0.tar", "list.txt", "photos.zip", "photos.tar.gz"):
        (tmp_path / file).touch()
    refused(lambda: load(name, "train"), says)
