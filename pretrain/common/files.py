"""Files that a user names: that they are there, and what they are if they are not what was expected."""

from __future__ import annotations

import codecs
import os
import stat
from pathlib import Path

from .errors import UserError, nearest


def existing_file(path: str | Path, what: str, pattern: str = "*") -> Path:
    """``path``, if it is a file.

    Args:
        what: what it should be, for the message ("config file").
        pattern: names beside it that may have been meant.

    Raises:
        UserError: it is missing, a folder, or cannot be reached (a loop of links, a name that is too long).
    """
    path = Path(path)
    if os.path.isfile(path):
        return path
    try:
        mode = os.stat(path).st_mode
        reason = ": it is a folder" if stat.S_ISDIR(mode) else ": it is a device, a pipe or a socket"
    except (FileNotFoundError, NotADirectoryError):
        beside = [p.name for p in path.parent.glob(pattern)] if os.path.isdir(path.parent) else []
        reason = nearest(path.name, beside)
    except OSError as error:
        reason = f": {error.strerror}"
    except ValueError as error:  # a null byte, or half of a surrogate pair
        reason = f": {error}"
    raise UserError(f"no {what} at {path}{reason}")


def empty_or_text(path: str | Path) -> str:
    """What a file that should be binary is instead ("is empty", "is a text file ..."); empty if it is binary.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        start = file.read(256)
    if not start:
        return "is empty"
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(start)  # the last letter may be cut
    except UnicodeDecodeError:
        return ""
    if not all(letter.isprintable() or letter.isspace() for letter in text):
        return ""
    line = (text.strip().splitlines() or [""])[0]
    return f"is a text file, which begins with {line[:40]!r}"
