"""Keeps the listing of a large image folder, so that later runs need not list it again, which file servers do slowly.

A listing is valid as long as every folder that was listed has the same time of modification, which the file system sets
when a name is added, removed or changed. The file is memory-mapped: all processes of a machine share it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..common.image_io import Files
from ..common.run_folder import replacing
from .folders import LISTED
from .image_data import ImageData

_FORMAT = 1
_WORTH = 10_000  # images; fewer are listed faster than a file is opened
_SETTLED_NS = 2 * 10**9  # a younger folder may change again without another time of modification


def cached(what: tuple[str, str], place: Path, scan: Callable[[], ImageData]) -> ImageData:
    """What ``scan`` returns, from the file of an earlier call if no folder that it listed has changed since.

    Where the file cannot be read or written, ``scan`` is called, and nothing is said: only time is lost.

    Args:
        what: the data set and its split.
        place: the folder, as the user gave it: names of files begin with it.
    """
    key = repr((*what, str(place), "" if place.is_absolute() else os.getcwd()))
    file = _folder() / f"{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()[:32]}.pt"
    if data := _read(file, key):
        return data
    began, listed = time.time_ns(), dict[str, int]()
    before = LISTED.set(listed)
    try:
        data = scan()
    finally:
        LISTED.reset(before)
    if len(data) >= _WORTH and max(listed.values()) < began - _SETTLED_NS and isinstance(data.source, Files):
        with contextlib.suppress(OSError, RuntimeError):
            _write(file, key, data, data.source, listed)
    return data


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pretrain-to-transfer" / "listings"


def _write(file: Path, key: str, data: ImageData, files: Files, listed: dict[str, int]) -> None:
    import torch

    content = {
        "format": _FORMAT, "key": key, "listed": listed, "folder": files.folder, "classes": data.classes,
        "text": torch.from_numpy(files.text), "ends": torch.from_numpy(files.ends),
        "labels": None if data.labels is None else torch.from_numpy(data.labels),
    }  # fmt: skip
    with replacing(file) as opened:
        torch.save(content, opened)


def _read(file: Path, key: str) -> ImageData | None:
    """None: there is none, it is damaged, or a folder has changed."""
    if not file.is_file():
        return None
    import torch

    try:
        content: dict[str, Any] = torch.load(file, mmap=True, weights_only=True)
        if (content["format"], content["key"]) != (_FORMAT, key):
            return None
        if any(os.stat(folder).st_mtime_ns != modified for folder, modified in content["listed"].items()):
            return None
        labels: np.ndarray | None = None if content["labels"] is None else content["labels"].numpy()
        files = Files.of_arrays(content["folder"], content["text"].numpy(), content["ends"].numpy())
        return ImageData(files, labels, content["classes"])
    except Exception:  # whatever a damaged file raises
        return None
