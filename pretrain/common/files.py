"""Checks on files that a user names, and atomic writing."""

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import re
import shlex
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from .errors import UserError, first_line, one_line, suggest_name

_NAME_BYTES = 255  # longest name that Linux file systems allow
_UNFINISHED_BYTES = 48  # what `atomic_writer` adds to a file's name, and to that of its record, weights.pth.json
_READ_REMEDIES = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "check the path",
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.ELOOP: "remove the link that leads back to itself",
}
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # starts of gzip, bzip2, xz and zstd
_EXAMPLES = ("digits", "trees")  # folders of datasets/ that recipes and pages use, and tools/make_data.py makes


def check_file(path: str | Path, description: str, pattern: str = "*") -> Path:
    """Check that ``path`` is a file, and return it.

    Args:
        description: what the file should be, for the error ("config file").
        pattern: the names of files next to it that the error may suggest.

    Raises:
        UserError: it is missing, or not a file.
    """
    check_not_url(path, description)
    path = Path(path)
    if os.path.isfile(path):
        return path
    if os.path.isdir(path):
        raise UserError(f"no {description} at {path}: it is a folder; pass a file in it")
    names = [neighbor.name for neighbor in path.parent.glob(pattern)] if os.path.isdir(path.parent) else []
    raise UserError(f"no {description} at {path}{suggest_name(path.name, names)}")


def check_not_url(path: str | Path, description: str) -> None:
    """Raise UserError if the path of an input is a URL; ``description`` as in `check_file`."""
    if "://" in str(path):
        raise UserError(f"the {description} {path} is a URL; download it and pass the file's path")


def suggest_making(path: str | Path) -> str:
    """Return `"; make it with COMMAND"` if ``path`` is in a missing folder of example data; "" for any other."""
    for folder in (Path(path), *Path(path).parents):
        if folder.name in _EXAMPLES and folder.parent.name == "datasets" and not folder.exists():
            return f"; make it with python tools/make_data.py {folder.name} --output {shlex.quote(str(folder))}"
    return ""


def expand(path: str | Path) -> str:
    """Replace the environment's variables and the user's home in a path: in a YAML file, no shell does it."""
    return os.path.expanduser(os.path.expandvars(path))


def check_output_path(path: str, option: str, *, is_file: bool = False) -> None:
    """Raise UserError if the output path ``path`` is a URL, or would be a folder that nobody would find again.

    Args:
        is_file: it is a file that `atomic_writer` writes, whose name must be shorter than a folder's.
    """
    if not path.isprintable():
        raise UserError(f"{option} is {path!r}, which contains unprintable characters; choose another name")
    if os.path.expanduser(path) != path:  # a shell replaces it only at the start of a word
        raise UserError(f"{option} is {path!r}, whose ~ was not replaced; write {os.path.expanduser(path)}")
    if "://" in path:
        raise UserError(f"{option} is {path!r}, a URL; choose a folder, and copy it there afterwards")
    if any(len(os.fsencode(part)) > _NAME_BYTES for part in Path(path).parts):
        raise UserError(f"{option} is {path!r}; choose names no longer than {_NAME_BYTES} bytes")
    longest = _NAME_BYTES - _UNFINISHED_BYTES
    if is_file and len(os.fsencode(Path(path).name)) > longest:
        raise UserError(f"{option} is {path!r}; choose a name no longer than {longest} bytes")
    variable = re.search(r"^.*?\$[{\w][^/]*", path)
    if variable and not os.path.isdir(variable[0]):
        raise UserError(f"{option} is {path!r}, whose variable is not set; set it, or write the path itself")


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for reading; raise OSError for a pipe or a device, where reading may take forever."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.ENXIO, "it is a pipe or a device, not a file")


def build_read_error(path: str | Path, error: OSError, action: str = "read") -> UserError:
    """Build the error about a file or folder that cannot be read, or listed."""
    remedy = _READ_REMEDIES.get(error.errno or 0, "check the disk or the file server")
    return UserError(f"cannot {action} {path}: {error.strerror or one_line(error)}; {remedy}")


def read_start(path: str | Path) -> bytes:
    """Return the first 512 bytes of a file."""
    with open(path, "rb") as file:
        return file.read(512)


def explain_content(content: bytes, *, is_text: bool = False) -> str:
    """Explain content that is of no format of its kind of file, with the remedy; return "" for any other.

    It is empty, compressed, a Git LFS pointer, or text such as a web page.

    Args:
        is_text: the format is text, so that only a web page is recognized among texts.
    """
    start = content[:512]
    if not start:
        return "it is empty; use another copy"
    if start.startswith(_COMPRESSED):
        return "it is compressed; decompress it first"
    if start.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS; run git lfs pull"
    is_page = start.lstrip().startswith(b"<")
    if re.search(rb"[\x00-\x08\x0e-\x1f]", start) or (is_text and not is_page):
        return ""
    return f"it contains text, {' '.join(start.decode(errors='replace').split())[:60]!r}; download the file itself"


def check_not_sharded(folder: str | Path) -> None:
    """Raise UserError if ``folder`` contains the shards of a checkpoint of torch.distributed (FSDP) or DeepSpeed."""
    folder = Path(folder)
    patterns = ("*.distcp", "*/*.distcp", "*mp_rank_*", "*/*mp_rank_*")
    if any(any(folder.glob(pattern)) for pattern in patterns):
        command = f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} weights.pth"
        remedy = f"merge them ({command}; for DeepSpeed: its zero_to_fp32.py) and pass the merged file"
        raise UserError(f"{folder} contains the shards of a checkpoint; {remedy}")


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal; raise UserError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise build_read_error(path, error) from error


def atomic_write(path: str | Path, data: bytes | str) -> None:
    """Write a file completely or not at all (see `atomic_writer`); raise UserError if it cannot be written."""
    if isinstance(data, str):
        data = data.encode(errors="backslashreplace")  # it may contain a path, which need not be UTF-8
    with translate_write_errors(path), atomic_writer(path) as file:
        file.write(data)


@contextlib.contextmanager
def translate_write_errors(path: str | Path, resume: bool = False) -> Iterator[None]:
    """Convert an OSError of writing or removing ``path`` to UserError (see `build_write_error`)."""
    try:
        yield
    except OSError as error:
        raise build_write_error(path, error, resume) from error


@contextlib.contextmanager
def atomic_writer(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file that replaces ``path`` when the block ends; after an error nothing has changed.

    It has the suffix of ``path`` and is next to it, under a name that no other process, thread or machine uses. File
    and folder are synced: a power cut leaves the old file or the new one.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp{path.suffix}")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # on a read-only disk this fails too
            temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove_unfinished(folder: Path, file: str = "") -> None:
    """Remove the temporary files that a killed `atomic_writer` left in ``folder``, or only those of ``file``."""
    prefix = f".{glob.escape(file)}." if file else "."  # includes companions, such as weights.pth.json
    for path in folder.glob(f"{prefix}*{'[0-9a-f]' * 32}.tmp*"):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Run the block in one process at a time, or without a lock on file systems that do not support locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(open(path, "w")), fcntl.LOCK_EX)
        yield


def read_json(path: str | Path, kind: type = dict, build: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Read the JSON object in a file, or the array if ``kind`` is list; raise UserError if that is impossible.

    ``build`` makes each object from its keys and values (default: a dictionary, which has the last of equal keys).
    """
    try:
        content = Path(path).read_bytes()
        value = json.loads(content, object_pairs_hook=build)  # in UTF-8, 16 or 32, with or without a byte-order mark
    except OSError as error:
        raise build_read_error(path, error) from error
    except UserError:  # of ``build``
        raise
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError
        explanation = explain_content(content, is_text=True)
        if explanation:
            raise UserError(f"{path} is not JSON: {explanation}") from error
        raise UserError(f"{path} is not JSON ({first_line(error)}); restore it, or save it as UTF-8") from error
    if not isinstance(value, kind):
        raise UserError(f"{path} contains a JSON {type(value).__name__}, not a {kind.__name__}; it is the wrong file")
    return value


def make_folder(path: str | Path) -> None:
    """Make a folder and its parents; raise UserError if that is impossible."""
    with translate_write_errors(path):
        Path(path).mkdir(parents=True, exist_ok=True)


def json_text(value: Any, indent: int | None = None) -> str:
    """Format ``value`` as JSON, with NaN and infinities as null (JSON cannot express them)."""
    return json.dumps(_replace_nonfinite(value), indent=indent, allow_nan=False)


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically; NaN becomes null."""
    atomic_write(path, json_text(value, indent=2) + "\n")


def build_write_error(path: str | Path, error: OSError, resume: bool = False) -> UserError:
    """Build the error about a file that could not be written.

    Args:
        resume: the run has started, so it should resume in this folder instead of starting in another one.
    """
    remedy = "make the folder writable"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free space"
    elif isinstance(error, FileExistsError):  # where a folder is to be made
        is_link = os.path.islink(error.filename or path)
        remedy = "make the folder that the link leads to" if is_link else "move the file away"
    remedy += " and run again to resume" if resume else " or choose another folder"
    return UserError(f"cannot write {path}: {error.strerror or one_line(error)}; {remedy}")


def remove(path: str | Path) -> None:
    """Remove a file of a run if it exists; raise UserError if the disk fails."""
    with translate_write_errors(path, resume=True):
        Path(path).unlink(missing_ok=True)


def check_writable(path: str, option: str) -> None:
    """Raise UserError unless a file at ``path`` can be written; call it before the work whose result it is."""
    check_output_path(path, option, is_file=True)
    if os.path.isdir(path):
        raise UserError(f"{path} is a folder; pass a file in it")
    folder = next(parent for parent in Path(path).absolute().parents if os.path.lexists(parent))
    with translate_write_errors(path):
        tempfile.TemporaryFile(dir=folder).close()


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _replace_nonfinite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_nonfinite(v) for v in value]
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
