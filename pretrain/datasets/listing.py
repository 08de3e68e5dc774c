"""Keeps the listing of a large image folder, so that later runs need not list it again, which file servers do slowly.

A listing is valid as long as every folder that was listed has the same time of modification, which the file system sets
when a name is added, removed or changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..common.image_io import Files
from ..common.run_folder import replacing
from .folders import LISTED
from .image_data import ImageData

_FORMAT = 1  # raise it when other code would list other images
_WORTH = 10_000  # images; fewer are listed faster than a file is opened
_SETTLED_NS = 2 * 10**9  # a younger folder may change again without another time of modification


def cached(what: tuple[str, str], place: Path, scan: Callable[[], ImageData]) -> ImageData:
    """What ``scan`` returns, from the file of an earlier call if no folder that it listed has changed since.

    Where the file cannot be read or written, ``scan`` is called, and nothing is said: only time is lost.

    Args:
        what: the data set and its split.
        place: the folder, as the user gave it: names of files begin with it.
    """
    key = repr((_FORMAT, *what, str(place), "" if place.is_absolute() else os.getcwd()))
    if (folder := _folder()) is None:
        return scan()
    file = folder / f"{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()[:32]}.safetensors"
    if data := read(file, key):
        return data
    began, listed = time.time_ns(), dict[str, int]()
    before = LISTED.set(listed)
    try:
        data = scan()
    finally:
        LISTED.reset(before)
    if len(data) >= _WORTH and max(listed.values()) < began - _SETTLED_NS and isinstance(data.source, Files):
        with contextlib.suppress(OSError):
            _write(file, key, data, data.source, listed)
    return data


def _folder() -> Path | None:
    """None: this user has no home, as in a container that runs with somebody's number."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(cache) / "pretrain-to-transfer" / "listings"


def _write(file: Path, key: str, data: ImageData, files: Files, listed: dict[str, int]) -> None:
    arrays = {"text": files.text, "ends": files.ends}
    if data.labels is not None:
        arrays["labels"] = data.labels
    about = {"key": key, "listed": listed, "folder": files.folder, "classes": data.classes}
    with replacing(file) as opened:
        opened.write(save(arrays, {"listing": json.dumps(about)}))


def read(file: Path, key: str) -> ImageData | None:
    """The listing in ``file``; None: there is none, it is damaged, or a folder has changed."""
    try:
        with safe_open(file, "numpy") as opened:
            about: dict[str, Any] = json.loads(opened.metadata()["listing"])
            if about["key"] != key or any(os.stat(f).st_mtime_ns != at for f, at in about["listed"].items()):
                return None
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        files = Files.of_arrays(about["folder"], arrays["text"], arrays["ends"])
        return ImageData.of_file(files, arrays.get("labels"), about["classes"])
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
