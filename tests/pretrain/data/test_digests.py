"""The digest of a data set never changes between versions: it decides whether a run may resume."""

import struct
from pathlib import Path

import numpy as np
import pytest

from pretrain.data.datasets import load
from tests.pretrain.data.test_archives import write_tiny
from tests.pretrain.data.test_tars import pack
from tests.pretrain.images import write_folder

FLAT = ["b.png", "A.JPG", "c.jpeg", "sub/d.png"]
CLASSES = ["train/cat/2.png", "train/cat/v1.0/1.png", "train/dog/10.png", "train/dog/9.png", "val/dog/3.png"]
SHARDS = ["0002.left.jpg", "0002.right.jpg", "0001.image.jpg", "0000.png"]
EARLIER = {  # as the first version computed them
    "flat": "85412e1fdb3ae7a5",
    "classes": "2682467970afabcf",
    "val": "7833b3276c145dbf",
    "flat tar": "54048c2784c927ec",
    "class tar": "2682467970afabcf",
    "labeled tar": "5cec2ddd4e040b74",
    "partly labeled tar": "7a4a02d869868fdb",
    "fashion_mnist": "d14e92c3ca87f08f",
    "stl10": "881ffd64eefe8fff",
    "tiny_imagenet": "7e5773e5ce1fb34e",
    "imagenet": "f3003b3c2ae7d8d0",
}


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digests of a data set of each kind."""
    top = tmp_path_factory.mktemp("digests")
    flat = write_folder(top / "flat", FLAT, 4, 4)
    classes = write_folder(top / "classes", CLASSES, 4, 4)
    shards = write_folder(top / "shards", SHARDS, 4, 4)
    pack(top / "flat.tar", flat, FLAT[:3])
    pack(top / "class.tar", classes, CLASSES[:4])
    pack(top / "labeled.tar", shards, SHARDS, **{"0002.cls": b"1", "0001.target.cls": b"0\n", "0000.cls": b"2"})
    pack(top / "partly.tar", shards, SHARDS, **{"0002.cls": b"1", "0001.cls": b"0", "0000.json": b"{}"})
    root = top / "root"
    _write_fashion_mnist(root / "FashionMNIST/raw")
    _write_stl10(root / "stl10_binary")
    write_tiny(root / "tiny-imagenet-200")
    write_folder(root / "imagenet", ["train/n02/b.JPEG", "train/n01/a.JPEG"], 4, 4)
    sets = {
        "flat": load(f"folder:{flat}", "train"),
        "classes": load(f"folder:{classes}", "train"),
        "val": load(f"folder:{classes}", "val"),
        "flat tar": load(f"tar:{top}/flat.tar", "train"),
        "class tar": load(f"tar:{top}/class.tar", "train"),
        "labeled tar": load(f"tar:{top}/labeled.tar", "train"),
        "partly labeled tar": load(f"tar:{top}/partly.tar", "train"),
        **{name: load(name, "train", root) for name in ("fashion_mnist", "stl10", "tiny_imagenet", "imagenet")},
    }
    return {name: data.digest() for name, data in sets.items()}


def _write_fashion_mnist(raw: Path) -> None:
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):  # IDX: magic number, sizes, bytes
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">iiii", 2051, 4, 28, 28) + bytes(4 * 28 * 28))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 2049, 4) + bytes([3, 1, 0, 9]))


def _write_stl10(folder: Path) -> None:
    folder.mkdir()
    for part in ("train", "unlabeled", "test"):
        np.zeros((2, 3, 96, 96), np.uint8).tofile(folder / f"{part}_X.bin")
    for part in ("train", "test"):
        (folder / f"{part}_y.bin").write_bytes(bytes([10, 1]))
    (folder / "class_names.txt").write_text("\n".join(f"class{i}" for i in range(10)))


@pytest.mark.parametrize("name", EARLIER)
def test_the_digest_is_that_of_earlier_versions(digests: dict[str, str], name: str):
    assert digests[name] == EARLIER[name]
