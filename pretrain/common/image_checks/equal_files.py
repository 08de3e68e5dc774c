"""Test images whose file has the same content as a training image, under whatever name."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from ..errors import UserError
from ..files import sha256

MOST_FILES = 200_000  # asking for the sizes of more takes minutes on a file server
_SAMPLE_BYTES = 512  # from the middle of a file: other photos of the same size may have the same header
_Pairs = Mapping[object, tuple[list[str], list[str]]]  # training and test files that agree in what is compared


def read_sizes(paths: Iterable[str]) -> dict[str, int]:
    """Return the sizes of files in bytes, without those that cannot be read."""
    sizes: dict[str, int] = {}
    for path in paths:
        try:
            sizes[path] = os.stat(path).st_size
        except OSError:
            continue
    return sizes


def digest_files(sizes: Mapping[str, int]) -> str:
    """Return a digest of the names, without folders, and the sizes of a data set's images.

    It is the same for a copy of the data set in another folder.
    """
    lines = sorted(f"{os.path.basename(path)}/{size}" for path, size in sizes.items())
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:16]


def find_equal_files(train: Mapping[str, int], test: Mapping[str, int]) -> dict[str, str]:
    """Map the paths of test files to a training file with the same content, the first by name.

    Sizes are compared first, then a few bytes of files of the same size; where these agree, SHA-256 decides. Files that
    cannot be read are left out.

    Args:
        train, test: what `read_sizes` returns.
    """
    sizes = {**train, **test}
    shared = {*train.values()} & {*test.values()}
    train_paths, test_paths = ([path for path, size in part.items() if size in shared] for part in (train, test))
    groups: _Pairs = _divide(train_paths, test_paths, sizes.__getitem__)
    for read in (lambda path: _read_sample(path, sizes[path]), sha256):
        groups = {
            (key, value): files for key, members in groups.items() for value, files in _divide(*members, read).items()
        }
    return {path: min(train_files) for train_files, test_files in groups.values() for path in test_files}


def list_shared_files(train: Mapping[str, int], test: Mapping[str, int]) -> list[str]:
    """List the test files that are training files, first those of the same path, then those of the same content."""
    only_train = {path: size for path, size in train.items() if path not in test}
    only_test = {path: size for path, size in test.items() if path not in train}
    equal = find_equal_files(only_train, only_test)
    same_path = sorted(train.keys() & test.keys())
    return [*same_path, *(f"{path}, which equals {other}" for path, other in sorted(equal.items()))]


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


def _read_sample(path: str, size: int) -> bytes:
    file = os.open(path, os.O_RDONLY)  # a file object takes twice the time
    try:
        return os.pread(file, _SAMPLE_BYTES, max(0, (size - _SAMPLE_BYTES) // 2))
    finally:
        os.close(file)
