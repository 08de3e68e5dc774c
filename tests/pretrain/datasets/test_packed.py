"""Packed images have the same pixels, order and labels as their folder; damage is named; packing resumes."""

from __future__ import annotations

import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest

from pretrain.common.errors import UserError
from pretrain.common.image_io import CorruptImage
from pretrain.datasets import ImageData, MissingSplit, load, refuse_missing, refuse_unreadable
from tests.pretrain import runs
from tests.pretrain.images import picture, write_folder
from tools import make_data
from tools.data import pack

NAMES = ["train/ant/1.png", "train/cat/2.png", "train/cat/deep/3.png", "train/dog/4.png", "val/cat/5.png"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pack, "_IMAGES", 3)  # two files in train
    write_folder(tmp_path / "images", NAMES)
    return tmp_path / "images"


@pytest.fixture
def packed(folder: Path) -> Path:
    make_data.main(["pack", str(folder), str(folder.parent / "packed")])
    return folder.parent / "packed"


def assert_same(a: ImageData, b: ImageData, below: Path, packed: Path) -> None:
    assert len(a) == len(b) and a.classes == b.classes
    np.testing.assert_array_equal(a.labels, b.labels)  # pyright: ignore  # both may be None
    for index in range(len(a)):
        np.testing.assert_array_equal(a.read(index), b.read(index))
        assert Path(a.image_name(index)).relative_to(below) == Path(b.image_name(index)).relative_to(packed)


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_same_images_in_the_same_order(folder: Path, packed: Path, split: str):
    refuse_missing(f"packed:{packed}")
    refuse_unreadable(f"packed:{packed}", split)
    assert_same(load(f"folder:{folder}", split), load(f"packed:{packed}", split), folder, packed)
    assert sorted(path.name for path in (packed / "train").iterdir()) == [
        "images-00000.bin", "images-00001.bin", "index.safetensors",
    ]  # fmt: skip


def test_images_without_splits_are_every_split(tmp_path: Path):
    write_folder(tmp_path / "flat", ["b.png", "a.jpg", "c/x.png"])
    make_data.main(["pack", str(tmp_path / "flat"), str(tmp_path / "packed")])
    for split in ("train", "val"):
        found = load(f"packed:{tmp_path / 'packed'}", split)
        assert_same(load(f"folder:{tmp_path / 'flat'}", split), found, tmp_path / "flat", tmp_path / "packed/all")


def test_a_run_has_the_same_bits(images: Path, tmp_path: Path):
    make_data.main(["pack", str(images), str(tmp_path / "packed")])
    one, two = ("SOLVER.EPOCHS", "1", "DATALOADER.NUM_WORKERS", "2"), ("DATA.TRAIN", f"packed:{tmp_path / 'packed'}")
    runs.run(images, tmp_path / "one", *one)
    runs.run(images, tmp_path / "two", *one, *two)
    runs.assert_same_end(tmp_path / "one", tmp_path / "two")


def test_a_damaged_image_is_named_and_the_others_are_read(packed: Path):
    file = packed / "train/images-00000.bin"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1  # in the second of three
    file.write_bytes(content)
    data = load(f"packed:{packed}", "train")
    with pytest.raises(CorruptImage, match=r"image .*train/cat/2\.png is damaged in .*images-00000\.bin \(bad ch"):
        data.read(1)
    for index in (0, 2, 3):
        data.read(index)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "train/images-00001.bin").unlink(), r"images-00001\.bin is missing: restore it, or pack"),
        (lambda p: (p / "train/images-00001.bin").write_bytes(b"x"), r"has 1 bytes instead of \d+: restore it, or"),
        (lambda p: (p / "train/index.safetensors").write_bytes(b"x" * 99), r"index\.safetensors cannot be read \("),
        (lambda p: (p / "train/index.safetensors").write_bytes(b""), r"index\.safetensors cannot be read \("),
        (lambda p: shutil.copy(p / "val/index.safetensors", p / "train"), r"images-00000\.bin has \d+ bytes instead"),
        (lambda p: shutil.rmtree(p / "train"), r"packed holds no train split; pack a folder that has one"),
        (shutil.rmtree, r"no packed images at .*packed; make them: python tools/make_data\.py pack FOLDER"),
    ],
)  # fmt: skip
def test_what_is_damaged_or_missing_is_named(packed: Path, damage, message: str):
    damage(packed)
    with pytest.raises(UserError, match=message):
        load(f"packed:{packed}", "train")


def test_a_file_cut_off_while_it_is_read_is_one_line(packed: Path):
    data = load(f"packed:{packed}", "train")
    data.read(0)
    (packed / "train/images-00000.bin").write_bytes(b"")
    with pytest.raises(CorruptImage, match="bad checksum"):  # of a mapped file, this would be the process's end
        data.read(0)


def test_a_split_that_was_not_packed(tmp_path: Path):
    write_folder(tmp_path / "images", ["train/a/1.png", "train/b/2.png"])
    make_data.main(["pack", str(tmp_path / "images"), str(tmp_path / "packed")])
    with pytest.raises(MissingSplit, match="holds no val split"):
        load(f"packed:{tmp_path / 'packed'}", "val")


def test_packing_goes_on_where_it_stopped(folder: Path, packed: Path, monkeypatch: pytest.MonkeyPatch):
    words, read, again = ["pack", str(folder), str(folder.parent / "again")], pack.read_file, []

    def fails(path: str) -> bytes:
        if path.endswith("4.png"):
            raise KeyboardInterrupt
        return read(path)

    monkeypatch.setattr(pack, "read_file", fails)
    with pytest.raises(KeyboardInterrupt):
        make_data.main(words)
    assert not (folder.parent / "again").exists()
    (folder.parent / ".again.making/train/.images-00009.bin.0.tmp.bin").touch()  # of a killed run
    monkeypatch.setattr(pack, "read_file", lambda path: again.append(Path(path).name) or read(path))
    make_data.main(words)
    assert again == ["4.png", "5.png"]
    names = [path.relative_to(packed) for path in packed.rglob("*") if path.is_file()]
    for name in names:
        assert (folder.parent / "again" / name).read_bytes() == (packed / name).read_bytes()
    assert len(list((folder.parent / "again").rglob("*"))) == len(names) + 2
    assert not list(folder.parent.glob(".again*"))


def test_other_images_are_packed_from_the_beginning(folder: Path, monkeypatch: pytest.MonkeyPatch):
    words = ["pack", str(folder), str(folder.parent / "again")]
    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        stopped.setattr(pack, "load_packed", _interrupt)
        make_data.main(words)
    (folder / "train/ant/1.png").rename(folder / "train/ant/0.png")
    make_data.main(words)
    assert load(f"packed:{folder.parent / 'again'}", "train").image_name(0).endswith("train/ant/0.png")
    make_data.main(words)  # it is there
    (folder / "train/ant/0.png").rename(folder / "train/ant/1.png")
    with pytest.raises(UserError, match="again holds data made with"):
        make_data.main(words)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_large_images_are_scaled_down(tmp_path: Path):
    write_folder(tmp_path / "images", ["a.png", "b.png"])
    large = cv2.GaussianBlur(picture(3, 300, 200), (0, 0), 4)  # a JPEG keeps no noise
    cv2.imwrite(str(tmp_path / "images/a.png"), large[:, :, ::-1])
    words = ["pack", str(tmp_path / "images"), str(tmp_path / "packed"), "--longest-side", "150"]
    make_data.main(words)
    found = load(f"packed:{tmp_path / 'packed'}", "train")
    expected = cv2.resize(large, (100, 150), interpolation=cv2.INTER_AREA)
    assert found.read(0).shape == (150, 100, 3) and np.abs(found.read(0).astype(int) - expected).mean() < 3
    np.testing.assert_array_equal(found.read(1), load(f"folder:{tmp_path / 'images'}", "train").read(1))
    (tmp_path / "images/b.png").write_bytes(b"no image")
    with pytest.raises(CorruptImage, match=r"cannot decode image .*b\.png"):
        make_data.main([*words[:2], str(tmp_path / "other"), *words[3:]])


@pytest.mark.parametrize("words", [["--quality", "0"], ["--longest-side", "-1"]])
def test_values_out_of_range_are_refused(folder: Path, words: list[str]):
    with pytest.raises(UserError, match=r"--longest-side .* must be at least 0, and --quality .* from 1 to 100"):
        make_data.main(["pack", str(folder), str(folder.parent / "packed"), *words])
