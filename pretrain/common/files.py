"""Files that a user names: whether they exist, what they are if not what was expected, and their SHA-256."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from .errors import UserError, nearest


def existing_file(path: str | Path, what: str, pattern: str = "*") -> Path:
    """``path``, if it is a file.

    Args:
        what: what it should be, for the message ("config file").
        pattern: files next to it whose names may have been meant.

    Raises:
        UserError: it is missing, or no file.
    """
    path = Path(path)
    if os.path.isfile(path):
        return path
    beside = [p.name for p in path.parent.glob(pattern)] if os.path.isdir(path.parent) else []
    raise UserError(f"no {what} at {path}{': it is a folder' if os.path.isdir(path) else nearest(path.name, beside)}")


def check_name(path: str, option: str) -> None:
    """Raises UserError for a path to write to that no log, script or table can show."""
    if not path.isprintable():
        raise UserError(
            f"{option} is {path!r}, with a line break, a control character or bytes that are not UTF-8; choose another "
            "name"
        )


def empty_or_text(path: Path) -> str:
    """Describes a file that is empty or holds text, such as an error page or a Git LFS pointer; or ""."""
    with open(path, "rb") as file:
        start = file.read(512)
    if not start:
        return "it is empty"
    if re.search(rb"[\x00-\x08\x0e-\x1f]", start):
        return ""
    return f"it holds text, {' '.join(start.decode(errors='replace').split())[:60]!r}"


def sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal; UserError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
