"""Test images whose file has the same content as a training image, under whatever name."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from pretrain.common.errors import UserError
from pretrain.common.files import sha256

_SAMPLE_BYTES = 4096  # from the middle of a file: other photos of the same size may have the same header
_Pairs = Mapping[object, tuple[list[str], list[str]]]  # training and test files that agree in what is compared


def find_equal_files(train: Iterable[str], test: Iterable[str]) -> dict[str, str]:
    """Map the paths of test files to a training file with the same content, the first by name.

    Sizes are compared first, then a few bytes of files of the same size; where these agree, SHA-256 decides. Files that
    cannot be read are left out.
    """
    groups: _Pairs = {(): (list(train), list(test))}
    for read in (os.path.getsize, _read_sample, sha256):
        groups = {
            (key, value): files for key, members in groups.items() for value, files in _divide(*members, read).items()
        }
    return {path: min(train_files) for train_files, test_files in groups.values() for path in test_files}


def _divide(train: list[str], test: list[str], read: Callable[[str], object]) -> _Pairs:
    """Divide files by what ``read`` returns for them, without values that only train or only test has."""
    groups: dict[object, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for position, paths in enumerate((train, test)):
        for path in paths:
            try:
                groups[read(path)][position].append(path)
            except (OSError, UserError):
                continue
    return {value: files for value, files in groups.items() if all(files)}


def _read_sample(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size // 2 - _SAMPLE_BYTES // 2))
        return file.read(_SAMPLE_BYTES)
