"""Images in folders: ImageNet, and any folder with images or with one folder per class."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ..common.errors import UserError, shorten_list
from ..common.images import SUFFIXES
from .image_data import ImageData, MissingSplit
from .sources import Files

_log = logging.getLogger("pretrain.data.folders")
_SPLIT_FOLDERS = {"train": ("train", "training"), "val": ("val", "valid", "validation", "test")}  # in any case
_SPLIT_WORD = re.compile("(?<![A-Za-z])(?i:(train|val|test)(ing|id|idation|val)?)(?![a-z])")  # in train_images, trainA
_NO_DATA = {"@eadir", "#recycle", "@recycle", "$recycle.bin", "lost+found", "__macosx"}  # of a NAS, disk or archive
_COMPANION = re.compile(r"\.(txt|jsonl?|xml|[ct]sv|md|html?|ya?ml|py|sh|log|ini|db|cache|xmp|aae)")  # of images
_THREADS = 16  # that list class folders: a file server takes milliseconds to answer, whatever it is asked


def load_folder(folder: Path, split: str) -> ImageData:
    """A split of ``folder``; a folder without split folders is every split.

    Raises:
        UserError: no image is found, the split is missing, or it is not clear which folders are splits and which are
            classes.
    """
    folders, *_ = _entries(folder)
    bare = {f: re.sub(r"(19|20)\d\d$", "", f.lower()) for f in folders}  # COCO's train2017 is train
    of_split = {key: [f for f in folders if bare[f] in names] for key, names in _SPLIT_FOLDERS.items()}
    splits = [*of_split["train"], *of_split["val"]]
    if not splits:
        return load_classes(folder, None, f"folder:{folder}", may_be_flat=True)
    others = [f for f in folders if f not in splits]
    if others and not (of_split["train"] and of_split["val"]):
        raise UserError(
            f"{folder} holds {splits[0]}/ next to {others[0]}/: a split or a class? If a split, name folder:{folder}/"
            f"{splits[0]}; if a class, move all class folders into {folder}/train/"
        )
    picked = [f for f in of_split[split] if bare[f] != "test"] or of_split[split]
    if not picked:
        raise MissingSplit(
            f"{folder} holds no folder of the {split} split; call it {'/, '.join(_SPLIT_FOLDERS[split])}/, or name a "
            f"folder of images itself, such as folder:{folder}/{splits[0]}"
        )
    if len(picked) > 1:
        raise UserError(f"{folder} holds {picked[0]}/ and {picked[1]}/, both of the {split} split; keep one of them")
    classes = _entries(folder / of_split["train"][0])[0] if of_split["train"] else []
    return load_classes(folder / picked[0], classes or None, f"folder:{folder}", may_be_flat=True)


def imagenet_folder(name: str, root: Path) -> Path:
    """The folder of ImageNet's train/, under one of its usual names in ``root``, or ``root`` itself.

    Raises:
        UserError: there is none.
    """
    for place in (name, "imagenet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC", ""):
        if os.path.isdir(root / place / "train"):
            return root / place
    layout = f"{root}/imagenet/train/n########/*.JPEG and {root}/imagenet/val/n########/*.JPEG"
    raise UserError(
        f"no ImageNet in DATA.ROOT {root}: expected {layout}; download it from image-net.org, set DATA.ROOT to the "
        "folder that holds imagenet/, or name a folder of any other name in DATA.TRAIN: folder:/path"
    )


def load_imagenet(name: str, split: str, root: Path) -> ImageData:
    """ImageNet-1K's folders, or those of ImageNet-100's classes, which may lie in a separate folder.

    Raises:
        UserError: the split or one of its classes is missing.
    """
    top = imagenet_folder(name, root)
    if not os.path.isdir(top / split):
        raise MissingSplit(f"{name}: no {top / split}; expected {top / split}/n########/*.JPEG")
    classes = _entries(top / "train")[0]  # val's labels are train's
    if name == "imagenet100":
        classes = sorted((Path(__file__).parent / "imagenet100.txt").read_text().split())
    return load_classes(top / split, classes or None, name)


def load_classes(folder: Path, classes: list[str] | None, name: str, may_be_flat: bool = False) -> ImageData:
    """Images below one folder per class.

    Args:
        classes: class folders to read, in the order of their labels; None: those found.
        name: the data set, for messages.
        may_be_flat: images directly in ``folder`` are taken, without labels, and a class may be absent.

    Raises:
        UserError: no image is found, the class folders are not those expected, or folders below ``folder``, which are
            not named in ``classes``, are splits.
    """
    class_folders, images, unread = _entries(folder)
    if images and not may_be_flat:
        raise MissingSplit(
            f"{name}: images are directly in {folder}; expected one folder per class, {folder}/n########/*.JPEG; sort "
            "them (ImageNet's val: torchvision.datasets.ImageNet does it)"
        )
    if images:
        names = images_below(folder)
        _refuse_splits_in(folder, names)
        return ImageData(Files(folder, names), None, [])
    is_whole = classes is None
    classes = class_folders if classes is None else classes
    if (missing := sorted(set(classes) - set(class_folders))) and not may_be_flat:
        raise UserError(
            f"{name}: {len(missing)} of {len(classes)} class folders are missing in {folder}: {missing[0]}, ..."
        )
    if may_be_flat and (unknown := sorted(set(class_folders) - set(classes))):
        raise UserError(f"{name}: class folder {folder}/{unknown[0]} has no counterpart among the training classes")
    labels = [label for label, class_name in enumerate(classes) if class_name in class_folders]
    with ThreadPoolExecutor(_THREADS) as pool:
        of_classes = list(pool.map(lambda label: list(_walk(folder / classes[label], unread)), labels))
    _warn_of(unread, folder)
    names = [
        f"{classes[label]}/{image}" for label, of_class in zip(labels, of_classes, strict=True) for image in of_class
    ]
    if is_whole:
        _refuse_splits_in(folder, names)
    if not names:
        raise UserError(
            f"{name}: no images in {folder}; expected files ending in {' '.join(SUFFIXES)}, flat or in one folder per "
            "class"
        )
    counts = [len(of_class) for of_class in of_classes]
    return ImageData(Files(folder, names), np.repeat(np.array(labels, np.int64), counts), list(classes))


def images_below(folder: Path) -> list[str]:
    """Names relative to ``folder``, sorted, with the images of a folder in that folder's place."""
    unread: list[str] = []
    names = list(_walk(folder, unread))
    _warn_of(unread, folder)
    return names


def _walk(folder: Path, unread: list[str]) -> Iterator[str]:
    folders, images, others = _entries(folder)
    unread.extend(others)  # from several threads
    for name in sorted([*folders, *images]):
        if name.lower().endswith(SUFFIXES):
            yield name
        else:
            yield from (f"{name}/{below}" for below in _walk(folder / name, unread))


def _warn_of(unread: list[str], folder: Path) -> None:
    if unread:
        files = "1 file is" if len(unread) == 1 else f"{len(unread)} files are"
        kinds = [kind if count == 1 else f"{kind} {count}" for kind, count in Counter(unread).most_common()]
        hint = "; HEIC needs pip install pillow-heif" if ".heic" in unread else ""
        _log.warning(f"{files} not read: {shorten_list(kinds)} (in {folder}){hint}")


def _refuse_splits_in(folder: Path, names: list[str]) -> None:
    """Raises UserError if a folder below ``folder`` holds several splits: test images would be trained on."""
    splits: dict[str, dict[str, str]] = {}
    for path in {os.path.dirname(name) for name in names}:
        parts = path.split("/")
        for depth, part in enumerate(parts):
            if word := _SPLIT_WORD.search(part):
                splits.setdefault("/".join(parts[:depth]), {})[word[1].lower()] = part
    for place, by_split in sorted(splits.items()):
        if len(by_split) > 1:
            one = by_split.get("train", min(by_split.values()))
            raise UserError(
                f"{folder / place} holds {' and '.join(sorted(by_split.values()))}: splits, which would all be read as "
                f"one; name a single one, as in folder:{folder / place / one}"
            )


def _entries(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """The names of the folders and of the images in ``folder``, sorted, and the kinds of other files."""
    folders, images, unread = [], [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                suffix = os.path.splitext(entry.name)[1].lower()
                if entry.name[0] == "." or entry.name.lower() in _NO_DATA:
                    continue
                if suffix in SUFFIXES and not entry.is_dir(follow_symlinks=False):  # which asks no file server
                    images.append(entry.name)
                elif suffix in SUFFIXES:
                    unread.append(f"folders called *{suffix}")
                elif entry.is_dir():
                    folders.append(entry.name)
                elif entry.is_symlink() and not os.path.exists(entry.path):
                    unread.append(f"broken link {entry.path}")
                elif not _COMPANION.fullmatch(suffix):
                    unread.append(suffix or "without a suffix")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"no image folder at {folder}; expected images in it, or one folder of images per class"
        ) from None
    except OSError as error:
        raise UserError(f"cannot list {error.filename or folder}: {error.strerror}") from error
    return sorted(folders), sorted(images), unread
