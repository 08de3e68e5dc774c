"""Named data sets and image folders -> decodable images, with labels where they exist.

Every set has a fixed order (sorted names), so an index means the same image in every process and every run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import distributed
from .common.errors import UserError, nearest
from .common.image_io import Array, Chosen, Files, Joined, Source

_FOLDERS = {  # where a named data set may lie in DATA.ROOT
    "imagenet": ("imagenet",), "imagenet100": ("imagenet100", "imagenet"), "cifar10": ("cifar-10-batches-py",),
    "cifar100": ("cifar-100-python",), "fashion_mnist": ("FashionMNIST",), "stl10": ("stl10_binary",),
    "tiny_imagenet": ("tiny-imagenet-200",),
}  # fmt: skip
NAMES = tuple(_FOLDERS)
SPLITS = ("train", "val", "unlabelled")
_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp", ".gif")
_SPLIT_FOLDERS = {"train": ("train", "training"), "val": ("val", "valid", "validation", "test")}  # in any case
_READER_ERRORS = (RuntimeError, OSError, ValueError, EOFError)
_TINY_URL = "https://cs231n.stanford.edu/tiny-imagenet-200.zip"
_TINY_MD5 = "90528d7ca1a48142e341f4ef8d21d0de"


class MissingSplit(UserError):
    """The data set is there, but not this split of it."""


@dataclass(frozen=True)
class ImageData:
    """A data set split.

    Attributes:
        source: where the pixels come from.
        labels: (len,) int64 class of each image, -1 where it has none; None where no image has one.
        classes: class names, in the order of the labels.
    """

    source: Source
    labels: np.ndarray | None
    classes: list[str]

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> np.ndarray:
        """The image as (H, W, 3) uint8 RGB, upright.

        Raises:
            CorruptImage: it cannot be decoded; the message names the file.
        """
        return self.source.read(index)

    def image_name(self, index: int) -> str:
        """The file of the image, or its place in an archive of many."""
        return self.source.name(index)

    def labeled(self) -> ImageData:
        """Only the images that have a label; ``self`` if all have one."""
        if self.labels is None or (self.labels >= 0).all():
            return self
        return self.chosen(np.flatnonzero(self.labels >= 0))

    def chosen(self, positions: np.ndarray) -> ImageData:
        """The images at ``positions``, in that order."""
        labels = None if self.labels is None else self.labels[positions]
        return ImageData(Chosen(self.source, positions), labels, self.classes)


def load(name: str, split: str, root: str | Path = "datasets", download: bool = False) -> ImageData:
    """Opens a split of a data set.

    Args:
        name: one of NAMES, or ``folder:/path``: images in it (no labels) or one folder per class. Folders in it that
            are called as splits (train, training, val, valid, validation, test) are splits, never classes; test is
            the val split where there is no other.
        split: ``train``, ``val`` (the test split where a data set has no other) or, of stl10, ``unlabelled``. The
            ``train`` split of stl10 is its labeled and then its unlabeled images (label -1).
        root: the folder of the named data sets.
        download: fetch the data set if it is missing and may be fetched.

    Raises:
        UserError: unknown name or split; missing, empty or damaged data (the message shows the layout expected).
    """
    if split not in SPLITS or (split == "unlabelled" and name != "stl10"):
        raise UserError(f"{name} has no split {split!r}; choose train or val (stl10 also has unlabelled)")
    if download:  # one process at a time; the others find the data
        with distributed.in_turns():
            return _load(name, split, Path(root), True)
    return _load(name, split, Path(root), False)


def refuse_missing(name: str, root: str | Path = "datasets", download: bool = False) -> None:
    """Checks that a data set may be loaded, by its folder alone: listing the images of a large one takes long.

    Raises:
        UserError: unknown name, or no such folder.
    """
    places = [Path(root) / folder for folder in _FOLDERS.get(name, ())]
    if name.startswith("folder:"):
        places, download = [Path(os.path.expanduser(name[len("folder:") :]))], False
    if not any(map(os.path.isdir, places)) and not (places and download):
        load(name, "train", root)  # says what it expects


def _load(name: str, split: str, root: Path, download: bool) -> ImageData:
    if name.startswith("folder:"):
        return _folder(Path(os.path.expanduser(name[len("folder:") :])), split)
    if name in ("imagenet", "imagenet100"):
        return _imagenet(name, split, root)
    if name in ("cifar10", "cifar100", "fashion_mnist"):
        return _from_torchvision(name, split, root, download)
    if name == "stl10":
        return _stl10(split, root, download)
    if name == "tiny_imagenet":
        return _tiny_imagenet(split, root, download)
    raise UserError(f"unknown data set {name!r}; choose {', '.join(NAMES)} or folder:/path{nearest(name, NAMES)}")


def _folder(folder: Path, split: str) -> ImageData:
    name = f"folder:{folder}"
    folders = _folder_names(folder)
    of_split = {key: [f for f in folders if f.lower() in names] for key, names in _SPLIT_FOLDERS.items()}
    found = [*of_split["train"], *of_split["val"]]
    if not found:
        return _class_folders(folder, None, name, may_be_flat=True)
    others = [f for f in folders if f not in found]
    if others and not (of_split["train"] and of_split["val"]):
        raise UserError(
            f"{folder} holds {found[0]}/ beside {others[0]}/: a split or a class? If a split, name folder:{folder}/"
            f"{found[0]}; if a class, move all class folders into {folder}/train/"
        )
    chosen = [f for f in of_split[split] if f.lower() != "test"] or of_split[split]
    if not chosen:
        raise MissingSplit(
            f"{folder} holds no folder of the {split} split; call it {'/, '.join(_SPLIT_FOLDERS[split])}/, or name a "
            f"folder of images itself, such as folder:{folder}/{found[0]}"
        )
    if len(chosen) > 1:
        raise UserError(f"{folder} holds {chosen[0]}/ and {chosen[1]}/, both of the {split} split; leave one of them")
    classes = _folder_names(folder / of_split["train"][0]) if of_split["train"] else []
    return _class_folders(folder / chosen[0], classes or None, name, may_be_flat=True)


def _imagenet(name: str, split: str, root: Path) -> ImageData:
    """ImageNet-1K's folders, or of ImageNet-100 those of its classes (in a folder of its own, or in ImageNet-1K's)."""
    top = root / (name if os.path.isdir(root / name) else "imagenet")
    if not os.path.isdir(top / split):
        raise (MissingSplit if os.path.isdir(top) else UserError)(
            f"no ImageNet at {top / split}; expected {top}/train/n########/*.JPEG and {top}/val/n########/*.JPEG "
            "(download it from image-net.org, or set DATA.ROOT to its folder)"
        )
    if name == "imagenet100":
        classes = sorted((Path(__file__).parent / "imagenet100.txt").read_text().split())
    else:  # val's labels are train's
        classes = _folder_names(top / "train") if os.path.isdir(top / "train") else None
    return _class_folders(top / split, classes or None, name)


def _class_folders(folder: Path, classes: list[str] | None, name: str, may_be_flat: bool = False) -> ImageData:
    """Images below one folder per class.

    Args:
        classes: take these only, in this order of labels; None: the folders found.
    """
    entries = _entries(folder)
    flat = any(_is_image(entry.name) and not _is_folder(entry) for entry in entries)
    if flat and not may_be_flat:
        raise UserError(
            f"{name}: images are directly in {folder}; expected one folder per class, {folder}/n########/*.JPEG"
        )
    if flat:
        return ImageData(Files(folder, list(_images_below(folder))), None, [])
    found = [entry.name for entry in entries if _is_folder(entry)]
    if classes is None:
        classes = found
    elif (missing := sorted(set(classes) - set(found))) and not may_be_flat:
        raise UserError(
            f"{name}: {len(missing)} of {len(classes)} class folders are missing in {folder}: {missing[0]}, ..."
        )
    if may_be_flat and (unknown := sorted(set(found) - set(classes))):
        raise UserError(f"{name}: class folder {folder}/{unknown[0]} has no counterpart among the training classes")
    names: list[str] = []
    labels: list[np.ndarray] = []
    for label, class_name in enumerate(classes):
        if class_name in found:
            images = [f"{class_name}/{image}" for image in _images_below(folder / class_name)]
            names += images
            labels.append(np.full(len(images), label, np.int64))
    if not names:
        raise UserError(
            f"{name}: no images in {folder}; expected files ending in {' '.join(_SUFFIXES)}, flat or a folder per class"
        )
    return ImageData(Files(folder, names), np.concatenate(labels), list(classes))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted((e for e in entries if not e.name.startswith(".")), key=lambda e: e.name)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"no image folder at {folder}; expected images in it, or one folder of images per class"
        ) from None
    except OSError as error:
        raise UserError(f"cannot list {folder}: {error.strerror}") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:  # a link to itself
        raise UserError(f"cannot read {entry.path}: {error.strerror}; remove it") from error


def _folder_names(folder: Path) -> list[str]:
    return [entry.name for entry in _entries(folder) if _is_folder(entry)]


def _is_image(name: str) -> bool:
    return name.lower().endswith(_SUFFIXES)


def _images_below(folder: Path, prefix: str = "", above: tuple[str, ...] = ()) -> Iterator[str]:
    """Names relative to ``folder``, sorted. Names with an image's suffix are not stat'ed, slow on network disks.

    Args:
        above: the real paths of the folders above this one, so that a link back to one of them is found.
    """
    here = os.path.realpath(folder)
    if here in above:
        raise UserError(f"{folder} links to a folder that contains it; remove the link")
    for entry in _entries(folder):
        if _is_image(entry.name):
            yield prefix + entry.name
        elif _is_folder(entry):
            yield from _images_below(folder / entry.name, f"{prefix}{entry.name}/", (*above, here))


def _from_torchvision(name: str, split: str, root: Path, download: bool) -> ImageData:
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


def _stl10(split: str, root: Path, download: bool) -> ImageData:
    """STL10's binary files, memory-mapped: torchvision's reader would hold 2.7 GB in every process."""
    folder = root / "stl10_binary"
    layout = "stl10_binary/{train_X.bin,train_y.bin,test_X.bin,test_y.bin,unlabeled_X.bin,class_names.txt}"
    parts = {"train": ("train", "unlabeled"), "val": ("test",), "unlabelled": ("unlabeled",)}[split]
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
        raise _missing("stl10", root, layout, download, error) from error
    if [len(part) for part in labels] != [len(array) for array in arrays]:
        raise UserError(f"stl10: {folder} has different numbers of images and labels; download it again")
    sources = [Array(array, f"stl10/{part}", transposed=True) for part, array in zip(parts, arrays, strict=True)]
    return ImageData(Joined(sources), np.concatenate(labels), classes)


def _tiny_imagenet(split: str, root: Path, download: bool) -> ImageData:
    folder = root / "tiny-imagenet-200"
    layout = "tiny-imagenet-200/{wnids.txt,train/<wnid>/images/*.JPEG,val/images/*.JPEG,val/val_annotations.txt}"
    try:
        if download:
            from torchvision.datasets.utils import download_and_extract_archive

            _fetch(root, layout, lambda folder: download_and_extract_archive(_TINY_URL, folder, md5=_TINY_MD5))
        classes = sorted((folder / "wnids.txt").read_text().split())
        if split == "train":
            return _class_folders(folder / "train", classes, "tiny_imagenet")
        rows = sorted(line.split("\t")[:2] for line in (folder / "val/val_annotations.txt").read_text().splitlines())
        labels = np.array([classes.index(wnid) for _, wnid in rows], np.int64)
    except UserError:
        raise
    except _READER_ERRORS as error:
        raise _missing("tiny_imagenet", root, layout, download, error) from error
    return ImageData(Files(folder / "val/images", [image for image, _ in rows]), labels, classes)


def _fetch(root: Path, layout: str, download: Callable[[str], Any]) -> None:
    """Downloads and unpacks in a temporary folder that is renamed at the end, so that a folder of its name is complete.

    Args:
        layout: begins with the folder that ``download`` makes in the folder that it is given.
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
    found = "" if not download and "not found" in str(error) else f" ({' '.join(str(error).split())})"
    return UserError(f"cannot read {name}: expected {root}/{layout}; {remedy}{found}")
