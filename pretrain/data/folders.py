"""Images in folders: ImageNet, and any folder with images or with one folder per class."""

import logging
import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ..common.errors import UserError, shorten_list
from ..common.images import SUFFIXES
from .image_data import ImageData, MissingSplit
from .sources import Files

log = logging.getLogger(__name__)
_SPLIT_FOLDERS = {"train": ("train", "training"), "val": ("val", "valid", "validation", "test")}  # in any case
_SPLIT_WORD = re.compile(  # in train_images, trainA, trainset, testing_data; a whole name: dev, evaluation
    "(?<![A-Za-z])(?i:(train|val|test)(ing|id|idation|val)?(set|data|split)?)(?![a-z])"
    "|^(?i:(dev|eval)(uation)?(set|data|split)?)$"
)
_IMAGES = re.compile("(?i:jpeg)?(?i:images?|imgs?)(Tr|Ts)?")  # of segmentation data sets, such as VOC's and nnU-Net's
_MASKS = re.compile("(?i:masks?|labels?|annotations?|segmentations?|gt|ground_?truth)(Tr|Ts|Class|Object)?")
NO_DATA = {"@eadir", "#recycle", "@recycle", "$recycle.bin", "recycler", "lost+found", "found.000", "__macosx"}
NO_DATA |= {"#snapshot", "~snapshot", "@recently-snapshot", "system volume information"}  # NAS, disks, archives
COMPANION = re.compile(r"\.(txt|jsonl?|xml|[ct]sv|md|html?|ya?ml|py|sh|log|ini|db|cache|xmp|aae)")  # goes with images
IMAGENET_FOLDERS = ("imagenet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC", "")  # in DATA.ROOT
_THREADS = 16  # threads that list class folders; file servers have high latency


def load_folder(folder: Path, split: str) -> ImageData:
    """Load a split of ``folder``; a folder without split subfolders serves as every split.

    Raises:
        UserError: there is no image, the split is missing, or it is not clear which folders are splits and which are
            classes.
    """
    folders, *_ = _list_entries(folder)
    without_year = {f: re.sub(r"(19|20)\d\d$", "", f.lower()) for f in folders}  # COCO's train2017 is train
    split_folders = {key: [f for f in folders if without_year[f] in names] for key, names in _SPLIT_FOLDERS.items()}
    splits = [*split_folders["train"], *split_folders["val"]]
    if not splits:
        return load_classes(folder, None, f"folder:{folder}", allow_flat=True)
    class_folders = [f for f in folders if f not in splits]
    if class_folders and not (split_folders["train"] and split_folders["val"]):
        problem = f"{folder} contains {splits[0]}/ next to {class_folders[0]}/; is {splits[0]}/ a split or a class?"
        remedy = f"for a split, write folder:{folder}/{splits[0]}; for a class, move all classes into {folder}/train/"
        raise UserError(f"{problem} {remedy}")
    candidates = [f for f in split_folders[split] if without_year[f] != "test"] or split_folders[split]
    if not candidates:
        split_names = f"{'/, '.join(_SPLIT_FOLDERS[split])}/"
        remedy = f"rename it to {split_names}, or choose a folder of images: folder:{folder}/{splits[0]}"
        raise MissingSplit(f"{folder} contains no folder of the {split} split; {remedy}")
    if class_folders and split == "train":
        log.warning(f"not read, since the other folders are splits: {shorten_list(class_folders)} (in {folder})")
    if len(candidates) > 1:
        both = f"{candidates[0]}/ and {candidates[1]}/"
        raise UserError(f"{folder} contains {both}, both of the {split} split; keep one of them")
    classes = _list_entries(folder / split_folders["train"][0])[0] if split_folders["train"] else []
    return load_classes(folder / candidates[0], classes or None, f"folder:{folder}", allow_flat=True)


def find_imagenet(name: str, root: Path) -> Path | None:
    """Return the folder that contains ImageNet's train/: a common name in ``root``, or ``root`` itself."""
    candidates = (root / subfolder for subfolder in (name, *IMAGENET_FOLDERS))
    return next((folder for folder in candidates if os.path.isdir(folder / "train")), None)


def load_imagenet_folders(name: str, split: str, root: Path) -> ImageData:
    """Load ImageNet-1K's folders, or those of ImageNet-100's classes, which may lie in a separate folder.

    Raises:
        UserError: ImageNet, the split or one of its classes is missing.
    """
    top = find_imagenet(name, root)
    if top is None:
        layout = f"{root}/imagenet/train/n########/*.JPEG and {root}/imagenet/val/n########/*.JPEG"
        layout += ", or the tars ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar"
        remedy = "get it from image-net.org, set DATA.ROOT to the folder above imagenet/, or DATA.TRAIN folder:/path"
        raise UserError(f"no ImageNet in DATA.ROOT {root}: expected {layout}; {remedy}")
    if not os.path.isdir(top / split):
        raise MissingSplit(f"{name}: no {top / split}; expected {top / split}/n########/*.JPEG")
    classes = _list_entries(top / "train")[0]  # val's labels are train's
    if name == "imagenet100":
        classes = list_imagenet100()
    return load_classes(top / split, classes or None, name)


def list_imagenet100() -> list[str]:
    """List the classes of ImageNet-100, sorted."""
    return sorted((Path(__file__).parent / "imagenet100.txt").read_text().split())


def load_classes(folder: Path, classes: list[str] | None, name: str, allow_flat: bool = False) -> ImageData:
    """Load the images below one folder per class.

    Args:
        classes: class folders to read, in the order of their labels (default: all).
        name: the data set, for messages.
        allow_flat: accept unlabeled images directly in ``folder``, and missing classes.

    Raises:
        UserError: there is no image, the class folders are not those expected, or folders below ``folder``, which are
            not named in ``classes``, are splits.
    """
    class_folders, images, unread = _list_entries(folder)
    if images and not allow_flat:
        remedy = "sort them (ImageNet's val: torchvision.datasets.ImageNet does it)"
        expected = f"one folder per class, {folder}/n########/*.JPEG"
        raise MissingSplit(f"{name}: images are directly in {folder}; expected {expected}; {remedy}")
    if images:
        names = list_images(folder)
        _check_no_splits(folder, names)
        _check_no_masks(folder, names)
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
        class_images = list(pool.map(lambda label: list(_walk(folder / classes[label], unread)), labels))
    warn_of_unread(unread, folder)
    pairs = zip(labels, class_images, strict=True)
    names = [f"{classes[label]}/{image}" for label, images in pairs for image in images]
    if reads_all:
        _check_no_splits(folder, names)
    if allow_flat:
        _check_no_masks(folder, names)
    if not names:
        expected = f"files ending in {' '.join(SUFFIXES)}, flat or in one folder per class"
        raise UserError(f"{name}: no images in {folder}; expected {expected}")
    counts = [len(images) for images in class_images]
    return ImageData(Files(folder, names), np.repeat(np.array(labels, np.int64), counts), list(classes))


def list_images(folder: Path) -> list[str]:
    """List names relative to ``folder`` in sorted order, with subfolders expanded in place."""
    unread: list[str] = []
    names = list(_walk(folder, unread))
    warn_of_unread(unread, folder)
    return names


def _walk(folder: Path, unread: list[str]) -> Iterator[str]:
    folders, images, other_files = _list_entries(folder)
    unread.extend(other_files)  # from several threads
    for name in sorted([*folders, *images]):
        if name.lower().endswith(SUFFIXES):
            yield name
        else:
            yield from (f"{name}/{image}" for image in _walk(folder / name, unread))


def warn_of_unread(unread: list[str], folder: Path) -> None:
    """Log how many files of each of the kinds ``unread`` are in ``folder``."""
    if unread:
        files = "1 file is" if len(unread) == 1 else f"{len(unread)} files are"
        kinds = [kind if count == 1 else f"{kind} {count}" for kind, count in Counter(unread).most_common()]
        hint = "; HEIC needs pip install pillow-heif" if ".heic" in unread else ""
        log.warning(f"{files} not read: {shorten_list(kinds)} (in {folder}){hint}")


def _check_no_splits(folder: Path, names: list[str]) -> None:
    mixed = find_mixed_splits(_list_parents(names))
    if mixed:
        parent, splits = mixed
        problem = f"{folder / parent} contains {' and '.join(sorted(splits))}: splits, not classes"
        raise UserError(f"{problem}; choose a single one, as in folder:{folder / parent / splits[0]}")


def _check_no_masks(folder: Path, names: list[str]) -> None:
    """Raise UserError if masks lie in a folder next to that of their images: they would be trained on."""
    folders: dict[re.Pattern[str], dict[str, str]] = {_IMAGES: {}, _MASKS: {}}  # kind -> parent -> name of a folder
    for parent, name in _list_folders(sorted(_list_parents(names))):
        for kind in folders:
            if kind.fullmatch(name):
                folders[kind].setdefault(parent, name)
    for parent in sorted(folders[_IMAGES].keys() & folders[_MASKS].keys()):
        images = posixpath.join(parent, folders[_IMAGES][parent])
        masks = posixpath.join(parent, folders[_MASKS][parent])
        if _list_stems(names, images).isdisjoint(_list_stems(names, masks)):
            continue  # classes of these names
        remedy = "move the masks away"
        if len(folders[_IMAGES]) == 1:
            remedy += f", or choose folder:{folder / images}"
        raise UserError(f"{folder / images} lies next to {masks}/: masks, not images; {remedy}")


def _list_parents(names: list[str]) -> set[str]:
    return {name.rpartition("/")[0] for name in names}  # a fifth of the time of os.path.dirname


def _list_stems(names: list[str], folder: str) -> set[str]:
    """List the names of files below ``folder`` without suffix, also without a last word such as ``_mask``."""
    stems = {posixpath.splitext(posixpath.basename(name))[0] for name in names if name.startswith(f"{folder}/")}
    return (stems | {stem.rpartition("_")[0] for stem in stems}) - {""}


def find_mixed_splits(paths: Iterable[str]) -> tuple[str, list[str]] | None:
    """Return where ``paths`` contain several splits, and their names there, train first; None if nowhere.

    If all were read as one data set, test images would be trained on.
    """
    splits: dict[str, dict[str, str]] = {}
    for parent, name in _list_folders(paths):
        word = _SPLIT_WORD.search(name)
        if word:
            splits.setdefault(parent, {})[(word[1] or word[4]).lower()] = name
    for parent, by_split in sorted(splits.items()):
        if len(by_split) > 1:
            return parent, sorted(by_split.values(), key=lambda part: (part != by_split.get("train"), part))
    return None


def _list_folders(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the parent and the name of every folder on ``paths``."""
    for path in paths:
        parts = path.split("/")
        yield from (("/".join(parts[:depth]), part) for depth, part in enumerate(parts))


def _list_entries(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """List the names of the folders and of the images in ``folder``, sorted, and the kinds of other files."""
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
                elif entry.is_dir():
                    folders.append(entry.name)
                elif entry.is_symlink() and not os.path.exists(entry.path):
                    unread.append(f"broken link {entry.path}")
                elif not COMPANION.fullmatch(suffix):
                    unread.append(suffix or "without a suffix")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"no image folder at {folder}; expected images, or one folder per class") from None
    except OSError as error:
        raise UserError(f"cannot list {error.filename or folder}: {error.strerror}; check its permissions") from error
    return sorted(folders), sorted(images), unread
