"""Weights at an address: downloaded once into iopath's cache, which Detectron2 uses, too ($FVCORE_CACHE)."""

from __future__ import annotations

import http.client
import os
from urllib.parse import urlsplit

from iopath.common.file_io import HTTPURLHandler, PathManager, get_cache_dir

from pretrain.common.errors import UserError, one_line

DETECTRON2 = "https://dl.fbaipublicfiles.com/detectron2/"  # what detectron2:// stands for


def local_file(address: str) -> str:
    """The file of an ``address``, which iopath downloads unless an earlier process did so.

    Raises:
        UserError: another kind of address, or it cannot be downloaded.
    """
    kind, _, name = address.partition("://")
    if kind not in ("detectron2", "https", "http"):
        raise UserError(f"MODEL.WEIGHTS {address} is neither a file nor a detectron2://, https:// or http:// URL")
    url, folder = DETECTRON2 + name, None
    if kind != "detectron2":  # a folder per host: paths of two hosts may be the same
        url, folder = address, os.path.join(get_cache_dir(), urlsplit(address).netloc)
    paths = PathManager()
    paths.register_handler(HTTPURLHandler())
    try:
        return paths.get_local_path(url, cache_dir=folder)
    except (OSError, http.client.HTTPException) as error:
        reason = one_line(error).removeprefix("<urlopen error ").removesuffix(">")
        raise UserError(
            f"cannot download MODEL.WEIGHTS {address}: {reason}; try again, or download it elsewhere and name the file"
        ) from error
