"""Groups of images that belong together, such as the frames of one video, from image records in COCO's format."""

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from pretrain.common.errors import UserError, shorten_list

log = logging.getLogger(__name__)
_VIDEO_FIELD = "video_id"
_FRAME = r"^(.*\D)(\d+)\.\w+$"  # the name of a video or a folder, then the number of a frame
_COPY = r"^(.+)\.rf\.\w+\.\w+$"  # Roboflow writes the augmented copies of one photo as photo_jpg.rf.HASH.jpg
_MIN_FRAMES = 5
_MIN_EQUAL_STEPS = 0.7  # of the steps between frame numbers: some frames are left out; numbered photos have gaps


def read_groups(images: Sequence[Mapping[str, Any]], group_by: str) -> dict[Any, str]:
    """Map the id of each image to the name of its group.

    Args:
        images: image records in COCO's format.
        group_by: a field of the records (``video_id``; ``extra.video`` for a field in a field) if any record has it;
            otherwise a regular expression that is searched in file_name: its first capture group, or the whole match,
            names the group.

    Raises:
        UserError: an image has no group, all images have the same, or the regular expression is invalid.
    """
    names = [_read_field(image, group_by) for image in images]
    has_field = any(names)
    if not has_field:
        names = _search(group_by, [image["file_name"] for image in images])
    missing = [image["file_name"] for image, name in zip(images, names, strict=True) if not name]
    if missing:
        where = "have no such field" if has_field else "have neither such a field nor such a file_name"
        what = f"{len(missing)} of {len(images)} images {where}: {shorten_list(missing)}"
        remedy = "choose a field of all image records, or a regular expression that is found in each file_name"
        raise UserError(f"--group-by {group_by!r}: {what}; {remedy}")
    if len(set(names)) == 1:
        raise UserError(f"--group-by {group_by!r} puts all images into one group, {names[0]!r}; choose smaller groups")
    return {image["id"]: name for image, name in zip(images, names, strict=True)}


def find_obvious_groups(images: Sequence[Mapping[str, Any]]) -> str:
    """Describe images that seem to belong together, and the option that keeps them so; "" if there are none."""
    videos = [_read_field(image, _VIDEO_FIELD) for image in images]
    if all(videos) and 1 < len(set(videos)) < len(videos):
        return f"the images have a {_VIDEO_FIELD}; to keep videos whole, add --group-by {_VIDEO_FIELD}"
    for pattern, what in ((_COPY, "copies of one photo"), (_FRAME, "frames of one video")):
        members: dict[str, list[re.Match[str]]] = {}
        for image in images:
            match = re.search(pattern, image["file_name"])
            if match:
                members.setdefault(match[1], []).append(match)
        is_run = _is_run_of_frames if pattern == _FRAME else _is_repeated
        groups = [matches for matches in members.values() if is_run(matches)]
        if len(groups) > 1 and sum(map(len, groups)) >= len(images) / 2:
            names = f"{groups[0][0].string} and {groups[0][1].string}"
            return f"{names} look like {what}; if they are, keep them in one split with --group-by '{pattern}'"
    return ""


def warn_of_obvious_groups(images: Sequence[Mapping[str, Any]]) -> None:
    """Log a warning if images of both splits seem to belong together."""
    groups = find_obvious_groups(images)
    if groups:
        log.warning(f"train and val may share their scenes: {groups}")


def warn_of_groups(
    classes_of: Mapping[Any, set[Any]],
    class_names: Mapping[Any, str],
    group_of: Mapping[Any, str],
    val_images: set[Any],
    count: int,
) -> None:
    """Log the groups that have more images than val should have, and the classes that only one group has.

    Args:
        classes_of: the classes of each image, by its id.
        class_names: the name of each class.
        group_of: the group of each image.
        val_images: the ids of the images of val, of which there should be ``count``.
    """
    sizes = Counter(group_of.values())
    if len(sizes) == len(group_of):
        log.warning("each image is a group by itself: --group-by changes nothing")
    too_large = [f"{name} ({size})" for name, size in sizes.most_common() if size > count]
    if too_large:
        what = f"{len(too_large)} of {len(sizes)} groups have more images than val should have, {count}"
        log.warning(f"{what}: {shorten_list(too_large)}; val has {len(val_images)}")
    groups_of: dict[Any, set[str]] = defaultdict(set)
    for image, labels in classes_of.items():
        for label in labels:
            groups_of[label].add(group_of[image])
    in_val = {group_of[image] for image in val_images}
    for split in ("train", "val"):
        confined = [
            f"{name} ({group})"
            for label, name in class_names.items()
            if len(groups_of[label]) == 1
            for group in groups_of[label]
            if (group in in_val) == (split == "val")
        ]
        if confined:
            log.warning(f"only {split} has these classes, each of which occurs in one group: {shorten_list(confined)}")


def _is_repeated(matches: Sequence[re.Match[str]]) -> bool:
    return len(matches) > 1


def _is_run_of_frames(matches: Sequence[re.Match[str]]) -> bool:
    """Return whether there are several images, most of which have numbers in constant steps."""
    numbers = sorted(int(match[2]) for match in matches)
    steps = Counter(later - earlier for earlier, later in pairwise(numbers))
    return len(numbers) >= _MIN_FRAMES and steps.most_common(1)[0][1] >= _MIN_EQUAL_STEPS * steps.total()


def _read_field(image: Mapping[str, Any], field: str) -> str:
    """Return the value of a field as text; "" if the record does not have it, or it is no text or number."""
    value: Any = image
    for name in field.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return str(value) if isinstance(value, str | int | float) else ""


def _search(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the first capture group, or else the whole match, of a pattern in each name; "" where it is not found."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        problem = f"is neither a field of the image records nor a regular expression ({error})"
        raise UserError(f"--group-by {pattern!r} {problem}; see the help of make_data.py split") from error
    matches = [compiled.search(name) for name in names]
    return [(match[1 if compiled.groups else 0] or "") if match else "" for match in matches]
