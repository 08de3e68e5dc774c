"""Named data sets, image folders and tars -> decodable images, with labels where they exist.

Every set has a fixed order (sorted names), so an index means the same image in every process and every run.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..common.errors import UserError, suggest_name
from ..common.files import expand
from ..common.images import CorruptImage
from . import archives, folders
from .contract import describe
from .image_data import ImageData, MissingSplit, open_images
from .tars import images as tars

__all__ = ["FOLDERS", "LOADERS", "ImageData", "MissingSplit", "check_exists", "load"]

FOLDERS = {  # data set -> its folder in DATA.ROOT
    "imagenet": "imagenet",
    "imagenet100": "imagenet100",
    **{name: layout.partition("/")[0] for name, layout in archives.LAYOUTS.items()},
}
LOADERS: dict[str, Callable[[str, Path], ImageData]] = {}  # users register (split, DATA.ROOT) -> images by name


def load(name: str, split: str, root: str | Path = "datasets", download: bool = False) -> ImageData:
    """Load a split of a data set.

    Args:
        name: one of FOLDERS or LOADERS, or ``folder:/path`` with images (no labels) or one folder per class. Folders
            in it that are named like splits (train, training, val, valid, validation, test, with or without a year)
            are splits, never classes; test is the val split where there is no other. ``tar:/data/*.tar`` or
            ``tar:/data/{000..146}.tar`` names uncompressed tars, which are every split.
        split: ``train`` or ``val`` (the test split where a data set has no other). The ``train`` split of stl10 is its
            labeled images followed by its unlabeled ones (label -1).
        root: the folder of the named data sets.
        download: fetch the data set if it is missing and may be fetched.

    Raises:
        UserError: unknown name or split; missing, empty or damaged data (the message shows the layout expected); a
            loader returned something else than `ImageData`, or images, labels or names of another kind.
    """
    if split not in ("train", "val"):
        raise UserError(f"{name} has no split {split!r}; choose train or val")
    load_split = _find(name, root, download)[1]
    data = open_images(load_split(split), name, split)
    if name in LOADERS:  # a mistake in a user's source is found before a run starts
        with contextlib.suppress(CorruptImage):  # DATALOADER.ON_CORRUPT decides whether training fails
            data.read(0)
    return data


def check_exists(name: str, root: str | Path = "datasets", download: bool = False) -> None:
    """Raise UserError for an unknown name or a missing folder, without listing the images, which would take long."""
    is_there, load_split = _find(name, root, download)
    if not is_there:
        load_split("train")  # raises the error that shows the layout expected


def _find(name: str, root: str | Path, download: bool) -> tuple[Any, Callable[[str], ImageData]]:
    """Return whether a data set exists or may be fetched, and the function that loads a split of it."""
    folder = Path(expand(root))
    if name in LOADERS:  # registered loaders locate their own images
        return True, lambda split: _call_loader(name, split, folder)
    if name.startswith("folder:"):
        path = _parse_path(name)
        return os.path.isdir(path), lambda split: folders.load_folder(path, split)
    if name.startswith(tars.PREFIX):
        pattern = name.removeprefix(tars.PREFIX)
        return tars.find_tars(pattern), lambda _split: tars.load_tars(pattern)
    if name in ("imagenet", "imagenet100"):
        unpacked = folders.find_imagenet(name, folder)
        tar = tars.find_imagenet_tar("train", folder)
        load_split = tars.load_imagenet_tars if tar and not unpacked else folders.load_imagenet_folders
        return unpacked or tar, lambda split: load_split(name, split, folder)
    if name in FOLDERS:
        is_there = download or os.path.isdir(folder / FOLDERS[name])
        return is_there, lambda split: archives.load(name, split, folder, download)
    if os.path.isdir(os.path.expanduser(name)):
        raise UserError(f"{name!r} is a folder; write folder:{name}")
    known = (*FOLDERS, *LOADERS)
    known_text = f"{', '.join(known)}, folder:/path or tar:/path/*.tar"
    raise UserError(f"unknown data set {name!r}; choose {known_text}{suggest_name(name, known)}")


def _call_loader(name: str, split: str, root: Path) -> Any:
    """Call a user's loader, whose errors keep their traceback: only it shows where the mistake is."""
    loader = LOADERS[name]
    if not callable(loader):
        remedy = "register a function load(split, root), as docs/templates/my_data.py does"
        raise UserError(f"LOADERS[{name!r}] is {describe(loader)}; {remedy}")
    try:
        return loader(split, root)
    except UserError:
        raise
    except Exception as error:
        error.add_note(f"the loader of the data set {name!r}, called for {split!r} and {root!r}, failed")
        raise


def _parse_path(name: str) -> Path:
    path = name.partition(":")[2].strip()
    if not path:
        raise UserError(f"{name!r} names no folder; write folder:/path (is a shell variable empty?)")
    return Path(expand(path))
