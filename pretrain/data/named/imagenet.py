"""ImageNet-1K and the classes of ImageNet-100, in folders or in the tars as they are downloaded."""

import logging
import os
import re
import tarfile
import tempfile
from pathlib import Path

import numpy as np

from ...common.errors import UserError, shorten_list
from ..folders.images import list_entries, load_classes
from ..image_data import ImageData, MissingSplit
from ..tars.images import TarImages, number_names
from ..tars.index import open_index

log = logging.getLogger(__name__)
_FOLDERS = ("imagenet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC", "")  # in DATA.ROOT
_CLASSES = 1000


def find_folder(name: str, root: Path) -> Path | None:
    """Return the folder that contains ImageNet's train/: a common name in ``root``, or ``root`` itself."""
    candidates = (root / subfolder for subfolder in (name, *_FOLDERS))
    return next((folder for folder in candidates if os.path.isdir(folder / "train")), None)


def load_folders(name: str, split: str, root: Path) -> ImageData:
    """Load ImageNet-1K's folders, or those of ImageNet-100's classes, which may lie in a separate folder.

    Raises:
        UserError: ImageNet, the split or one of its classes is missing.
    """
    top = find_folder(name, root)
    if top is None:
        layout = f"{root}/imagenet/train/n########/*.JPEG and {root}/imagenet/val/n########/*.JPEG"
        layout += ", or the tars ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar"
        remedy = "get it from image-net.org, set DATA.ROOT to the folder above imagenet/, or DATA.TRAIN folder:/path"
        raise UserError(f"no ImageNet in DATA.ROOT {root}: expected {layout}; {remedy}")
    if not os.path.isdir(top / split):
        raise MissingSplit(f"{name}: no {top / split}; expected {top / split}/n########/*.JPEG")
    classes = list_entries(top / "train").folders  # val's labels are train's
    if name == "imagenet100":
        classes = list_imagenet100()
    elif split == "train":
        _warn_if_incomplete(classes, f"{top}/train")
    return load_classes(top / split, classes or None, name)


def list_imagenet100() -> list[str]:
    """List the classes of ImageNet-100, sorted."""
    return sorted((Path(__file__).parent / "imagenet100.txt").read_text().split())


def _warn_if_incomplete(classes: list[str], where: str) -> None:
    if 0 < len(classes) < _CLASSES:
        remedy = "if it should be all of ImageNet, unpack it again"
        log.warning(f"{where} has {len(classes)} of ImageNet's 1,000 classes; {remedy}")


def find_tar(split: str, root: Path) -> str:
    """Return the path of ImageNet's tar of a split in one of the usual folders in ``root``; empty if there is none."""
    for subfolder in _FOLDERS:
        tar = root / subfolder / f"ILSVRC2012_img_{split}.tar"
        if tar.is_file():
            return str(tar)
    return ""


def load_tars(name: str, split: str, root: Path) -> ImageData:
    """Load ImageNet-1K, or the classes of ImageNet-100, from the tars as they are downloaded.

    Raises:
        UserError: the tar of the split, the devkit's tar (val's labels are in it) or one of the classes is missing.
    """
    tar = find_tar(split, root)
    if not tar:
        raise MissingSplit(f"{name}: no ILSVRC2012_img_{split}.tar next to {find_tar('train', root)}")
    entries = open_index(tar)
    names = list(entries.names)
    if split == "train":
        image_classes = [os.path.basename(os.path.dirname(name)) for name in names]
        is_known = all(re.fullmatch(r"n\d{8}", class_name) for class_name in set(image_classes))
    else:
        numbers = [re.fullmatch(r"(?:.*/)?ILSVRC2012_val_(\d{8})\.JPEG", name) for name in names]
        val_classes = _read_val_classes(Path(tar).with_name("ILSVRC2012_devkit_t12.tar.gz"))
        is_known = all(number and 0 < int(number[1]) <= len(val_classes) for number in numbers)
        image_classes = [val_classes[int(number[1]) - 1] for number in numbers if number] if is_known else []
    if not names or not is_known:
        raise UserError(f"{tar} is not ImageNet's {split} tar, or was modified; get it again from image-net.org")
    classes = list_imagenet100() if name == "imagenet100" else sorted(set(image_classes))
    missing = sorted(set(classes) - set(image_classes))
    if missing:
        raise UserError(f"{name}: {tar} lacks the classes {shorten_list(missing)}; get it again from image-net.org")
    if name == "imagenet" and split == "train":
        _warn_if_incomplete(classes, tar)
    included = set(classes)
    positions = [index for index, class_name in enumerate(image_classes) if class_name in included]
    order = np.array(sorted(positions, key=lambda index: (image_classes[index], names[index])))
    labels = number_names([image_classes[index] for index in order], classes)
    return ImageData(TarImages([tar], np.zeros(len(order), np.int32), entries.take(order)), labels, list(classes))


def _read_val_classes(devkit: Path) -> list[str]:
    """Return the class of each validation image in the order of image numbers, as torchvision parses the devkit."""
    from torchvision.datasets import imagenet  # slow to import

    if not devkit.is_file():
        raise MissingSplit(f"{devkit}, which has the labels of val, is missing; download it from image-net.org")
    try:
        with tempfile.TemporaryDirectory() as folder:
            imagenet.parse_devkit_archive(folder, str(devkit.absolute()))
            return imagenet.load_meta_file(folder)[1]
    except (RuntimeError, OSError, ValueError, LookupError, tarfile.TarError) as error:
        raise UserError(f"{devkit} is damaged; download it again from image-net.org") from error
