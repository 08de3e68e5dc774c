"""Named data sets, image folders and tars, or several of them -> decodable images, with labels where they exist.

Every set has a fixed order (sorted names), so an index means the same image in every process and every run.
"""

import contextlib
import dataclasses
import itertools
import logging
import os
import re
import shlex
from collections.abc import Callable
from glob import glob
from pathlib import Path
from typing import Any

from ..common.errors import UserError, shorten_list, suggest_name
from ..common.files import expand
from ..common.image_checks.class_names import warn_of_alike
from ..common.image_checks.pixels import describe
from ..common.images import CorruptImage
from .contract import open_images
from .folders import images as folders
from .image_data import ImageData, MissingSplit, merge
from .named import archives, imagenet
from .names import FOLDER, LIST_FORM, TAR, check_local, find_path, list_names, suggest_form
from .tars import images as tars

__all__ = ["LOADERS", "NAMES", "ImageData", "MissingSplit", "check_exists", "has_splits", "is_there", "load"]

log = logging.getLogger(__name__)
NAMES = ("imagenet", "imagenet100", *archives.LAYOUTS)  # the data sets that are found in DATA.ROOT
LOADERS: dict[str, Callable[[str, Path], ImageData]] = {}  # users register (split, DATA.ROOT) -> images by name


def load(name: str, split: str, root: str | Path = "datasets", download: bool = False) -> ImageData:
    """Load a split of a data set.

    Args:
        name: one of NAMES or LOADERS, or ``folder:/path`` with images (no labels) or one folder per class. Folders
            in it that are named like splits (train, training, val, valid, validation, test, with or without a year)
            are splits, never classes; test is the val split where there is no other. ``tar:/data/*.tar`` or
            ``tar:/data/{000..146}.tar`` names uncompressed tars, which are every split. A list of several,
            ``['folder:/a', 'folder:/b']``, is one data set; classes of the same name are one class.
        split: ``train`` or ``val`` (the test split where a data set has no other). The ``train`` split of stl10 is its
            labeled images followed by its unlabeled ones (label -1).
        root: the folder of the named data sets.
        download: fetch the data set if it is missing and may be fetched.

    Raises:
        UserError: unknown name or split; missing, empty or damaged data (the message shows the layout expected); a
            loader returned anything but `ImageData`, or images, labels or names of the wrong type.
    """
    if split not in ("train", "val"):
        raise UserError(f"{name} has no split {split!r}; choose train or val")
    names = list_names(name)
    if len(names) > 1:
        return _load_several(names, name, split, root, download)
    load_split = _find(names[0], root, download)[1]
    data = load_split(split)
    warn_of_alike(data.classes, names[0])
    return dataclasses.replace(data, name=names[0])


def is_there(name: str, root: str | Path) -> bool:
    """Return whether this machine has one of NAMES."""
    return bool(_find(name, root, download=False)[0])


def check_exists(name: str, root: str | Path = "datasets", download: bool = False) -> None:
    """Raise UserError for an unknown name or a missing folder, without listing the images, which would take long."""
    names = list_names(name)
    for member in names:
        exists, load_split = _find(member, root, download)
        if not exists:
            load_split("train")  # raises the error that shows the layout expected
    if len(names) > 1:
        _check_no_overlap(names)


def _load_several(names: list[str], name: str, split: str, root: str | Path, download: bool) -> ImageData:
    """Load a split of several data sets as one; those without splits belong to train where others have a val split."""
    _check_no_overlap(names)
    with_splits = [member for member in names if has_splits(member)]
    if split == "val" and 0 < len(with_splits) < len(names):
        log.info(f"the val split is that of {shorten_list(with_splits)}; the others of {name} have none")
        names = with_splits
    parts: list[ImageData] = []
    for member in names:
        try:
            parts.append(load(member, split, root, download))
        except MissingSplit as reason:
            if split == "train":
                raise
            log.info(f"skipping {member}, which has no val split: {reason}")
    if not parts:
        raise MissingSplit(f"none of {name} has a val split; set DATA.VAL to labeled images")
    merged = merge(parts, name)
    warn_of_alike(merged.classes, name)
    return merged


def has_splits(value: str) -> bool:
    """Return False if a key's ``value`` names only data that serve as every split.

    These are tars, and folders without folders of splits.
    """
    for name in list_names(value):
        if name.startswith(FOLDER) and folders.has_splits(_parse_path(name)):
            return True
        if not name.startswith((FOLDER, TAR)):
            return True
    return False


def _check_no_overlap(names: list[str]) -> None:
    """Raise UserError if one of several folders is in another one, or tars are in two: images would be read twice."""
    folder_paths = {name: _parse_path(name).resolve() for name in names if name.startswith(FOLDER)}
    patterns = {name: find_path(name) for name in names if name.startswith(TAR)}
    tar_paths = {name: set(map(os.path.realpath, tars.find_tars(pattern))) for name, pattern in patterns.items()}
    for name, other in itertools.permutations(names, 2):
        has_folders = name in folder_paths and other in folder_paths
        is_inside = has_folders and folder_paths[name].is_relative_to(folder_paths[other])
        if is_inside or not tar_paths.get(name, set()).isdisjoint(tar_paths.get(other, ())):
            problem = f"{name} is in {other}" if is_inside else f"{name} and {other} have tars in common"
            raise UserError(f"{problem}, so images would be read twice; remove one of them")


def _find(name: str, root: str | Path, download: bool) -> tuple[Any, Callable[[str], ImageData]]:
    """Return whether a data set exists or may be fetched, and the function that loads a split of it."""
    folder = Path(expand(root))
    if name in LOADERS:  # registered loaders locate their own images
        return True, lambda split: _call_loader(name, split, folder)
    check_local(name)
    if name.startswith(FOLDER):
        path = _parse_path(name)
        is_folder = os.path.isdir(path)
        if not is_folder:
            _check_no_pattern(name, path)
        return is_folder, lambda split: folders.load_folder(path, split)
    if name.startswith(TAR):
        pattern = find_path(name)
        return tars.find_tars(pattern), lambda _split: tars.load_tars(pattern)
    check_local(str(root))
    if name in ("imagenet", "imagenet100"):
        unpacked = imagenet.find_folder(name, folder)
        tar = imagenet.find_tar("train", folder)
        load_split = imagenet.load_tars if tar and not unpacked else imagenet.load_folders
        return unpacked or tar, lambda split: load_split(name, split, folder)
    if name in archives.LAYOUTS:
        exists = download or archives.find_folder(name, folder).is_dir()
        return exists, lambda split: archives.load(name, split, folder, download)
    form = suggest_form(name) or (f"write {shlex.quote(TAR + name)}" if name.lower().endswith(".tar") else "")
    if form:
        raise UserError(f"{name!r} is not the name of a data set: {form}")
    known = (*NAMES, *LOADERS)
    known_text = f"{', '.join(known)}, folder:/path, tar:/path/*.tar or a list of them"
    raise UserError(f"unknown data set {name!r}; choose {known_text}{suggest_name(name, known)}")


def _check_no_pattern(name: str, path: Path) -> None:
    """Raise UserError for a missing folder with * or braces, which are read in the names of tars alone."""
    if not re.search(r"[*?{\[]", str(path)):
        return
    matches = [match for form in tars.expand_braces(str(path)) for match in sorted(glob(form)) if os.path.isdir(match)]
    form = f'"{[FOLDER + match for match in matches]}"' if 1 < len(matches) <= 5 else LIST_FORM
    raise UserError(f"{name!r} is a pattern, not a folder; write its parent folder, or a list of folders: {form}")


def _call_loader(name: str, split: str, root: Path) -> ImageData:
    """Call a user's loader, whose errors keep their traceback, and check what it returns."""
    loader = LOADERS[name]
    if not callable(loader):
        remedy = "register a function load(split, root), as docs/templates/my_data.py does"
        raise UserError(f"LOADERS[{name!r}] is {describe(loader)}; {remedy}")
    try:
        loaded = loader(split, root)
    except UserError:
        raise
    except Exception as error:
        error.add_note(f"the loader of the data set {name!r}, called for {split!r} and {root!r}, failed")
        raise
    data = open_images(loaded, name, split)
    with contextlib.suppress(CorruptImage):  # DATALOADER.ON_CORRUPT decides whether training fails
        data.read(0)  # a mistake in the user's source is found before a run starts
    return data


def _parse_path(name: str) -> Path:
    path = find_path(name)
    if not path:
        raise UserError(f"{name.strip()!r} names no folder; write folder:/path (is a shell variable empty?)")
    return Path(expand(path))
