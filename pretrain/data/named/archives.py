"""Data sets distributed as archives: CIFAR, Fashion-MNIST, STL10 and Tiny-ImageNet, in their unpacked files."""

import dataclasses
import gzip
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ...common.errors import UserError, count_noun, one_line
from ...common.files import hold_lock
from ..contract import convert_labels
from ..folders.images import load_classes
from ..image_data import ImageData
from ..sources import Array, Files

LAYOUTS = {  # below the root; each starts with the folder that the archive unpacks to
    "cifar10": "cifar-10-batches-py/{data_batch_1..5,test_batch,batches.meta}",
    "cifar100": "cifar-100-python/{train,test,meta}",
    "fashion_mnist": "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte",
    "stl10": "stl10_binary/{train_X.bin,train_y.bin,test_X.bin,test_y.bin,unlabeled_X.bin,class_names.txt}",
    "tiny_imagenet": "tiny-imagenet-200/{wnids.txt,train/<wnid>/images/*.JPEG,val/{images/*.JPEG,val_annotations.txt}}",
}
ADDRESSES = {  # of archives that torchvision does not know: address and MD5
    "tiny_imagenet": ("https://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),
}
PACKAGES = {  # Debian's, Ubuntu's
    "fashion_mnist": ("dataset-fashion-mnist", Path("/usr/share/datasets/fashion-mnist")),
}
_DAMAGED = (RuntimeError, OSError, ValueError, EOFError, AssertionError, TypeError, LookupError, zlib.error)


def find_folder(name: str, root: Path) -> Path:
    """Return the folder of a data set: in ``root``, or where the system's package has it if ``root`` does not."""
    folder = root / LAYOUTS[name].partition("/")[0]
    if name in PACKAGES and not folder.is_dir():
        package_folder = PACKAGES[name][1]
        return package_folder if package_folder.is_dir() else folder
    return folder


def load(name: str, split: str, root: Path, download: bool) -> ImageData:
    """Load a split of one of these data sets.

    Raises:
        UserError: it is missing, damaged, or cannot be downloaded.
    """
    folder = find_folder(name, root)
    try:
        if download and not folder.is_dir():
            with hold_lock(folder.with_name(f".{folder.name}.lock")):  # other ranks and runs wait for this download
                if not folder.is_dir():
                    _fetch(name, folder)
        data = _READERS[name](name, split, folder)
        return dataclasses.replace(data, labels=_check_labels(data, split))
    except UserError:
        raise
    except _DAMAGED as error:
        raise UserError(f"cannot read {name}: {_explain(error, name, root, folder, download)}") from error


def _check_labels(data: ImageData, split: str) -> np.ndarray | None:
    """Return the labels of a split; raise ValueError without a loader's remedy."""
    try:
        return convert_labels(data.labels, data.classes, len(data), f"its {split} split")
    except UserError as error:
        raise ValueError(str(error).partition("; ")[0]) from error


def _explain(error: Exception, name: str, root: Path, folder: Path, download: bool) -> str:
    """Say what is wrong with the folder of a data set, and what to do."""
    reason = one_line(error)
    package, package_folder = PACKAGES.get(name, ("", None))
    if folder == package_folder and folder.exists():
        return f"{folder} is incomplete or damaged ({reason}); reinstall Debian's package {package}"
    problem = f"expected {root}/{LAYOUTS[name]}"
    if folder.exists():
        remedy = f"{folder} is incomplete or damaged; remove it and set DATA.DOWNLOAD True to fetch it again ({reason})"
    elif download:
        remedy = f"the download failed ({reason})"
    else:
        remedy = "set DATA.DOWNLOAD True to fetch it, or DATA.ROOT to its folder"
        if package:
            remedy += f", or install Debian's package {package}"
    return f"{problem}; {remedy}"


def _fetch(name: str, folder: Path) -> None:
    """Download into a temporary folder and rename the unpacked one, so that a data set is complete or absent."""
    import torchvision.datasets as tv  # slow to import

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        if name in ADDRESSES:
            address, md5 = ADDRESSES[name]
            tv.utils.download_and_extract_archive(address, temporary, md5=md5)
        elif name == "stl10":
            tv.STL10(temporary, split="test", download=True)
        else:
            _find_class(name)(temporary, download=True)
        try:
            (Path(temporary) / folder.name).rename(folder)
        except OSError:
            if not folder.is_dir():  # another run has downloaded it
                raise


def _find_class(name: str) -> Any:
    import torchvision.datasets as tv

    return {"cifar10": tv.CIFAR10, "cifar100": tv.CIFAR100, "fashion_mnist": tv.FashionMNIST}[name]


def _read_cifar(name: str, split: str, folder: Path) -> ImageData:
    data = _find_class(name)(str(folder.parent), train=split == "train")
    images = np.asarray(data.data, dtype=np.uint8)
    return ImageData(Array({f"{name}/{split}": images}), np.asarray(data.targets, dtype=np.int64), list(data.classes))


def _read_fashion_mnist(name: str, split: str, folder: Path) -> ImageData:
    """Read IDX files, compressed or not: torchvision reads only uncompressed ones, and packages are compressed."""
    raw = folder / "raw" if (folder / "raw").is_dir() else folder
    part = "train" if split == "train" else "t10k"
    images = _read_idx(raw / f"{part}-images-idx3-ubyte", dimensions=3)
    labels = _read_idx(raw / f"{part}-labels-idx1-ubyte", dimensions=1).astype(np.int64)
    return ImageData(Array({f"{name}/{split}": images}), labels, list(_find_class(name).classes))


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read bytes in IDX format, from ``path`` or its ``.gz``: two zeros, type 8, dimensions, sizes, values."""
    compressed = path.with_name(f"{path.name}.gz")
    content = path.read_bytes() if path.is_file() else gzip.decompress(compressed.read_bytes())
    if content[:4] != bytes([0, 0, 8, dimensions]):
        raise ValueError(f"{path.name} is not an IDX file of bytes in {count_noun(dimensions, 'dimension')}")
    sizes = np.frombuffer(content, ">u4", dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(sizes)


def _read_stl10(name: str, split: str, folder: Path) -> ImageData:
    """Read memory-mapped files: torchvision's reader would hold 2.7 GB in every process."""
    classes = (folder / "class_names.txt").read_text().split()
    parts = {}
    labels = []
    for part in ("train", "unlabeled") if split == "train" else ("test",):
        images = np.memmap(folder / f"{part}_X.bin", np.uint8, "r").reshape(-1, 3, 96, 96)
        parts[f"{name}/{part}"] = images
        if part == "unlabeled":
            labels.append(np.full(len(images), -1, np.int64))
        else:
            labels.append(np.fromfile(folder / f"{part}_y.bin", np.uint8).astype(np.int64) - 1)
        if len(labels[-1]) != len(images):
            raise ValueError("it has different numbers of images and labels")
    return ImageData(Array(parts, transposed=True), np.concatenate(labels), classes)


def _read_tiny_imagenet(name: str, split: str, folder: Path) -> ImageData:
    """Read folders of classes; the labels of the val split are in a text file."""
    classes = sorted((folder / "wnids.txt").read_text().split())
    if split == "train":
        return load_classes(folder / "train", classes, name)
    rows = sorted(line.split("\t")[:2] for line in (folder / "val/val_annotations.txt").read_text().splitlines())
    labels = np.array([classes.index(wnid) for _, wnid in rows], np.int64)
    return ImageData(Files(folder / "val/images", [image for image, _ in rows]), labels, classes)


_READERS = {
    "cifar10": _read_cifar,
    "cifar100": _read_cifar,
    "fashion_mnist": _read_fashion_mnist,
    "stl10": _read_stl10,
    "tiny_imagenet": _read_tiny_imagenet,
}
