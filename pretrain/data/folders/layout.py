"""What the names of folders and files say about a data set: which are splits, and which are masks of images."""

import os
import posixpath
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_SPLIT = re.compile(  # in train_images, trainA, trainset, testing_data; a whole name: dev, evaluation
    "(?<![A-Za-z])(?i:(train|val|test)(ing|idation|id|val)?(set|data|split)?)(?![a-z])"
    "|^(?i:(dev|eval)(uation)?(set|data|split)?)$"
)
_NEUTRAL = re.compile(
    "(data|set|dataset|split|part|folder|images?|imgs?|photos?|pictures?|frames?|crops?|resized|jpe?g|png|raw|new|old"
    "|all|full|final|clean|other|small|large|mini|public|private|(un)?label(l)?ed)"
)
_MASK_WORDS = (
    "masks?|segmentations?|segs?|labels?|label_?ids|annotations?|gt|gt_?fine|gt_?coarse|ground_?truths?|trimaps?"
    "|depths?|disparity|disparities|normals|edges|contours|flow|mattes?|alphas?|saliency|panoptic|semantic|instances?"
)
_KIND = "(?:(?:binary|semantic|instance|panoptic|segmentation|seg|gt)[_-]?)?"
_MASK = f"(?:{_KIND}(?:{_MASK_WORDS})(?:[_-]?(?:maps?|images?|imgs?))?)"
_IMAGE = "(?:(?:jpeg)?(?:images?|imgs?)|rgb|colou?rs?|photos?|pictures?|frames?|inputs?|originals?|left_?img_?8bit|sat)"
_MASK_FOLDER = re.compile(f"(?i:{_MASK})(Tr|Ts|Class|Object)?")  # of segmentation data sets: VOC's, nnU-Net's
_IMAGE_FOLDER = re.compile(f"(?i:{_IMAGE})(Tr|Ts)?")
_MASK_FILE = re.compile(  # 1.seg.png, 1_mask_2.png; mask_1.png
    f"(?i)[._ -]{_MASK}(?:[._ -]?[0-9]+)?[.][a-z0-9]+$|(?:^|(?<=/)){_MASK}[._ -](?P<end>[^/]+)[.][a-z0-9]+$"
)
_IN_MASK_FILE = [  # one of these is in each of its names
    *(b"mask", b"seg", b"label", b"annot", b"gt", b"truth", b"trimap", b"depth", b"dispari", b"normals", b"edges"),
    *(b"contours", b"flow", b"matte", b"alpha", b"saliency", b"panoptic", b"semantic", b"instance"),
]
_IMAGE_WORD = re.compile(f"(?i)[._ -]{_IMAGE}$|(?:^|(?<=/)){_IMAGE}[._ -](?=[^/]+$)")
_FEW = 20  # fewer than 1 mask in so many files are images that happen to have such names


def list_parents(names: Iterable[str]) -> set[str]:
    """List the folders of ``names``."""
    return {name.rpartition("/")[0] for name in names}  # a fifth of the time of os.path.dirname


def find_mixed_splits(paths: Iterable[str]) -> tuple[str, list[str]] | None:
    """Return where ``paths`` contain several splits, and their names there, train first; None if nowhere.

    If all were read as one data set, test images would be trained on. Two names are splits of one data set if they
    differ in nothing but the word for the split: train_a and test_a are, and train_station and test_tube are not.
    """
    splits: dict[tuple[str, str], dict[str, str]] = {}
    for parent, name in _list_folders(paths):
        word = _SPLIT.search(name)
        if word:
            other_words = re.findall("[a-z]{2,}", f"{name[: word.start()]} {name[word.end() :]}".lower())
            data_set = " ".join(other for other in other_words if not _NEUTRAL.fullmatch(other))
            splits.setdefault((parent, data_set), {})[(word[1] or word[4]).lower()] = name
    for (parent, _), by_split in sorted(splits.items()):
        if len(by_split) > 1:
            return parent, sorted(by_split.values(), key=lambda part: (part != by_split.get("train"), part))
    return None


@dataclass(frozen=True)
class Masks:
    """Masks, depth or labels as images, next to the images that they belong to.

    Attributes:
        images: an image, or the folder of the images.
        masks: its masks, or their folder.
        folder: the only folder of images, which can be read instead; "" if there is none.
        count: how many of the files are masks; "" for folders.
    """

    images: str
    masks: str
    folder: str = ""
    count: str = ""

    def describe(self) -> str:
        """Return what is wrong with ``images``, for an error that begins with it."""
        return f"lies next to {self.masks}: masks, not images{self.count}"


def find_masks(names: list[str]) -> Masks | None:
    """Return the masks among the names of images, in folders next to theirs or in the same one; None if there are none.

    Args:
        names: paths relative to the data set, with ``/``.
    """
    return _find_mask_folders(names) or _find_mask_files(names)


def _find_mask_folders(names: list[str]) -> Masks | None:
    images: dict[str, list[str]] = {}  # parent -> names of folders
    masks: dict[str, list[str]] = {}
    for parent, name in dict.fromkeys(_list_folders(sorted(list_parents(names)))):
        for pattern, folders in ((_IMAGE_FOLDER, images), (_MASK_FOLDER, masks)):
            if pattern.fullmatch(name):
                folders.setdefault(parent, []).append(name)
    for parent in sorted(images.keys() & masks.keys()):
        for image_folder in (posixpath.join(parent, name) for name in images[parent]):
            stems = _list_stems(names, image_folder)
            for mask_folder in (posixpath.join(parent, name) for name in masks[parent]):
                if not stems.isdisjoint(_list_stems(names, mask_folder)):  # else, classes of these names
                    only = image_folder if sum(map(len, images.values())) == 1 else ""
                    return Masks(image_folder, f"{mask_folder}/", only)
    return None


def _list_stems(names: list[str], folder: str) -> set[str]:
    """List the names of files below ``folder`` without suffix, also without one or two last words such as ``_mask``."""
    stems = {posixpath.splitext(posixpath.basename(name))[0] for name in names if name.startswith(f"{folder}/")}
    shorter = {stem.rpartition("_")[0] for stem in stems}
    return (stems | shorter | {stem.rpartition("_")[0] for stem in shorter}) - {""}


def _find_mask_files(names: list[str]) -> Masks | None:
    """Find names such as 1.seg.png and 1_mask.png next to 1.jpg or 1_rgb.jpg, if they are more than a few."""
    masks: dict[str, list[str]] = {}  # path without suffix and word -> masks
    for name in _list_candidates(names):
        match = _MASK_FILE.search(name)
        if match:
            masks.setdefault(name[: match.start()] + (match["end"] or ""), []).append(name)
    if not masks:
        return None
    are_masks = {mask for group in masks.values() for mask in group}
    images: dict[str, str] = {}
    for name in names:
        stem = os.path.splitext(name)[0]
        stem = stem if stem in masks else _IMAGE_WORD.sub("", stem)
        if stem in masks and name not in are_masks:
            images.setdefault(stem, name)
    count = sum(len(masks[stem]) for stem in images)
    if not count or count * _FEW < len(names):
        return None
    stem = min(images)
    listed = " and ".join(posixpath.basename(mask) for mask in sorted(masks[stem])[:5])
    return Masks(images[stem], listed, count=f" ({count} of {len(names)} files)")


def _list_candidates(names: list[str]) -> Iterator[str]:
    """Yield the names that contain a word of `_IN_MASK_FILE`: searching each name takes seconds per million."""
    text = os.fsencode("\n".join(names))
    lower = text.lower()
    starts: dict[int, int] = {}  # start of a name -> its end
    for word in _IN_MASK_FILE:
        position = lower.find(word)
        while position >= 0:
            end = lower.find(b"\n", position) % (len(text) + 1)  # -1, after the last name, becomes its end
            starts[lower.rfind(b"\n", 0, position) + 1] = end
            position = lower.find(word, end)
    yield from (os.fsdecode(text[start:end]) for start, end in sorted(starts.items()))


def _list_folders(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the parent and the name of every folder on ``paths``."""
    for path in paths:
        parts = path.split("/")
        yield from (("/".join(parts[:depth]), part) for depth, part in enumerate(parts))
