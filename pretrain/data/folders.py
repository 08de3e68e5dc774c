"""Images in folders: ImageNet, and any folder with images or with one folder per class."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ..common.errors import UserError
from ..common.image_io import Files
from .image_data import ImageData, MissingSplit

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp", ".gif")
_SPLIT_FOLDERS = {"train": ("train", "training"), "val": ("val", "valid", "validation", "test")}  # in any case
_THREADS = 16  # that list class folders: a file server takes milliseconds to answer, whatever it is asked


def load_folder(folder: Path, split: str) -> ImageData:
    """A split of ``folder``; a folder without split folders is every split.

    Raises:
        UserError: no image is found, the split is missing, or it is not clear which folders are splits and which are
            classes.
    """
    folders, _ = _entries(folder)
    of_split = {key: [f for f in folders if f.lower() in names] for key, names in _SPLIT_FOLDERS.items()}
    splits = [*of_split["train"], *of_split["val"]]
    if not splits:
        return load_classes(folder, None, f"folder:{folder}", may_be_flat=True)
    others = [f for f in folders if f not in splits]
    if others and not (of_split["train"] and of_split["val"]):
        raise UserError(
            f"{folder} holds {splits[0]}/ next to {others[0]}/: a split or a class? If a split, name folder:{folder}/"
            f"{splits[0]}; if a class, move all class folders into {folder}/train/"
        )
    picked = [f for f in of_split[split] if f.lower() != "test"] or of_split[split]
    if not picked:
        raise MissingSplit(
            f"{folder} holds no folder of the {split} split; call it {'/, '.join(_SPLIT_FOLDERS[split])}/, or name a "
            f"folder of images itself, such as folder:{folder}/{splits[0]}"
        )
    if len(picked) > 1:
        raise UserError(f"{folder} holds {picked[0]}/ and {picked[1]}/, both of the {split} split; keep one of them")
    classes = _entries(folder / of_split["train"][0])[0] if of_split["train"] else []
    return load_classes(folder / picked[0], classes or None, f"folder:{folder}", may_be_flat=True)


def load_imagenet(name: str, split: str, root: Path) -> ImageData:
    """ImageNet-1K's folders, or those of ImageNet-100's classes, which may lie in a separate folder.

    Raises:
        UserError: the split or one of its classes is missing.
    """
    top = root / (name if os.path.isdir(root / name) else "imagenet")
    if not os.path.isdir(top / split):
        raise (MissingSplit if os.path.isdir(top) else UserError)(
            f"no ImageNet at {top / split}; expected {top}/train/n########/*.JPEG and {top}/val/n########/*.JPEG "
            "(download it from image-net.org, or set DATA.ROOT to its folder)"
        )
    if name == "imagenet100":
        classes = sorted((Path(__file__).parent / "imagenet100.txt").read_text().split())
    else:  # val's labels are train's
        classes = _entries(top / "train")[0] if os.path.isdir(top / "train") else None
    return load_classes(top / split, classes or None, name)


def load_classes(folder: Path, classes: list[str] | None, name: str, may_be_flat: bool = False) -> ImageData:
    """Images below one folder per class.

    Args:
        classes: class folders to read, in the order of their labels; None: those found.
        name: the data set, for messages.
        may_be_flat: images directly in ``folder`` are taken, without labels, and a class may be absent.

    Raises:
        UserError: no image is found, or the class folders are not those expected.
    """
    class_folders, images = _entries(folder)
    if images and not may_be_flat:
        raise UserError(
            f"{name}: images are directly in {folder}; expected one folder per class, {folder}/n########/*.JPEG"
        )
    if images:
        return ImageData(Files(folder, images_below(folder)), None, [])
    classes = class_folders if classes is None else classes
    if (missing := sorted(set(classes) - set(class_folders))) and not may_be_flat:
        raise UserError(
            f"{name}: {len(missing)} of {len(classes)} class folders are missing in {folder}: {missing[0]}, ..."
        )
    if may_be_flat and (unknown := sorted(set(class_folders) - set(classes))):
        raise UserError(f"{name}: class folder {folder}/{unknown[0]} has no counterpart among the training classes")
    labels = [label for label, class_name in enumerate(classes) if class_name in class_folders]
    with ThreadPoolExecutor(_THREADS) as pool:
        of_classes = list(pool.map(lambda label: list(images_below(folder / classes[label])), labels))
    names = zip(labels, of_classes, strict=True)
    files = Files(folder, (f"{classes[label]}/{image}" for label, images in names for image in images))
    if not len(files):
        raise UserError(
            f"{name}: no images in {folder}; expected files ending in {' '.join(SUFFIXES)}, flat or in one folder per "
            "class"
        )
    return ImageData(
        files, np.repeat(np.array(labels, np.int64), [len(images) for images in of_classes]), list(classes)
    )


def _entries(folder: Path) -> tuple[list[str], list[str]]:
    """The names of the folders and of the images in ``folder``, sorted."""
    folders, images = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name[0] == ".":
                    continue
                if entry.name.lower().endswith(SUFFIXES):  # by name alone: a file server takes long for a million
                    images.append(entry.name)
                elif entry.is_dir():
                    folders.append(entry.name)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"no image folder at {folder}; expected images in it, or one folder of images per class"
        ) from None
    except OSError as error:
        raise UserError(f"cannot list {error.filename or folder}: {error.strerror}") from error
    return sorted(folders), sorted(images)


def images_below(folder: Path) -> Iterator[str]:
    """Names relative to ``folder``, sorted, with the images of a folder in that folder's place."""
    folders, images = _entries(folder)
    for name in sorted([*folders, *images]):
        if name.lower().endswith(SUFFIXES):
            yield name
        else:
            yield from (f"{name}/{below}" for below in images_below(folder / name))
