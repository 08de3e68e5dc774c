"""Few labels: the share of a data set's labeled images that a probe learns from (DATA.PROBE_LABELS)."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from ..common.errors import UserError, shortlist
from ..common.files import existing_file, sha256
from ..datasets import ImageData

_SHARE = re.compile(r"(\d+(?:\.\d+)?)%(?::(\d{1,9}))?")


def refuse_missing(wanted: str) -> None:
    """Raises UserError if ``wanted`` is neither a share nor an existing file; without listing any images."""
    if wanted and not _is_share(wanted):
        existing_file(wanted, "list of images in DATA.PROBE_LABELS", "*.txt")


def chosen(data: ImageData, wanted: str) -> ImageData:
    """The images of ``data`` that ``wanted`` names, in the order of ``data``.

    Args:
        data: all labeled.
        wanted: ``1%``: that share of each class, rounded, at least one image; ``1%:3``: the same of fold 3 (default
            0). A fold is one order of the images of each class, and a share is its beginning, so that the images of
            1% are among those of 10%. Otherwise a text file with an image's name per line, with any of the folders
            that it is in, such as SimCLR's ``1percent.txt`` of ImageNet. Empty: all.

    Raises:
        UserError: a share that is none, a missing file, or a name in it that no image has, or that several have.
    """
    if not wanted:
        return data
    assert data.labels is not None
    if _is_share(wanted):
        percent, _, fold = wanted.partition("%")
        return data.chosen(_of_each_class(data.labels, float(percent), int(fold.removeprefix(":") or 0)))
    return data.chosen(_named(data, wanted))


def identity(wanted: str) -> str:
    """The share; of a file, its name and content, so that it may move but not change.

    Raises:
        UserError: a share that is none, or a file that cannot be read.
    """
    if not wanted or _is_share(wanted) or not Path(wanted).is_file():
        return wanted
    return f"{Path(wanted).name} (sha256 {sha256(wanted)[:16]})"


def _is_share(wanted: str) -> bool:
    found = _SHARE.fullmatch(wanted)
    if not found and "%" in wanted:
        raise UserError(f"DATA.PROBE_LABELS is {wanted!r}; write a share as 1% or 1%:3, or name a file")
    if found and not 0 < float(found[1]) <= 100:
        raise UserError(f"DATA.PROBE_LABELS is {wanted!r}; the share must be above 0% and at most 100%")
    return found is not None


def _of_each_class(labels: np.ndarray, percent: float, fold: int) -> np.ndarray:
    picked = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        order = np.random.default_rng([fold, int(label)]).permutation(members)
        picked.append(order[: max(1, round(len(members) * percent / 100))])
    return np.sort(np.concatenate(picked))


def _named(data: ImageData, file: str) -> np.ndarray:
    path = existing_file(file, "list of images in DATA.PROBE_LABELS", "*.txt")
    try:
        names = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}, the list of images in DATA.PROBE_LABELS: {error}") from error
    wanted = {Path(name).parts: name for name in names}
    if not names:
        raise UserError(f"{file} is empty; list one image name per line")
    lengths = {len(parts) for parts in wanted}
    places: dict[str, int] = {}
    for position in range(len(data)):
        parts = Path(data.image_name(position)).parts
        for name in filter(None, (wanted.get(parts[-length:]) for length in lengths)):
            if name in places:
                raise UserError(f"{file} names {name}, and several images have that name; write it with its folder")
            places[name] = position
    if missing := [name for name in names if name not in places]:
        raise UserError(f"{file} names images that the data set does not have ({len(missing)}): {shortlist(missing)}")
    positions = np.unique(np.fromiter(places.values(), np.int64))
    if len(positions) < len(names):
        raise UserError(f"{file} names an image twice; list each image once")
    return positions
