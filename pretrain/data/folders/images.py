"""Images in folders: directly in it, or one folder per class, with or without folders of splits."""

import errno
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...common.errors import UserError, shorten_list
from ...common.files import build_read_error, suggest_making
from ...common.images import SUFFIXES
from ...common.split_folders import SPLIT_FOLDERS, find_splits, remove_year
from ..image_data import ImageData, MissingSplit
from ..names import suggest_form
from ..sources import Files
from .layout import find_masks, find_mixed_splits, list_parents

log = logging.getLogger(__name__)
NO_DATA = {"@eadir", "#recycle", "@recycle", "$recycle.bin", "recycler", "lost+found", "found.000", "__macosx"}
NO_DATA |= {"#snapshot", "~snapshot", "@recently-snapshot", "system volume information"}  # NAS, disks, archives
COMPANION = re.compile(r"\.(txt|jsonl?|xml|[ct]sv|md|html?|ya?ml|py|sh|log|ini|db|cache|xmp|aae)")  # goes with images
_THREADS = 16  # threads that list class folders; file servers have high latency


class Entries(NamedTuple):
    """What is in a folder: the names of folders and of images, sorted, and the kinds of the files that are not read."""

    folders: list[str]
    images: list[str]
    unread: list[str]


def load_folder(folder: Path, split: str) -> ImageData:
    """Load a split of ``folder``; a folder without split subfolders serves as every split.

    Raises:
        UserError: there is no image, the split is missing, or it is not clear which folders are splits and which are
            classes.
    """
    entries = list_entries(folder)
    split_folders = find_splits(entries.folders)
    splits = [*split_folders["train"], *split_folders["val"]]
    if not splits:
        return _load_entries(folder, entries, None, f"folder:{folder}", allow_flat=True)
    class_folders = [f for f in entries.folders if f not in splits]
    if class_folders and not (split_folders["train"] and split_folders["val"]):
        problem = f"{folder} contains {splits[0]}/ next to {class_folders[0]}/; is {splits[0]}/ a split or a class?"
        remedy = f"for a split, write folder:{folder}/{splits[0]}; for a class, move all classes into {folder}/train/"
        raise UserError(f"{problem} {remedy}")
    candidates = [f for f in split_folders[split] if remove_year(f) != "test"] or split_folders[split]
    if not candidates:
        split_names = f"{'/, '.join(SPLIT_FOLDERS[split])}/"
        remedy = f"rename it to {split_names}, or choose a folder of images: folder:{folder}/{splits[0]}"
        raise MissingSplit(f"{folder} contains no folder of the {split} split; {remedy}")
    if class_folders and split == "train":
        log.warning(f"not read, since the other folders are splits: {shorten_list(class_folders)} (in {folder})")
    if len(candidates) > 1:
        both = f"{candidates[0]}/ and {candidates[1]}/"
        raise UserError(f"{folder} contains {both}, both of the {split} split; keep one of them")
    entries = list_entries(folder / candidates[0])
    classes: list[str] = []  # of the training images, whose order is that of the labels in every split
    if split_folders["train"]:
        train = split_folders["train"][0]
        classes = entries.folders if train == candidates[0] else list_entries(folder / train).folders
    return _load_entries(folder / candidates[0], entries, classes or None, f"folder:{folder}", allow_flat=True)


def has_splits(folder: Path) -> bool:
    """Return True if ``folder`` contains folders of splits, False if it serves as every split."""
    return any(find_splits(list_entries(folder).folders).values())


def load_classes(folder: Path, classes: list[str] | None, name: str) -> ImageData:
    """Load the images of a named data set, which lie below one folder per class (see `_load_entries`)."""
    return _load_entries(folder, list_entries(folder), classes, name)


def _load_entries(
    folder: Path, entries: Entries, classes: list[str] | None, name: str, allow_flat: bool = False
) -> ImageData:
    """Load the images below one folder per class.

    Args:
        entries: what is in ``folder``.
        classes: class folders to read, in the order of their labels (default: all).
        name: the data set, for messages.
        allow_flat: accept unlabeled images directly in ``folder``, and missing classes.

    Raises:
        UserError: there is no image, the class folders are not those expected, or folders below ``folder``, which are
            not named in ``classes``, are splits.
    """
    class_folders, images, unread = entries
    if images and not allow_flat:
        remedy = "sort them (ImageNet's val: torchvision.datasets.ImageNet does it)"
        expected = f"one folder per class, {folder}/n########/*.JPEG"
        raise MissingSplit(f"{name}: images are directly in {folder}; expected {expected}; {remedy}")
    if images:
        names = list_images(folder, entries)
        _check_no_splits(folder, names)
        _check_no_masks(folder, names)
        if len(images) < len(names) / 2:  # such as the preview of a data set
            what = f"{shorten_list(images)} directly in {folder}, next to {shorten_list(class_folders)}"
            log.warning(f"{what}: no image has a label; if the folders are classes, move the other images away")
        return ImageData(Files(folder, names), None, [])
    reads_all = classes is None
    classes = class_folders if classes is None else classes
    missing = sorted(set(classes) - set(class_folders))
    if missing and not allow_flat:
        count = f"{len(missing)} of {len(classes)} class folders"
        raise MissingSplit(f"{name}: {count} are missing in {folder}: {missing[0]}, ...; copy them there")
    unknown = sorted(set(class_folders) - set(classes))
    if unknown and allow_flat:
        raise MissingSplit(f"{name}: {folder}/{unknown[0]} is not one of the training classes; rename or remove it")
    labels = [label for label, class_name in enumerate(classes) if class_name in class_folders]
    with ThreadPoolExecutor(_THREADS) as pool:
        class_images = list(pool.map(lambda label: list(_walk(folder / classes[label], None, unread)), labels))
    warn_of_unread(unread, folder)
    pairs = zip(labels, class_images, strict=True)
    names = [f"{classes[label]}/{image}" for label, images in pairs for image in images]
    if reads_all:
        _check_no_splits(folder, names)
    if allow_flat:
        _check_no_masks(folder, names)
    if not names and ".tar" in unread:
        raise UserError(f"{name}: no images in {folder}: {suggest_form(folder)}")
    if not names:
        expected = f"files ending in {' '.join(SUFFIXES)}, flat or in one folder per class"
        raise UserError(f"{name}: no images in {folder}; expected {expected}")
    counts = [len(images) for images in class_images]
    return ImageData(Files(folder, names), np.repeat(np.array(labels, np.int64), counts), list(classes))


def list_images(folder: Path, entries: Entries | None = None) -> list[str]:
    """List names relative to ``folder`` in sorted order, with subfolders expanded in place.

    Args:
        entries: what is in ``folder``, if that is known.
    """
    unread: list[str] = []
    names = list(_walk(folder, entries, unread))
    warn_of_unread(unread, folder)
    return names


def _walk(folder: Path, entries: Entries | None, unread: list[str]) -> Iterator[str]:
    folders, images, other_files = entries or list_entries(folder)
    unread.extend(other_files)  # from several threads
    for name in sorted([*folders, *images]):
        if name.lower().endswith(SUFFIXES):
            yield name
        else:
            yield from (f"{name}/{image}" for image in _walk(folder / name, None, unread))


def warn_of_unread(unread: list[str], folder: Path) -> None:
    """Log how many files of each of the kinds ``unread`` are in ``folder``."""
    if unread:
        files = "1 file is" if len(unread) == 1 else f"{len(unread)} files are"
        kinds = [kind if count == 1 else f"{kind} {count}" for kind, count in Counter(unread).most_common()]
        hint = "; HEIC needs pip install pillow-heif" if ".heic" in unread else ""
        log.warning(f"{files} not read: {shorten_list(kinds)} (in {folder}){hint}")


def _check_no_splits(folder: Path, names: list[str]) -> None:
    mixed = find_mixed_splits(list_parents(names))
    if mixed:
        parent, splits = mixed
        problem = f"{folder / parent} contains {' and '.join(sorted(splits))}: splits, not classes"
        remedy = f"choose a single one, as in folder:{folder / parent / splits[0]}"
        if not parent:
            remedy += f"; if they are classes, move all classes into {folder}/train/"
        raise UserError(f"{problem}; {remedy}")


def _check_no_masks(folder: Path, names: list[str]) -> None:
    """Raise UserError if masks lie next to their images: they would be trained on."""
    masks = find_masks(names)
    if masks:
        remedy = "move the masks away"
        if masks.folder:
            remedy += f", or choose folder:{folder / masks.folder}"
        remedy += "; if they are not masks, give them other names"
        raise UserError(f"{folder / masks.images} {masks.describe()}; {remedy}")


def list_entries(folder: Path) -> Entries:
    """List what is in ``folder``; raise UserError if there is no such folder."""
    folders: list[str] = []
    images: list[str] = []
    unread: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                suffix = os.path.splitext(entry.name)[1].lower()
                if entry.name[0] == "." or entry.name.lower() in NO_DATA:
                    continue
                if suffix in SUFFIXES and not entry.is_dir(follow_symlinks=False):  # avoids one stat call per file
                    images.append(entry.name)
                elif suffix in SUFFIXES:
                    unread.append(f"folders called *{suffix}")
                elif entry.is_symlink() and _is_broken(entry.path):
                    unread.append(f"broken link {entry.path}")
                elif entry.is_dir():
                    _check_leads_elsewhere(entry)
                    folders.append(entry.name)
                elif not COMPANION.fullmatch(suffix):
                    unread.append(suffix or "without a suffix")
    except (FileNotFoundError, NotADirectoryError):
        form = suggest_form(folder) or "expected images, or one folder per class"
        remedy = suggest_making(folder) or f"; {form}"
        shown = repr(str(folder)) if str(folder)[-1].isspace() else folder  # a blank at its end would not be seen
        raise UserError(f"no image folder at {shown}{remedy}") from None
    except OSError as error:
        raise build_read_error(error.filename or folder, error, "list") from error
    return Entries(sorted(folders), sorted(images), unread)


def _is_broken(link: str) -> bool:
    """Return whether a link leads nowhere, or back to itself."""
    try:
        os.stat(link)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return True
    return False


def _check_leads_elsewhere(entry: os.DirEntry[str]) -> None:
    """Raise UserError if a link leads to a folder that contains it: its images would be listed without end."""
    target = os.path.realpath(entry.path) if entry.is_symlink() else ""
    if target and Path(os.path.realpath(os.path.dirname(entry.path))).is_relative_to(target):
        raise UserError(f"{entry.path} is a link to {target}, which contains it; remove the link")
