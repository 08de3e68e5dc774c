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

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp", ".gif")
_SPLIT_FOLDERS = {"train": ("train", "training"), "val": ("val", "valid", "validation", "test")}  # in any case
_THREADS = 16  # that list class folders: a file server takes milliseconds to answer, whatever it is asked


def load_folder(folder: Path, split: str) -> ImageData:
    """A split of ``folder``; a folder without split folders is every split.

    Raises:
        UserError: no image is found, or it is not clear which folders are splits and which are classes.
    """
    chosen, classes = split_folder(folder, split)
    return load_classes(chosen, classes, f"folder:{folder}", may_be_flat=True)


def split_folder(folder: Path, split: str) -> tuple[Path, list[str] | None]:
    """Where the images of a split of ``folder`` are, and the classes that its training folder has, if there is one.

    Raises:
        UserError: the split is missing, or it is not clear which folders are splits and which are classes.
    """
    folders = _folder_names(folder)
    of_split = {key: [f for f in folders if f.lower() in names] for key, names in _SPLIT_FOLDERS.items()}
    splits = [*of_split["train"], *of_split["val"]]
    if not splits:
        return folder, None
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
    classes = _folder_names(folder / of_split["train"][0]) if of_split["train"] else []
    return folder / picked[0], classes or None


def load_imagenet(name: str, split: str, root: Path) -> ImageData:
    """ImageNet-1K's folders, or those of ImageNet-100's classes, which may lie in a separate folder.

    Raises:
        UserError: the split or one of its classes is missing.
    """
    folder = imagenet_folder(name, split, root)
    top = folder.parent
    if name == "imagenet100":
        classes = sorted((Path(__file__).parent / "imagenet100.txt").read_text().split())
    else:  # val's labels are train's
        classes = _folder_names(top / "train") if os.path.isdir(top / "train") else None
    return load_classes(folder, classes or None, name)


def imagenet_folder(name: str, split: str, root: Path) -> Path:
    """Where a split of ImageNet-1K or ImageNet-100 is.

    Raises:
        UserError: it is not there.
    """
    top = root / (name if os.path.isdir(root / name) else "imagenet")
    if not os.path.isdir(top / split):
        raise (MissingSplit if os.path.isdir(top) else UserError)(
            f"no ImageNet at {top / split}; expected {top}/train/n########/*.JPEG and {top}/val/n########/*.JPEG "
            "(download it from image-net.org, or set DATA.ROOT to its folder)"
        )
    return top / split


def load_classes(folder: Path, classes: list[str] | None, name: str, may_be_flat: bool = False) -> ImageData:
    """Images below one folder per class.

    Args:
        classes: class folders to read, in the order of their labels; None: those found.
        name: the data set, for messages.
        may_be_flat: images directly in ``folder`` are taken, without labels, and a class may be absent.

    Raises:
        UserError: no image is found, or the class folders are not those expected.
    """
    entries = _entries(folder)
    flat = any(isinstance(entry, str) or (_is_image(entry.name) and not _is_folder(entry)) for entry in entries)
    if flat and not may_be_flat:
        raise UserError(
            f"{name}: images are directly in {folder}; expected one folder per class, {folder}/n########/*.JPEG"
        )
    if flat:
        del entries  # a million names
        return ImageData(Files(folder, _images_below(folder)), None, [])
    class_folders = _folders_of(entries)
    if classes is None:
        classes = class_folders
    elif (missing := sorted(set(classes) - set(class_folders))) and not may_be_flat:
        raise UserError(
            f"{name}: {len(missing)} of {len(classes)} class folders are missing in {folder}: {missing[0]}, ..."
        )
    if may_be_flat and (unknown := sorted(set(class_folders) - set(classes))):
        raise UserError(f"{name}: class folder {folder}/{unknown[0]} has no counterpart among the training classes")
    there = [label for label, class_name in enumerate(classes) if class_name in class_folders]

    def images_of(label: int) -> Files:
        return Files(folder, (f"{classes[label]}/{image}" for image in _images_below(folder / classes[label])))

    with ThreadPoolExecutor(_THREADS) as pool:
        of_classes = list(pool.map(images_of, there))
    files, counts = Files.together(folder, of_classes), np.zeros(len(classes), np.int64)
    counts[there] = [len(images) for images in of_classes]
    if not len(files):
        raise UserError(
            f"{name}: no images in {folder}; expected files ending in {' '.join(_SUFFIXES)}, flat or in one folder per "
            "class"
        )
    return ImageData(files, np.repeat(np.arange(len(classes)), counts), list(classes))


def _entries(folder: Path) -> list[str | os.DirEntry[str]]:
    """What ``folder`` holds, by name; an image that is a regular file is its name alone: there may be a million."""
    try:
        with os.scandir(folder) as entries:
            images_and_rest = [e.name if _is_image(e.name) and _is_plain(e) else e for e in entries if e.name[0] != "."]
        images_and_rest.sort(key=lambda entry: entry if isinstance(entry, str) else entry.name)
        return images_and_rest
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"no image folder at {folder}; expected images in it, or one folder of images per class"
        ) from None
    except OSError as error:
        raise UserError(f"cannot list {folder}: {error.strerror}") from error


def _is_plain(entry: os.DirEntry[str]) -> bool:
    return entry.is_file(follow_symlinks=False)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:  # a link to itself
        raise UserError(f"cannot read {entry.path}: {error.strerror}; remove it") from error


def _folders_of(entries: list[str | os.DirEntry[str]]) -> list[str]:
    return [entry.name for entry in entries if not isinstance(entry, str) and _is_folder(entry)]


def _folder_names(folder: Path) -> list[str]:
    return _folders_of(_entries(folder))


def _is_image(name: str) -> bool:
    return name.lower().endswith(_SUFFIXES)


def _images_below(folder: Path, prefix: str = "", above: tuple[str, ...] = ()) -> Iterator[str]:
    """Names relative to ``folder``, sorted.

    Args:
        above: the real paths of the folders above this one, so that a link back to one of them is found.
    """
    real_path = os.path.realpath(folder)
    if real_path in above:
        raise UserError(f"{folder} links to a folder that contains it; remove the link")
    for entry in _entries(folder):
        if isinstance(entry, str) or _is_image(entry.name):
            yield prefix + (entry if isinstance(entry, str) else entry.name)
        elif _is_folder(entry):
            yield from _images_below(folder / entry.name, f"{prefix}{entry.name}/", (*above, real_path))
