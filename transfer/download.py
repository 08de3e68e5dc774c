"""Weights at an address: downloaded once into iopath's cache, which Detectron2 uses, too ($FVCORE_CACHE)."""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import socket
import sys
from urllib.parse import urlsplit

from iopath.common.file_io import HTTPURLHandler, PathManager, get_cache_dir

from pretrain.common.errors import UserError, one_line

DETECTRON2 = "https://dl.fbaipublicfiles.com/detectron2/"  # what detectron2:// stands for
_TIMEOUT_S = 60.0  # without an answer


def local_file(address: str) -> str:
    """The file of an ``address``, which is downloaded unless an earlier process did so.

    Of several processes that ask on one machine, one downloads, and the others wait for it. A file has its name once it
    is complete.

    Raises:
        UserError: another kind of address, or it cannot be downloaded.
    """
    kind, _, name = address.partition("://")
    if kind not in ("detectron2", "https", "http"):
        raise UserError(f"MODEL.WEIGHTS {address} is neither a file nor a detectron2://, https:// or http:// URL")
    own = kind == "detectron2"  # the cache has a folder per host for others: paths of two hosts may be the same
    url, folder = (
        (DETECTRON2 + name, None) if own else (address, os.path.join(get_cache_dir(), urlsplit(address).netloc))
    )
    paths = PathManager()
    paths.register_handler(HTTPURLHandler())
    earlier = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT_S)
    try:
        with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):  # a bar
            return paths.get_local_path(url, cache_dir=folder)
    except (OSError, http.client.HTTPException) as error:
        reason = one_line(error).removeprefix("<urlopen error ").removesuffix(">")
        raise UserError(
            f"cannot download MODEL.WEIGHTS {address}: {reason}; try again, or download it elsewhere and name the file"
        ) from error
    finally:
        socket.setdefaulttimeout(earlier)
