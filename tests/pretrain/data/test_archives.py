"""Archives in their true layout on disk, and their downloads."""

from __future__ import annotations

import hashlib
import http.server
import io
import os
import pickle
import struct
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torchvision.datasets as tv
from PIL import Image

from pretrain.common.errors import UserError
from pretrain.data import archives
from pretrain.data.datasets import load
from tests.pretrain.images import encoded, picture, write_folder

RNG = np.random.default_rng(0)


def write_pickle(path: Path, content: dict) -> tuple[str, str]:
    """As the CIFAR archives hold it; returns torchvision's (file name, MD5)."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickle.dumps(content))
    return path.name, hashlib.md5(path.read_bytes()).hexdigest()


def test_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "cifar-10-batches-py"
    pixels = RNG.integers(0, 256, (6, 3, 32, 32), dtype=np.uint8)  # planes of red, green, blue
    batches = [{"data": pixels[i : i + 1].reshape(1, 3072), "labels": [9 - i]} for i in range(6)]
    train = [write_pickle(folder / f"data_batch_{i + 1}", batches[i]) for i in range(5)]
    meta = write_pickle(folder / "batches.meta", {"label_names": [f"class{i}" for i in range(10)]})
    monkeypatch.setattr(tv.CIFAR10, "train_list", train)
    monkeypatch.setattr(tv.CIFAR10, "test_list", [write_pickle(folder / "test_batch", batches[5])])
    monkeypatch.setattr(tv.CIFAR10, "meta", {"filename": meta[0], "key": "label_names", "md5": meta[1]})
    data = load("cifar10", "train", tmp_path)
    assert len(data) == 5 and data.labels is not None and data.labels.tolist() == [9, 8, 7, 6, 5]
    assert data.classes[3] == "class3" and data.image_name(2) == "cifar10/train[2]"
    np.testing.assert_array_equal(data.read(2), pixels[2].transpose(1, 2, 0))
    np.testing.assert_array_equal(load("cifar10", "val", tmp_path).read(0), pixels[5].transpose(1, 2, 0))
    (folder / "data_batch_2").write_bytes(b"damaged")
    with pytest.raises(UserError, match="cannot read cifar10"):
        load("cifar10", "train", tmp_path)


def test_fashion_mnist(tmp_path: Path):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    pixels = RNG.integers(0, 256, (4, 28, 28), dtype=np.uint8)
    for part in ("train", "t10k"):  # IDX: magic number, sizes, bytes
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">iiii", 2051, 4, 28, 28) + pixels.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 2049, 4) + bytes([3, 1, 0, 9]))
    data = load("fashion_mnist", "val", tmp_path)
    assert data.labels is not None and data.labels.tolist() == [3, 1, 0, 9] and data.classes[9] == "Ankle boot"
    np.testing.assert_array_equal(data.read(1), np.dstack([pixels[1]] * 3))
    (raw / "t10k-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 2049, 9) + bytes(5))
    with pytest.raises(UserError, match=r"FashionMNIST is incomplete or damaged; remove it and set DATA.DOWNLOAD"):
        load("fashion_mnist", "val", tmp_path)


def test_stl10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    pixels = RNG.integers(0, 256, (5, 3, 96, 96), dtype=np.uint8)  # planes, each column by column
    for part, images in (("train", pixels[:2]), ("unlabeled", pixels[2:4]), ("test", pixels[4:])):
        (folder / f"{part}_X.bin").write_bytes(images.tobytes())
    (folder / "train_y.bin").write_bytes(bytes([10, 1]))
    (folder / "test_y.bin").write_bytes(bytes([2]))
    (folder / "class_names.txt").write_text("\n".join(f"class{i}" for i in range(10)))
    train, val, rest = (load("stl10", split, tmp_path) for split in ("train", "val", "unlabelled"))
    assert train.labels is not None and train.labels.tolist() == [9, 0, -1, -1]
    assert val.labels is not None and val.labels.tolist() == [1] and train.classes == [f"class{i}" for i in range(10)]
    assert rest.labels is not None and rest.labels.tolist() == [-1, -1] and train.image_name(3) == "stl10/unlabeled[1]"
    np.testing.assert_array_equal(train.read(1), pixels[1].transpose(2, 1, 0))
    np.testing.assert_array_equal(train.read(3), rest.read(1))
    monkeypatch.setattr(tv.STL10, "_check_integrity", lambda _: True)  # its checksums are those of the full files
    np.testing.assert_array_equal(val.read(0), np.asarray(tv.STL10(str(tmp_path), "test")[0][0]))
    (folder / "test_y.bin").write_bytes(bytes([2, 3]))
    with pytest.raises(UserError, match="different numbers of images and labels"):
        load("stl10", "val", tmp_path)


def test_tiny_imagenet(tmp_path: Path):
    root = tmp_path / "tiny-imagenet-200"
    write_folder(root, ["train/n02/images/n02_0.JPEG", "train/n01/images/n01_0.JPEG", "train/n01/images/n01_1.JPEG"])
    write_folder(root, ["val/images/val_1.JPEG", "val/images/val_0.JPEG"])
    (root / "train/n01/n01_boxes.txt").write_text("n01_0.JPEG\t0\t0\t62\t62\n")
    (root / "wnids.txt").write_text("n02\nn01\n")
    (root / "val/val_annotations.txt").write_text("val_1.JPEG\tn01\t0\t0\t9\t9\nval_0.JPEG\tn02\t0\t0\t9\t9\n")
    train, val = load("tiny_imagenet", "train", tmp_path), load("tiny_imagenet", "val", tmp_path)
    assert train.image_name(0) == f"{root}/train/n01/images/n01_0.JPEG" and train.classes == val.classes == [
        "n01",
        "n02",
    ]
    assert train.labels is not None and train.labels.tolist() == [0, 0, 1]
    assert [val.image_name(i) for i in range(2)] == [f"{root}/val/images/val_{i}.JPEG" for i in range(2)]
    assert val.labels is not None and val.labels.tolist() == [1, 0]
    np.testing.assert_array_equal(val.read(0), picture(1))


def archive(path: Path, files: dict[str, bytes]) -> str:
    """Writes a zip or a tar.gz and returns its MD5."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as zipped:
            for name, content in files.items():
                zipped.writestr(name, content)
    else:
        with tarfile.open(path, "w:gz") as tar:
            for name, content in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The address of a web server of the files in ``tmp_path``."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def tiny_archive(tmp_path: Path, served: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tiny-ImageNet's archive with one image, and a server of it."""
    image = encoded(Image.fromarray(picture()), "PNG")
    path = tmp_path / "tiny-imagenet-200.zip"
    names = ["wnids.txt", "train/n01/images/a.JPEG", "val/images/b.JPEG", "val/val_annotations.txt"]
    contents = [b"n01\n", image, image, b"b.JPEG\tn01\t0\t0\t9\t9\n"]
    md5 = archive(path, {f"tiny-imagenet-200/{n}": c for n, c in zip(names, contents, strict=True)})
    monkeypatch.setattr(archives, "_TINY_URL", f"{served}/{path.name}")
    monkeypatch.setattr(archives, "_TINY_MD5", md5)
    return path


def test_a_download_is_whole_or_absent(tmp_path: Path, tiny_archive: Path, monkeypatch: pytest.MonkeyPatch):
    root = tmp_path / "root"
    extract = zipfile.ZipFile.extractall

    def interrupted(zipped: zipfile.ZipFile, to: str) -> None:
        zipped.extract("tiny-imagenet-200/wnids.txt", to)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "extractall", interrupted)
    with pytest.raises(UserError, match=r"cannot read tiny_imagenet: .*the download failed \(.*No space left on dev"):
        load("tiny_imagenet", "train", root, download=True)
    assert os.listdir(root) == []
    monkeypatch.setattr(zipfile.ZipFile, "extractall", extract)
    assert len(load("tiny_imagenet", "train", root, download=True)) == 1
    assert os.listdir(root) == ["tiny-imagenet-200"]
    tiny_archive.unlink()  # what is there is not fetched again
    assert len(load("tiny_imagenet", "val", root, download=True)) == 1
    (root / "tiny-imagenet-200/wnids.txt").unlink()
    with pytest.raises(UserError, match=r"is incomplete or damaged; remove it and set DATA.DOWNLOAD True"):
        load("tiny_imagenet", "val", root, download=True)


def test_an_archive_with_another_checksum_is_refused(tmp_path: Path, tiny_archive: Path):
    with tiny_archive.open("ab") as file:
        file.write(b"changed on the way")
    with pytest.raises(UserError, match=r"cannot read tiny_imagenet: .*the download failed \(.*corrupted"):
        load("tiny_imagenet", "train", tmp_path / "root", download=True)
    assert os.listdir(tmp_path / "root") == []


def test_an_archive_of_torchvisions_is_whole_or_absent(tmp_path: Path, served: str, monkeypatch: pytest.MonkeyPatch):
    pixels = RNG.integers(0, 256, (2, 3072), dtype=np.uint8)
    contents = {
        "train": pickle.dumps({"data": pixels, "fine_labels": [99, 4]}),
        "test": pickle.dumps({"data": pixels[:1], "fine_labels": [7]}),
        "meta": pickle.dumps({"fine_label_names": [f"class{i}" for i in range(100)]}),
    }
    sums = {name: hashlib.md5(content).hexdigest() for name, content in contents.items()}
    md5 = archive(tmp_path / "cifar-100-python.tar.gz", {f"cifar-100-python/{n}": c for n, c in contents.items()})
    monkeypatch.setattr(tv.CIFAR100, "url", f"{served}/cifar-100-python.tar.gz")
    monkeypatch.setattr(tv.CIFAR100, "tgz_md5", md5)
    monkeypatch.setattr(tv.CIFAR100, "train_list", [("train", sums["train"])])
    monkeypatch.setattr(tv.CIFAR100, "test_list", [("test", sums["test"])])
    monkeypatch.setattr(tv.CIFAR100, "meta", {"filename": "meta", "key": "fine_label_names", "md5": sums["meta"]})
    root = tmp_path / "root"
    data = load("cifar100", "val", root, download=True)
    assert data.labels is not None and data.labels.tolist() == [7] and len(data.classes) == 100
    np.testing.assert_array_equal(data.read(0), pixels[0].reshape(3, 32, 32).transpose(1, 2, 0))
    assert os.listdir(root) == ["cifar-100-python"]
    (root / "cifar-100-python/train").write_bytes(b"half")
    with pytest.raises(UserError, match=r"cifar-100-python is incomplete or damaged; remove it and set DATA.DOWNLOAD"):
        load("cifar100", "train", root)
