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
import torchvision.datasets.imagenet as torchvision_imagenet
from scipy.io import savemat

from pretrain.common import images
from pretrain.data.datasets import load
from pretrain.data.image_data import ImageData, MissingSplit
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
    assert labels(labeled) == [0, 2, -1] and labeled.classes == ["0", "1", "2"]
    pack(tmp_path / "words.tar", folder, ["a.png"], **{"a.cls": b"cat"})
    refused(lambda: load(f"tar:{tmp_path}/words.tar", "train"), "a.cls", "cat", "number of a class")


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
    refused(lambda: load_changed(b"no tar at all" * 100), "y.tar", "is not a tar")
    refused(lambda: load_changed(b""), "y.tar")
    refused(lambda: load_changed(content + content), "y.tar", "data after its end mark")
    refused(lambda: load_changed(content + bytes(1 << 21)), "y.tar", "data after its end mark")  # %20, a space in a URL
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    refused(lambda: load(f"tar:{tmp_path}/empty.tar", "train"), "no images")
    refused(lambda: load(f"tar:{tmp_path}/none-*.tar", "train"), "no file matches")
    (tmp_path / "x-001.tar").symlink_to("nowhere")
    refused(lambda: load(f"tar:{tmp_path}/x-{{000..002}}.tar", "train"), "3 of 3 tars are missing", "x-001.tar")
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
    monkeypatch.setattr(images, "_RETRY_AFTER_S", 0)
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


def write_imagenet(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the three tars of ImageNet with two classes, and the same files unpacked in ``root``/unpacked."""
    images = ["n00000001/n00000001_2.JPEG", "n00000001/n00000001_10.JPEG", "n00000002/n00000002_1.JPEG"]
    folder = write_folder(root / "unpacked/imagenet/train", images)
    inner = [
        pack(root / f"{name}.tar", folder / name, sorted(os.listdir(folder / name)))
        for name in ("n00000002", "n00000001")
    ]
    pack(root / "packed/imagenet/ILSVRC2012_img_train.tar", root, [path.name for path in inner])
    val = write_folder(root / "flat", [f"ILSVRC2012_val_0000000{number}.JPEG" for number in (1, 2, 3)])
    pack(root / "packed/imagenet/ILSVRC2012_img_val.tar", val, sorted(os.listdir(val)))
    for number, name in enumerate(("n00000002", "n00000001", "n00000002"), 1):
        target = root / "unpacked/imagenet/val" / name / f"ILSVRC2012_val_0000000{number}.JPEG"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((val / target.name).read_bytes())
    devkit = root / "ILSVRC2012_devkit_t12/data"
    devkit.mkdir(parents=True)
    kinds = [("ILSVRC2012_ID", "i4"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("num_children", "i4")]
    synsets = np.array(
        [(1, "n00000002", "b", "", 0), (2, "n00000001", "a", "", 0), (3, "n00000000", "all", "", 2)], kinds
    )
    savemat(devkit / "meta.mat", {"synsets": synsets})
    (devkit / "ILSVRC2012_validation_ground_truth.txt").write_text("1\n2\n1\n")
    with tarfile.open(root / "packed/imagenet/ILSVRC2012_devkit_t12.tar.gz", "w:gz") as archive:
        archive.add(devkit.parent, devkit.parent.name)
    monkeypatch.setitem(torchvision_imagenet.ARCHIVE_META, "devkit", ("ILSVRC2012_devkit_t12.tar.gz", None))
    return root


def test_imagenets_tars_equal_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = write_imagenet(tmp_path, monkeypatch)
    for split in ("train", "val"):
        assert_same(load("imagenet", split, root / "packed"), load("imagenet", split, root / "unpacked"))
    refused(lambda: load("imagenet100", "train", root / "packed"), "lacks the classes n01558993")
    devkit = root / "packed/imagenet/ILSVRC2012_devkit_t12.tar.gz"
    devkit.write_bytes(b"damaged")
    refused(lambda: load("imagenet", "val", root / "packed"), devkit, "damaged")
    devkit.unlink()
    with pytest.raises(MissingSplit, match=r"devkit_t12.*is missing.*image-net"):  # pretraining works without kNN
        load("imagenet", "val", root / "packed")
    (root / "packed/imagenet/ILSVRC2012_img_val.tar").unlink()
    with pytest.raises(MissingSplit, match=r"no ILSVRC2012_img_val\.tar"):
        load("imagenet", "val", root / "packed")
    pack(root / "packed/imagenet/ILSVRC2012_img_train.tar", root / "flat", ["ILSVRC2012_val_00000001.JPEG"])
    refused(lambda: load("imagenet", "train", root / "packed"), "img_train.tar", "is not ImageNet's train tar")
