"""Data sets that come as an archive: CIFAR, Fashion-MNIST, STL10 and Tiny-ImageNet, in the files that it unpacks to."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..common.errors import UserError
from ..common.image_io import Array, Concatenated, Files
from .folders import load_classes
from .image_data import ImageData

_READER_ERRORS = (RuntimeError, OSError, ValueError, EOFError)
_TINY_URL = "https://cs231n.stanford.edu/tiny-imagenet-200.zip"
_TINY_MD5 = "90528d7ca1a48142e341f4ef8d21d0de"


def load_with_torchvision(name: str, split: str, root: Path, download: bool) -> ImageData:
    """CIFAR-10, CIFAR-100 or Fashion-MNIST, which torchvision reads into memory."""
    import torchvision.datasets as tv  # slow to import

    readers: dict[str, tuple[Any, str]] = {
        "cifar10": (tv.CIFAR10, "cifar-10-batches-py/{data_batch_1..5,test_batch,batches.meta}"),
        "cifar100": (tv.CIFAR100, "cifar-100-python/{train,test,meta}"),
        "fashion_mnist": (tv.FashionMNIST, "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte"),
    }
    reader, layout = readers[name]
    try:
        if download:
            _fetch(root, layout, lambda folder: reader(folder, download=True))
        data = reader(str(root), train=split == "train")
    except (*_READER_ERRORS, AssertionError, TypeError, LookupError) as error:
        raise _missing(name, root, layout, download, error) from error
    images = np.asarray(data.data, dtype=np.uint8)
    return ImageData(Array(images, f"{name}/{split}"), np.asarray(data.targets, dtype=np.int64), list(data.classes))


def load_stl10(name: str, split: str, root: Path, download: bool) -> ImageData:
    """STL10 from memory-mapped files: torchvision's reader would hold 2.7 GB in every process."""
    folder = root / "stl10_binary"
    layout = "stl10_binary/{train_X.bin,train_y.bin,test_X.bin,test_y.bin,unlabeled_X.bin,class_names.txt}"
    parts = ("train", "unlabeled") if split == "train" else ("test",)
    try:
        if download:
            from torchvision.datasets import STL10

            _fetch(root, layout, lambda folder: STL10(folder, split="test", download=True))
        classes = (folder / "class_names.txt").read_text().split()
        arrays = [np.memmap(folder / f"{part}_X.bin", np.uint8, "r").reshape(-1, 3, 96, 96) for part in parts]
        labels = [
            np.full(len(array), -1, np.int64)
            if part == "unlabeled"
            else np.fromfile(folder / f"{part}_y.bin", np.uint8).astype(np.int64) - 1
            for part, array in zip(parts, arrays, strict=True)
        ]
    except _READER_ERRORS as error:
        raise _missing(name, root, layout, download, error) from error
    if [len(part) for part in labels] != [len(array) for array in arrays]:
        raise UserError(f"stl10: {folder} has different numbers of images and labels; download it again")
    sources = [Array(array, f"stl10/{part}", transposed=True) for part, array in zip(parts, arrays, strict=True)]
    return ImageData(Concatenated(sources), np.concatenate(labels), classes)


def load_tiny_imagenet(name: str, split: str, root: Path, download: bool) -> ImageData:
    """Tiny-ImageNet, whose validation labels are in a text file."""
    folder = root / "tiny-imagenet-200"
    layout = "tiny-imagenet-200/{wnids.txt,train/<wnid>/images/*.JPEG,val/images/*.JPEG,val/val_annotations.txt}"
    try:
        if download:
            from torchvision.datasets.utils import download_and_extract_archive

            _fetch(root, layout, lambda folder: download_and_extract_archive(_TINY_URL, folder, md5=_TINY_MD5))
        classes = sorted((folder / "wnids.txt").read_text().split())
        if split == "train":
            return load_classes(folder / "train", classes, name)
        rows = sorted(line.split("\t")[:2] for line in (folder / "val/val_annotations.txt").read_text().splitlines())
        labels = np.array([classes.index(wnid) for _, wnid in rows], np.int64)
    except UserError:
        raise
    except _READER_ERRORS as error:
        raise _missing(name, root, layout, download, error) from error
    return ImageData(Files(folder / "val/images", [image for image, _ in rows]), labels, classes)


def _fetch(root: Path, layout: str, download: Callable[[str], Any]) -> None:
    """Downloads into a temporary folder and renames what was unpacked, so that a data set is complete or absent.

    Args:
        layout: begins with the name of the folder that ``download`` makes in the folder that it is given.
    """
    place = root / layout.partition("/")[0]
    if place.is_dir():
        return
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=root) as temporary:
        download(temporary)
        try:
            (Path(temporary) / place.name).rename(place)
        except OSError:
            if not place.is_dir():  # another run has downloaded it
                raise


def _missing(name: str, root: Path, layout: str, download: bool, error: Exception) -> UserError:
    remedy = "the download failed" if download else "set DATA.DOWNLOAD True to fetch it, or DATA.ROOT to its folder"
    place = root / layout.partition("/")[0]
    if place.exists():
        remedy = f"{place} is incomplete or damaged; remove it and set DATA.DOWNLOAD True to fetch it again"
    reason = "" if not download and "not found" in str(error) else f" ({' '.join(str(error).split())})"
    return UserError(f"cannot read {name}: expected {root}/{layout}; {remedy}{reason}")
