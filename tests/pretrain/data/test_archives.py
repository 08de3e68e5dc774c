"""Named data sets: archives in their real layout on disk, and their downloads."""

import gzip
import hashlib
import os
import pickle
import shutil
import struct
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torchvision.datasets as tv

from pretrain.data.datasets import check_exists, is_there, load
from pretrain.data.named import archives
from tests.errors import refused
from tests.pretrain.data.test_folders import labels
from tests.pretrain.images import picture, write_folder

RNG = np.random.default_rng(0)


def write_fashion_mnist(raw: Path, suffix: str = "") -> np.ndarray:
    """Write IDX files of four images, compressed for the suffix .gz; return their pixels."""
    raw.mkdir(parents=True)
    pixels = RNG.integers(0, 256, (4, 28, 28), dtype=np.uint8)
    for part in ("train", "t10k"):  # IDX: magic number, sizes, bytes
        images = struct.pack(">iiii", 2051, 4, 28, 28) + pixels.tobytes()
        classes = struct.pack(">ii", 2049, 4) + bytes([3, 1, 0, 9])
        for name, content in (("images-idx3", images), ("labels-idx1", classes)):
            content = gzip.compress(content) if suffix else content
            (raw / f"{part}-{name}-ubyte{suffix}").write_bytes(content)
    return pixels


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_fashion_mnist(tmp_path: Path, suffix: str):
    pixels = write_fashion_mnist(tmp_path / "FashionMNIST/raw", suffix)
    data = load("fashion_mnist", "val", tmp_path)
    assert labels(data) == [3, 1, 0, 9] and data.classes[9] == "Ankle boot"
    np.testing.assert_array_equal(data.read(1), np.dstack([pixels[1]] * 3))


def test_a_data_set_is_read_where_a_package_installed_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "share/fashion-mnist"
    monkeypatch.setitem(archives.PACKAGES, "fashion_mnist", ("dataset-fashion-mnist", package))
    root = tmp_path / "root"
    refused(lambda: check_exists("fashion_mnist", root), "FashionMNIST/raw", "dataset-fashion-mnist")
    packaged = write_fashion_mnist(package, ".gz")
    check_exists("fashion_mnist", root)
    assert is_there("fashion_mnist", root)
    data = load("fashion_mnist", "train", root, download=True)  # which downloads nothing
    np.testing.assert_array_equal(data.read(3), np.dstack([packaged[3]] * 3))
    assert not root.exists()
    in_root = write_fashion_mnist(root / "FashionMNIST/raw")  # DATA.ROOT goes first
    np.testing.assert_array_equal(load("fashion_mnist", "train", root).read(0), np.dstack([in_root[0]] * 3))
    as_images = (root / "FashionMNIST/raw/train-labels-idx1-ubyte").read_bytes()
    for content in (b"\0\0\x08", b"<html>", gzip.compress(b""), as_images):
        (root / "FashionMNIST/raw/train-images-idx3-ubyte").write_bytes(content)
        refused(lambda: load("fashion_mnist", "train", root), "FashionMNIST", "incomplete or damaged", "DATA.DOWNLOAD")
    for path in package.iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    shutil.rmtree(root)
    text = refused(
        lambda: load("fashion_mnist", "train", root), package, "damaged", "reinstall", "dataset-fashion-mnist"
    )
    assert "DATA.DOWNLOAD" not in text  # which fetches nothing where the package's folder exists


@pytest.mark.parametrize(
    ("content", "reason"), [([3, 1, 0], "its train split has 4 images, but 3 labels"), ([3, 1, 0, 10], "from 0 to 10")]
)
def test_labels_that_do_not_fit_are_a_damaged_data_set(tmp_path: Path, content: list[int], reason: str):
    """The remedy is not that of a user's loader, which can number its labels again."""
    write_fashion_mnist(tmp_path / "FashionMNIST/raw")
    file = tmp_path / "FashionMNIST/raw/train-labels-idx1-ubyte"
    file.write_bytes(struct.pack(">ii", 2049, len(content)) + bytes(content))
    text = refused(lambda: load("fashion_mnist", "train", tmp_path), reason, "incomplete or damaged")
    assert "one label per image" not in text and "name every class" not in text


def test_stl10(tmp_path: Path):
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    pixels = RNG.integers(0, 256, (5, 3, 96, 96), dtype=np.uint8)  # planes, each column by column
    for part, images in (("train", pixels[:2]), ("unlabeled", pixels[2:4]), ("test", pixels[4:])):
        (folder / f"{part}_X.bin").write_bytes(images.tobytes())
    (folder / "train_y.bin").write_bytes(bytes([10, 1]))
    (folder / "test_y.bin").write_bytes(bytes([2]))
    classes = [f"class{i}" for i in range(10)]
    (folder / "class_names.txt").write_text("\n".join(classes))
    train = load("stl10", "train", tmp_path)
    val = load("stl10", "val", tmp_path)
    assert (labels(train), labels(val), train.classes) == ([9, 0, -1, -1], [1], classes)
    assert train.image_name(3) == "stl10/unlabeled[1]"
    for number in (1, 3):
        np.testing.assert_array_equal(train.read(number), pixels[number].transpose(2, 1, 0))
    (folder / "test_y.bin").write_bytes(bytes([2, 3]))
    refused(lambda: load("stl10", "val", tmp_path), folder)


def write_tiny(root: Path) -> None:
    write_folder(root, ["train/n02/images/n02_0.JPEG", "train/n01/images/n01_0.JPEG", "train/n01/images/n01_1.JPEG"])
    write_folder(root, ["val/images/val_1.JPEG", "val/images/val_0.JPEG"])
    (root / "train/n01/n01_boxes.txt").write_text("n01_0.JPEG\t0\t0\t62\t62\n")
    (root / "wnids.txt").write_text("n02\nn01\n")
    (root / "val/val_annotations.txt").write_text("val_1.JPEG\tn01\t0\t0\t9\t9\nval_0.JPEG\tn02\t0\t0\t9\t9\n")


def test_tiny_imagenet(tmp_path: Path):
    root = tmp_path / "tiny-imagenet-200"
    write_tiny(root)
    train = load("tiny_imagenet", "train", tmp_path)
    val = load("tiny_imagenet", "val", tmp_path)
    assert train.image_name(0) == f"{root}/train/n01/images/n01_0.JPEG"
    assert train.classes == val.classes == ["n01", "n02"]
    assert [val.image_name(i) for i in range(2)] == [f"{root}/val/images/val_{i}.JPEG" for i in range(2)]
    assert (labels(train), labels(val)) == ([0, 0, 1], [1, 0])
    np.testing.assert_array_equal(val.read(0), picture(1))


@pytest.fixture(autouse=True)
def _files_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torchvision's download accept file:// addresses; their responses have no length."""
    monkeypatch.setattr(tv.utils, "_urlretrieve", lambda url, to: shutil.copy(url.removeprefix("file://"), to))


def packed(folder: Path, kind: str) -> tuple[str, str]:
    """Pack ``folder`` into an archive next to it, and remove the folder; return the archive's address and MD5."""
    path = Path(shutil.make_archive(str(folder), kind, folder.parent, folder.name))
    shutil.rmtree(folder)
    return path.as_uri(), hashlib.md5(path.read_bytes()).hexdigest()


def test_a_download_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "tiny-imagenet-200"
    root = tmp_path / "root"
    write_tiny(folder)
    url, md5 = packed(folder, "zip")
    monkeypatch.setitem(archives.ADDRESSES, "tiny_imagenet", (url, "0" * 32))

    def fetch(split: str) -> int:
        return len(load("tiny_imagenet", split, root, download=True))

    def interrupted(zipped: zipfile.ZipFile, to: str) -> None:
        zipped.extract("tiny-imagenet-200/wnids.txt", to)
        raise OSError(28, "No space left on device")

    refused(lambda: fetch("train"), "tiny_imagenet", "the download failed", "corrupted")  # another checksum
    monkeypatch.setitem(archives.ADDRESSES, "tiny_imagenet", (url, md5))
    with monkeypatch.context() as patch:
        patch.setattr(zipfile.ZipFile, "extractall", interrupted)
        refused(lambda: fetch("train"), "tiny_imagenet", "the download failed", "No space left on device")
    lock = ".tiny-imagenet-200.lock"
    assert os.listdir(root) == [lock]
    assert fetch("train") == 3 and sorted(os.listdir(root)) == [lock, "tiny-imagenet-200"]
    monkeypatch.setitem(
        archives.ADDRESSES, "tiny_imagenet", ("file:///nowhere", md5)
    )  # existing files are not downloaded again
    assert fetch("val") == 2
    (root / "tiny-imagenet-200/wnids.txt").unlink()
    refused(lambda: fetch("val"), root / "tiny-imagenet-200", "incomplete or damaged", "DATA.DOWNLOAD")


def test_one_process_downloads_while_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    downloads: list[str] = []

    def fetch(address: str, to: str) -> None:
        downloads.append(address)
        time.sleep(0.3)  # both threads would be here without the lock
        shutil.copy(address.removeprefix("file://"), to)

    write_tiny(tmp_path / "packed/tiny-imagenet-200")
    monkeypatch.setitem(archives.ADDRESSES, "tiny_imagenet", packed(tmp_path / "packed/tiny-imagenet-200", "zip"))
    monkeypatch.setattr(tv.utils, "_urlretrieve", fetch)
    with ThreadPoolExecutor(2) as pool:
        sizes = pool.map(lambda split: len(load("tiny_imagenet", split, tmp_path, download=True)), ("train", "val"))
        assert list(sizes) == [3, 2] and len(downloads) == 1


def write_pickle(path: Path, content: dict) -> tuple[str, str]:
    """Write a pickle as in the CIFAR archives; return (file name, MD5), as torchvision lists them."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickle.dumps(content))
    return path.name, hashlib.md5(path.read_bytes()).hexdigest()


def test_an_archive_of_torchvisions_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "cifar-100-python"
    root = tmp_path / "root"
    pixels = RNG.integers(0, 256, (2, 3072), dtype=np.uint8)
    train = write_pickle(folder / "train", {"data": pixels, "fine_labels": [99, 4]})
    test = write_pickle(folder / "test", {"data": pixels[:1], "fine_labels": [7]})
    meta = write_pickle(folder / "meta", {"fine_label_names": [f"class{i}" for i in range(100)]})
    for name, value in zip(("url", "tgz_md5"), packed(folder, "gztar"), strict=True):
        monkeypatch.setattr(tv.CIFAR100, name, value)
    monkeypatch.setattr(tv.CIFAR100, "train_list", [train])
    monkeypatch.setattr(tv.CIFAR100, "test_list", [test])
    monkeypatch.setattr(tv.CIFAR100, "meta", {"filename": meta[0], "key": "fine_label_names", "md5": meta[1]})
    data = load("cifar100", "val", root, download=True)
    assert labels(data) == [7] and data.classes[3] == "class3" and data.image_name(0) == "cifar100/val[0]"
    np.testing.assert_array_equal(data.read(0), pixels[0].reshape(3, 32, 32).transpose(1, 2, 0))
    assert sorted(os.listdir(root)) == [".cifar-100-python.lock", "cifar-100-python"]
    (root / "cifar-100-python/train").write_bytes(b"half")
    refused(lambda: load("cifar100", "train", root), root / "cifar-100-python", "incomplete or damaged")
