"""Images in tars equal those of the unpacked folder; tars are indexed once, and damaged ones are refused."""

import errno
import glob
import gzip
import io
import os
import subprocess
import tarfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from pretrain.data.datasets import load
from pretrain.data.image_data import ImageData
from pretrain.data.tars import images as tar_images
from pretrain.data.tars import index
from tests.errors import refused
from tests.pretrain.data.test_folders import labels
from tests.pretrain.images import write_folder

NAMES = ["n02/b.png", "n02/a.png", "n01/d.png", "n01/c/x.png", "n01/c.png"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/pretrain-to-transfer/tars"


def pack(tar: Path, folder: Path, names: list[str], **extra: bytes) -> Path:
    """Pack files below ``folder``, and members with the content of ``extra``, in this order."""
    tar.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(tar, "w") as archive:
        for name in names:
            archive.add(folder / name, name)
        for name, content in extra.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return tar


def assert_same(packed: ImageData, unpacked: ImageData) -> None:
    """Assert equal digests, which cover names, labels and classes: a run can be resumed with either data set."""
    assert packed.digest() == unpacked.digest() and len(packed) == len(unpacked)
    for position in range(len(packed)):
        np.testing.assert_array_equal(packed.read(position), unpacked.read(position))


@pytest.mark.parametrize("prefix", ["", "data/train/", "./"])
def test_shards_equal_the_unpacked_folder(tmp_path: Path, prefix: str):
    folder = write_folder(tmp_path / "files", [f"{prefix}{name}" for name in NAMES])
    for number, part in enumerate((NAMES[:2], NAMES[2:])):
        pack(tmp_path / f"shard-{number:03}.tar", folder, [f"{prefix}{name}" for name in part])
    unpacked = load(f"folder:{folder}/{prefix}", "train")
    for pattern in ("shard-*.tar", "shard-{000..001}.tar", "{s*d,shard}-00{0,1}.ta*"):
        packed = load(f"tar:{tmp_path}/{pattern}", "train")
        assert_same(packed, unpacked)
        assert packed.classes == ["n01", "n02"] and packed.image_name(0).endswith("n01/c/x.png")


def test_flat_images_have_no_labels_and_cls_members_give_them(tmp_path: Path):
    images = ["b.png", "a.png", "c.jpg"]
    folder = write_folder(tmp_path, images)
    flat = load(f"tar:{pack(tmp_path / 'flat.tar', folder, images)}", "train")
    assert flat.labels is None
    assert [os.path.basename(flat.image_name(i)) for i in range(3)] == ["a.png", "b.png", "c.jpg"]
    numbers = {"b.cls": b"2\n", "a.cls": b"0", "c.json": b"{}"}
    labeled = load(f"tar:{pack(tmp_path / 'labeled.tar', folder, images, **numbers)}", "val")
    assert labels(labeled) == [0, 1, -1] and labeled.classes == ["0", "2"]


NUMBERS = {  # contents of .cls members, and the labels and classes that they are
    "0 1 3": ([0, 1, 2], ["0", "1", "3"]),
    "1005 1000 1000": ([1, 0, 0], ["1000", "1005"]),
    "10 9 9": ([1, 0, 0], ["9", "10"]),
    "-1 7 -1": ([-1, 0, -1], ["7"]),
    f"0 {2**63 - 1} 0": ([0, 1, 0], ["0", str(2**63 - 1)]),
    "007 \ufeff7 8": ([0, 0, 1], ["7", "8"]),
}


@pytest.mark.parametrize("numbers", NUMBERS)
def test_numbers_of_any_size_are_classes(tmp_path: Path, numbers: str):
    folder = write_folder(tmp_path, ["a.png", "b.png", "c.png"], 4, 4)
    members = {f"{key}.cls": f"{text}\r\n".encode() for key, text in zip("abc", numbers.split(), strict=True)}
    data = load(f"tar:{pack(tmp_path / 'x.tar', folder, ['a.png', 'b.png', 'c.png'], **members)}", "train")
    assert (labels(data), data.classes) == NUMBERS[numbers]


@pytest.mark.parametrize("text", ["cat", "1.0", "-2", "3 4", "3\n# note", "", "0x1", str(2**63), "9" * 40])
def test_other_labels_are_refused(tmp_path: Path, text: str):
    tar = pack(tmp_path / "x.tar", write_folder(tmp_path, ["a.png"], 4, 4), ["a.png"], **{"a.cls": text.encode()})
    refused(lambda: load(f"tar:{tar}", "train"), "a.cls", text.split("\n")[0], "number")


def test_tars_whose_numbers_differ_have_the_classes_of_both(tmp_path: Path):
    folder = write_folder(tmp_path, ["a.png", "b.png"], 4, 4)
    pack(tmp_path / "x-0.tar", folder, ["a.png", "b.png"], **{"a.cls": b"5", "b.cls": b"3"})
    pack(tmp_path / "x-1.tar", folder, ["a.png", "b.png"], **{"a.cls": b"4"})
    data = load(f"tar:{tmp_path}/x-*.tar", "train")
    assert sorted(labels(data)) == [-1, 0, 1, 2] and data.classes == ["3", "4", "5"]


SAMPLES = {  # members, and the words of the error, or the labels
    "2021.03.0.png 2021.03.0.cls 2021.03.1.png 2021.03.1.cls": ["sample 2021", "2021.03.0.cls", "2021.03.1.cls"],
    "2021.03.0.png 2021.03.0.cls 2021.03.1.png": ["sample 2021", "2021.03.0.cls", "2021.03.1.png"],
    "a/1.jpg a/1.cls a/1.CLS": ["sample a/1", "a/1.cls", "a/1.CLS"],
    "1.jpg 1.png": ["sample 1 ", "1.jpg", "1.png"],
    "1.JPG 1.jpg 1.cls": ["sample 1 ", "1.JPG", "1.jpg"],
    "2021.03.0.png 2021.03.1.png": None,
    "v1.0/1.jpg v1.0/1.cls": [0],
    "a/1.jpg a/1.cls b/1.jpg b/1.cls": [0, 1],
    "1.image.jpg 1.target.cls": [0],
    "1.left.jpg 1.right.jpg 1.cls": [0, 0],
    "1.left.jpg 1.right.jpg 1.target.cls": [0, 0],
    "1.JPG 1.CLS 2.jpg 2.json": [0, -1],
    "1.jpg 1.json 1.txt": None,
    "1.jpg .1.cls ._1.jpg": None,
}


@pytest.mark.parametrize("members", SAMPLES)
def test_a_sample_has_one_label(tmp_path: Path, members: str):
    names = members.split()
    pictures = [name for name in names if name.lower().endswith(("jpg", "png")) and "._" not in name]
    others = [name for name in names if name not in pictures]
    tar = tmp_path / "x.tar"
    extra = {name: str(number).encode() for number, name in enumerate(others)}
    pack(tar, write_folder(tmp_path / "files", pictures, 4, 4), pictures, **extra)
    expected = SAMPLES[members]
    if expected and isinstance(expected[0], str):
        for _ in range(2):  # no index of it is written
            refused(lambda: load(f"tar:{tar}", "train"), tar, *expected)
        return
    data = load(f"tar:{tar}", "train")
    assert len(data) == len(pictures) and (None if data.labels is None else labels(data)) == expected


@pytest.mark.parametrize("shards", [["images-0", "masks-0"], ["images-000", "images-001", "masks-000"]])
def test_shards_of_masks_are_not_trained_on(tmp_path: Path, shards: list[str]):
    folder = write_folder(tmp_path, ["1.png", "2.png"], 4, 4)
    for number, shard in enumerate(shards):
        pack(tmp_path / f"{shard}.tar", folder, ["1.png", "2.png"] if "masks" in shard else [f"{number + 1}.png"])
    refused(lambda: load(f"tar:{tmp_path}/*.tar", "train"), "masks/", "not images")
    assert len(load(f"tar:{tmp_path}/images-*.tar", "train")) == len(shards) - 1


def test_tars_of_classes_named_as_splits(tmp_path: Path):
    folder = write_folder(tmp_path, ["train_station/1.png", "test_tube/2.png"], 4, 4)
    for name in ("train_station", "test_tube"):
        pack(
            tmp_path / f"{name}-0.tar",
            folder,
            [path for path in ("train_station/1.png", "test_tube/2.png") if name in path],
        )
    assert load(f"tar:{tmp_path}/*.tar", "train").classes == ["test_tube", "train_station"]


def test_the_index_is_built_once_per_version_of_the_tar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path):
    build = mock.Mock(wraps=index._build_index)
    monkeypatch.setattr(index, "_build_index", build)
    folder = write_folder(tmp_path / "files", NAMES)
    tar = pack(tmp_path / "x.tar", folder, NAMES[:3])
    for _ in range(2):
        assert len(load(f"tar:{tar}", "train")) == 3
    assert build.call_count == 1 and (tmp_path / "x.tar.index.npz").is_file()
    pack(tar, folder, NAMES)
    os.utime(tar, ns=(1, 1))  # an older time, as that of a copy
    assert len(load(f"tar:{tar}", "train")) == 5 and build.call_count == 2
    (tmp_path / "x.tar.index.npz").write_bytes(b"PK damaged")
    assert len(load(f"tar:{tar}", "train")) == 5 and build.call_count == 3
    (tmp_path / "x.tar.index.npz").unlink()
    (tmp_path / "x.tar.index.npz").mkdir()  # cannot be replaced by a file
    for _ in range(2):
        assert len(load(f"tar:{tar}", "train")) == 5
    assert build.call_count == 4 and len(list(cache.glob("x.tar.*.npz"))) == 1


def test_damaged_tars_are_refused(tmp_path: Path):
    folder = write_folder(tmp_path / "files", NAMES)
    content = pack(tmp_path / "x.tar", folder, NAMES).read_bytes()
    third = content.index(b"n01/d.png")

    def load_changed(changed: bytes) -> None:
        (tmp_path / "y.tar").write_bytes(changed)
        load(f"tar:{tmp_path}/y.tar", "train")

    refused(lambda: load_changed(gzip.compress(content)), "y.tar", "is compressed")
    refused(lambda: load_changed(content[: third + 600]), "truncated in n01/d.png")
    refused(lambda: load_changed(content[:third]), "y.tar", "damaged or truncated")
    refused(lambda: load_changed(content[:third] + b"?" * 9 + content[third + 9 :]), "y.tar", "damaged")
    refused(lambda: load_changed(b"no tar at all" * 100), "y.tar", "it contains text, 'no tar at all")
    refused(lambda: load_changed(b"version https://git-lfs.github.com/spec/v1\n"), "y.tar", "run git lfs pull")
    refused(lambda: load_changed(b"PK\3\4" * 300), "y.tar", "not a tar")
    refused(lambda: load_changed(b""), "y.tar")
    refused(lambda: load_changed(content + content), "y.tar", "end mark")
    refused(lambda: load_changed(content + bytes(1 << 21)), "y.tar", "end mark")  # %20, a space in a URL
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    refused(lambda: load(f"tar:{tmp_path}/empty.tar", "train"), "no images")
    refused(lambda: load(f"tar:{tmp_path}/none-*.tar", "train"), "no file matches")
    (tmp_path / "x-001.tar").symlink_to("nowhere")
    refused(lambda: load(f"tar:{tmp_path}/x-{{000..002}}.tar", "train"), "3 of 3", "x-001.tar")
    refused(lambda: load(f"tar:{tmp_path}/x-{{5..1}}.tar", "train"), "no file matches", "5..1")


def test_other_members_of_a_tar_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = write_folder(tmp_path / "My [set]", ["a.png", "b.png", "@eaDir/a.png", "c.heic2"])
    (folder / "a.txt").write_text("a caption")
    tar = pack(folder / "x.tar", folder, ["a.png", "b.png", "@eaDir/a.png", "c.heic2", "a.txt", "a.png"])
    with tarfile.open(tar, "a") as archive:  # a newer version of b
        archive.add(folder / "a.png", "b.png")
    for _ in range(2):  # the second time, there is an index next to it
        data = load(f"tar:{glob.escape(str(folder))}/x.tar*", "train")
        assert [os.path.basename(data.image_name(i)) for i in range(len(data))] == ["a.png", "b.png"]
        np.testing.assert_array_equal(data.read(0), data.read(1))
    assert "1 file is not read: .heic2" in caplog.text
    assert len(load(f"tar:{tar}", "train")) == 2  # a literal path with brackets


def test_sparse_members_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = write_folder(tmp_path / "files", ["a.png"])
    with open(folder / "b.png", "wb") as file:
        file.truncate(1 << 22)
    subprocess.run(["tar", "-S", "-cf", tmp_path / "x.tar", "-C", folder, "a.png", "b.png"], check=True)
    assert len(load(f"tar:{tmp_path}/x.tar", "train")) == 1 and "sparse" in caplog.text


def test_a_tar_that_changes_during_a_run_is_refused(tmp_path: Path):
    tar = pack(tmp_path / "x.tar", write_folder(tmp_path / "files", NAMES), NAMES)
    data = load(f"tar:{tar}", "train")
    os.truncate(tar, 600)
    refused(lambda: data.read(0), tar, "has changed")


def test_a_tar_whose_handle_is_stale_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = load(f"tar:{pack(tmp_path / 't.tar', write_folder(tmp_path, ['a.png']), ['a.png'])}", "train")
    expected = data.read(0)
    fail_once = mock.Mock(wraps=os.pread, side_effect=[OSError(errno.ESTALE, "Stale file handle"), mock.DEFAULT])
    monkeypatch.setattr(tar_images.os, "pread", fail_once)
    np.testing.assert_array_equal(data.read(0), expected)
    assert tar_images._open_tar.cache_info()[:2] == (0, 1)  # no hit, one miss


def test_links_are_named_and_splits_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = write_folder(tmp_path / "files", ["a.png", "train/b.png", "test/c.png"])
    (folder / "link.png").symlink_to("a.png")
    tar = pack(tmp_path / "x.tar", folder, ["a.png", "link.png"])
    assert len(load(f"tar:{tar}", "train")) == 1 and "1 file is not read: links" in caplog.text
    pack(tmp_path / "y.tar", folder, ["train/b.png", "test/c.png"])
    refused(lambda: load(f"tar:{tmp_path}/y.tar", "train"), "test and train", "splits", "its own tars")
    for split in ("train", "val"):
        pack(tmp_path / f"set-{split}-000.tar", folder, ["a.png"])
    refused(lambda: load(f"tar:{tmp_path}/set-*.tar", "train"), "set-train-000 and set-val-000", "splits")
