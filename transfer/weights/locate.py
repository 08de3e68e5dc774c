"""Finds the file of MODEL.WEIGHTS without reading it; downloads a URL once into iopath's cache ($FVCORE_CACHE)."""

import http.client
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from pretrain.common.errors import UserError, one_line
from pretrain.common.files import check_file
from pretrain.common.run.folder import read_stage

from ..run_folder import is_training

DETECTRON2 = "https://dl.fbaipublicfiles.com/detectron2/"  # what detectron2:// stands for


def find_weights(path: str) -> str:
    """Return the file of MODEL.WEIGHTS, and download it if it is a URL; empty means random values.

    Raises:
        UserError: a folder, nothing at all, or a URL that cannot be downloaded.
    """
    if not path:
        return ""
    if "://" in path:
        return download(path)
    if is_training(path):
        raise UserError(f"MODEL.WEIGHTS {path} is a folder; choose a file in it, such as {path}/model_final.pth")
    stage = read_stage(path) if os.path.isdir(path) else ""
    if stage:
        raise UserError(f"MODEL.WEIGHTS {path} is a run folder of the {stage} stage; {conversion_hint(path)}")
    return str(check_file(path, "weights file (MODEL.WEIGHTS)", "*.p*"))


def download(weights: str, silence_s: float = 30.0) -> str:
    """Return the file of ``weights``, a URL that iopath downloads unless an earlier process did so.

    Args:
        silence_s: how long to wait for a server before its next address is tried; the system waits for minutes, or
            forever.

    Raises:
        UserError: another kind of URL, or it cannot be downloaded.
    """
    from iopath.common.file_io import HTTPURLHandler, PathManager, get_cache_dir

    kind, _, name = weights.partition("://")
    if kind not in ("detectron2", "https", "http"):
        raise UserError(f"MODEL.WEIGHTS {weights} is neither a file nor a detectron2://, https:// or http:// URL")
    url = DETECTRON2 + name if kind == "detectron2" else weights
    host = urlsplit(weights).netloc if url == weights else ""  # paths of two hosts may be the same
    paths = PathManager()
    paths.register_handler(HTTPURLHandler())
    earlier = socket.getdefaulttimeout()
    socket.setdefaulttimeout(silence_s)  # iopath has no option for it
    try:
        return paths.get_local_path(url, cache_dir=os.path.join(get_cache_dir(), host))
    except (OSError, http.client.HTTPException) as error:
        reason = one_line(error).removeprefix("<urlopen error ").removesuffix(">")
        remedy = "try again, or download it elsewhere and pass the file"
        raise UserError(f"cannot download MODEL.WEIGHTS {weights}: {reason}; {remedy}") from error
    finally:
        socket.setdefaulttimeout(earlier)


def conversion_hint(source: str) -> str:
    """Return the command that converts a ``source`` to Detectron2's names, for an error."""
    path = Path(source)
    name = path.parent.name if path.name.startswith("checkpoint_") else path.stem
    return f"convert it first: python tools/convert_to_d2.py {source} weights/{name or 'backbone'}_d2.pth"
