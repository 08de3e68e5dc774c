"""The folder of the sockets by which loader workers hand over the memory of their batches."""

import multiprocessing
import shutil
import socket
import tempfile
from multiprocessing import util
from pathlib import Path
from typing import Any

from ..errors import UserError

_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


def choose_socket_folder() -> None:
    """Make multiprocessing create its sockets in a folder where this is possible.

    It uses TMPDIR, whose path may be too long for a socket (about 75 characters are left), or whose file system may
    not support sockets. A worker would then fail silently to send its batches.

    Raises:
        UserError: sockets can be created neither in TMPDIR nor in any of the usual folders.
    """
    process: Any = multiprocessing.current_process()
    folder = process._config.get("tempdir")
    if folder and not _find_fault(folder):
        return
    faults: list[str] = []
    parents = [*_SHORT_FOLDERS]
    try:
        parents.insert(0, tempfile.gettempdir())
    except FileNotFoundError as error:
        faults.append(str(error))
    for parent in parents:
        try:
            folder = tempfile.mkdtemp(prefix="pymp-", dir=parent)
        except OSError as error:
            faults.append(str(error))
            continue
        util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)  # as multiprocessing's own
        fault = _find_fault(folder)
        if not fault:
            process._config["tempdir"] = folder  # workers inherit it
            return
        faults.append(fault)
    problem = f"loader workers cannot create sockets in any of {', '.join(parents)} ({faults[0]})"
    raise UserError(f"{problem}; set TMPDIR to a writable folder with a short path, or DATALOADER.NUM_WORKERS 0")


def _find_fault(folder: str) -> str:
    """Return why a socket cannot be created in ``folder``, or an empty string."""
    path = tempfile.mktemp(prefix="listener-", dir=folder)  # as multiprocessing's names, which are as long
    try:
        with socket.socket(socket.AF_UNIX) as trial:
            trial.bind(path)
        Path(path).unlink()
    except OSError as error:
        return str(error)
    return ""
