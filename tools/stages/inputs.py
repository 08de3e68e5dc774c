"""The content of weights that a stage reads: it counts in the identity of the stage's work, unlike their path."""

import functools
import os
from pathlib import Path

from pretrain.common.files import sha256
from pretrain.common.run.folder import find_checkpoints


def hash_content(weights: str) -> str:
    """Return ``sha256:...`` of a weights file, or of the checkpoint of a run folder; it is empty if there is none."""
    path = Path(weights)
    if os.path.isdir(path):  # pathlib's functions raise if the name is too long
        checkpoints = find_checkpoints(path)
        if len(checkpoints) > 1:  # finding the newest valid one means reading them, which needs torch
            from transfer.weights.convert import open_source

            checkpoints = [open_source(path).path]
        path = checkpoints[0] if checkpoints else path
    if not os.path.isfile(path):
        return ""
    stat = path.stat()
    return _hash_file(path.absolute(), stat.st_size, stat.st_mtime_ns)


@functools.cache
def _hash_file(path: Path, _size: int, _mtime_ns: int) -> str:
    return f"sha256:{sha256(path)}"
